"""A grid of experiments, run point by point and taken up again where it was left: `hvdtrain sweep FILE.toml`.

`file` reads what is asked, `plan` makes runs of it and orders them, `command` says what is typed for each, `preview`
asks the workload what a run will be, `lacking` what this machine cannot do, `estimate` how long it takes, `network`
brings hosts up and throttles their links, `folder` knows what is done and whether its record fits, `execute` runs it
all, `show` tells about it; `__main__` is the command.
"""
