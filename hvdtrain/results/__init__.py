"""Tables, figures and a report from the records of runs: `hvdtrain results ...`.

read/            run folders -> a data frame with one row per run; filtered with --where
columns, scores  the columns of that frame and of the tables, and the scores that runs declare
groups           repeats of one experiment; statistics: means, intervals, ratios
comparability    which groups may be compared; scaling: speed-up and efficiency of comparable groups
tables/          one module per table
text, export     tables as text; the data frame as CSV or JSON
commands         the commands of the command line
figures/         figures of the tables' numbers
report/          tables and figures on one HTML page, laid out by a Jinja2 template
"""

from pathlib import Path

RESULTS = Path("results")
TARGET = (None, 0.95)
"""Default of --target: the name of a score (None: the primary metric), and its value"""
