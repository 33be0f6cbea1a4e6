"""Runs a grid of experiments from a TOML file and continues after an interruption: `hvdtrain sweep FILE.toml`.

`file` reads and checks the file. `grid` expands it into an ordered list of runs. `dry_run` lets the workload check the
settings of each experiment, and `gpus` finds those that need more GPUs than there are. `command` builds command lines.
`network` starts hosts and throttles their links. `folder` checks the records of a run. `execute` runs everything.
"""
