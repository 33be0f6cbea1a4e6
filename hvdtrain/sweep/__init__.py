"""Runs a grid of experiments point by point, and continues it after a stop: `hvdtrain sweep FILE.toml`.

`file` reads and checks the TOML file, `plan` makes an ordered list of runs of it, `command` builds the command line of
each, `preview` asks the workload for a run's dry run, `lacking` finds what this machine does not have, `estimate`
predicts durations, `network` brings hosts up and throttles their links, `folder` tells whether a run is done and its
records fit, `execute` runs everything, `show` prints progress and results; `__main__` is the command line.
"""
