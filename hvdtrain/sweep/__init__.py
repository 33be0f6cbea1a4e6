"""Runs a grid of experiments from a TOML file and continues after an interruption: `hvdtrain sweep FILE.toml`.

`file` reads and checks the file. `grid` expands it into an ordered list of runs. `dry_run` asks the workload for the
settings of each experiment. `missing` finds requirements that this machine does not meet. `command` builds command
lines. `network` starts hosts and throttles their links. `folder` checks the records of a run. `execute` runs
everything, and `show` prints progress and results.
"""
