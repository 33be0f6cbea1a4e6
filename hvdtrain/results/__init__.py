"""What runs left behind, as tables, figures and a report: `hvdtrain results ...`. Reads records, nothing else.

`folders` finds run folders, `metrics` and `power` stream their files into sums, `runs` makes one row of each run and
`load` a data frame of all; `where` chooses rows, `groups` puts repeats together, `statistics`, `scaling`, `energy`,
`accuracy` and `strategies` do the arithmetic, `tables` and `show` say what is printed and `output` how. `plots` names
the figures that `figures/` draws, `report*` put tables and figures on one page; `__main__` is the command.
"""
