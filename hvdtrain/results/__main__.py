"""The command line `hvdtrain results ...`."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from pathlib import Path

from hvdtrain.results import RESULTS, TARGET, figures, measured
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser

PURPOSE = """Tables, figures and a report from the records of runs.

examples:
  hvdtrain results list results/
  hvdtrain results scaling results/lucero2022 --where 'strategy=allreduce'
  hvdtrain results table results/ --where 'rate_mbit=10 and hosts>1' --format markdown
  hvdtrain results accuracy results/ --target 0.95
  hvdtrain results strategies results/ --target 0.95
  hvdtrain results energy results/ --where 'device=gpu'
  hvdtrain results export results/ -o runs.csv
  hvdtrain results plot time results/ -o time.svg
  hvdtrain results report results/ -o report.html

A root is a run folder, or a folder that contains runs at any depth (default: results/). Only complete runs count. Runs
that differ only in seed and repeat form a group, and each value is their mean with its 95 % interval. Defects of files
are reported on standard error.
"""
FORMATS = ("table", "csv", "json", "markdown")


def parser() -> Parser:
    top = Parser(prog="hvdtrain results", description=PURPOSE)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add_roots(one: argparse.ArgumentParser) -> None:
        one.add_argument("roots", nargs="*", type=Path, default=[RESULTS], metavar="ROOT")
        one.add_argument("--where", metavar="TEST", help="select runs, e.g. 'rate_mbit=10 and hosts>1'")

    def add(name: str, purpose: str, *, roots: bool = True, forms: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if roots:
            add_roots(one)
        if forms:
            one.add_argument("--format", choices=FORMATS, default="table", help="output format (default: table)")
            one.add_argument("--json", action="store_const", dest="format", const="json", help="same as --format json")
        return one

    def add_group_by(one: argparse.ArgumentParser) -> None:
        one.add_argument("--group-by", metavar="A,B,..", help="columns or settings of a group (default: all)")

    def add_target(one: argparse.ArgumentParser) -> None:
        words = "score of an epoch: 0.95 or 95%% (default) of the primary metric, or SCORE=VALUE"
        one.add_argument("--target", type=target, default=TARGET, help=words)

    add("list", "all runs and their state")
    show = add("show", "everything about one run", roots=False)
    show.add_argument("run", type=Path, metavar="RUN", help="its folder, its name, or the start of its name")
    show.add_argument("roots", nargs="*", type=Path, default=[RESULTS], metavar="ROOT", help="folders to search")
    add_group_by(add("table", "the main measurements of each group of repeats"))
    add("scaling", "whether each added host makes training faster, and by how much")
    add("energy", "joules, energy-delay product, samples per joule")
    accuracy = add("accuracy", "accuracies, and the time to a target")
    add_target(accuracy)
    add_group_by(accuracy)
    strategies = add("strategies", "which strategy reaches a target first at each rate, and at what cost")
    add_target(strategies)
    words = "compare each strategy and one host at their fastest batch, learning rate and epochs"
    strategies.add_argument("--best", action="store_true", help=words)
    add_group_by(add("phases", "where the time goes"))
    export = add("export", "a table of runs with every column, for other programs", forms=False)
    export.add_argument("--to", "--format", choices=("csv", "json"), default="csv", dest="to", help="default: csv")
    export.add_argument("--json", action="store_const", dest="to", const="json", help="same as --to json")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    files = add("measured", "files of hvdtrain measure as one table", roots=False, forms=False)
    files.add_argument("files", nargs="+", type=Path, metavar="FILE")
    plot = add("plot", "a figure as SVG, PNG or PDF", roots=False, forms=False)
    kinds = (f"  {name:<14}{heading.lower()}" for name, (heading, *_) in figures.KINDS.items())
    plot.description = "\n".join(("A figure:", *kinds))
    plot.add_argument("kind", choices=tuple(figures.KINDS), metavar="KIND")
    report = add("report", "one HTML page with conclusions, figures, tables and definitions", forms=False)
    for one in (plot, report):
        add_target(one)
        if one is plot:
            add_roots(one)
        one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    return top


def target(text: str) -> tuple[str | None, float]:
    """Parses SCORE=VALUE or VALUE, a number or a share in percent; see TARGET."""
    name, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        amount = float(value[:-1]) / 100 if value.endswith("%") else float(value)
        if math.isfinite(amount):
            return name or None, amount
    raise argparse.ArgumentTypeError(f"{value} is not a number; hint: give a value such as 0.95, 95% or 60")


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure with a message for the user."""
    options = parser().parse_args(arguments)
    if options.command == "measured":
        print(measured.text([measured.read(path) for path in options.files]), end="")
        return exits.OK
    from hvdtrain.results import commands  # loads pandas

    return commands.run(options)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
