"""The command line `hvdtrain results ...`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.results import figures
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure

if TYPE_CHECKING:
    from hvdtrain.results.comparability import Baseline
    from hvdtrain.results.read.folders import Problem
    from hvdtrain.results.read.frame import Loaded
    from hvdtrain.results.tables.model import Table

PURPOSE = """Tables, figures and a report from the records of runs.

examples:
  hvdtrain results list results/
  hvdtrain results scaling results/lucero2022 --where 'strategy=allreduce'
  hvdtrain results table results/ --where 'rate_mbit=10 and hosts>1' --format markdown
  hvdtrain results accuracy results/ --target 0.95
  hvdtrain results strategies results/ --target 0.95
  hvdtrain results energy results/ --baseline 'hosts=1 and device=gpu'
  hvdtrain results compare results/before results/after --threshold 5%
  hvdtrain results plot time results/ -o time.svg
  hvdtrain results report results/ -o report.html

A root is a run folder, or a folder that contains runs at any depth (default: results/). Only complete runs count. Runs
that differ only in seed and repeat form a group, and each value is their mean with its 95 % interval. Defects of files
are reported on standard error.
"""
FORMATS = ("table", "csv", "json", "markdown")
SHOWN_PROBLEMS = 10
RESULTS = Path("results")
TARGET = (None, 0.95)
"""The name of a score (None: the primary metric), and its value"""
REMOVED = {
    "inference": "use launch/studies/martin2019.py",
    "--detail": "use --format csv or --format json",
    "--reference": "use launch/studies/cruz2021.py",
    "--runs": "use launch/studies/resources.py",
}
"""Command or flag -> its replacement"""


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

    def add_target(one: argparse.ArgumentParser, what: str) -> None:
        words = f"{what}: 0.95 or 95%% (default) of the primary metric, or SCORE=VALUE"
        one.add_argument("--target", type=target, default=TARGET, help=words)

    def add_baseline(one: argparse.ArgumentParser) -> None:
        one.add_argument("--baseline", metavar="TEST", help="select the baseline, e.g. 'hosts=1 and device=gpu'")

    add("list", "all runs and their state")
    show = add("show", "everything about one run", roots=False)
    show.add_argument("run", type=Path, metavar="RUN", help="its folder, its name, or the start of its name")
    show.add_argument("roots", nargs="*", type=Path, default=[RESULTS], metavar="ROOT", help="folders to search")
    add_group_by(add("table", "the main measurements of each group of repeats"))
    scaling = add("scaling", "whether each added host makes training faster, and by how much")
    add_baseline(scaling)
    scaling.add_argument("--count", choices=("hosts", "ranks"), help="what to count (default: whichever varies)")
    add_baseline(add("energy", "joules, energy-delay product, samples per joule"))
    accuracy = add("accuracy", "accuracies, and the time to a target")
    add_target(accuracy, "score of an epoch")
    add_group_by(accuracy)
    strategies = add("strategies", "which strategy reaches a target first at each rate, and at what cost")
    add_target(strategies, "score of an epoch")
    words = "compare each strategy and one host at their fastest batch, learning rate and epochs"
    strategies.add_argument("--best", action="store_true", help=words)
    add_group_by(add("phases", "where the time goes"))
    compare = add("compare", "whether B is worse than A (exit code 1; 65: nothing to compare)", roots=False)
    compare.add_argument("a", type=Path, metavar="A", help="a run folder, a folder of runs, or the name of a run")
    compare.add_argument("b", type=Path, metavar="B")
    compare.add_argument("--threshold", type=fraction, default=0.05, help="smallest relevant change (default: 5%%)")
    compare.add_argument("--where", metavar="TEST", help="select runs, e.g. 'hosts>1'")
    export = add("export", "every column of every run, for other programs", forms=False)
    export.add_argument("--format", choices=("csv", "json", "parquet"), default="csv", help="default: csv")
    export.add_argument("--json", action="store_const", dest="format", const="json", help="same as --format json")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: standard output")
    plot = add("plot", "a figure as SVG, PNG or PDF", roots=False, forms=False)
    plot.description = "A figure:\n" + "\n".join(f"  {name:<14}{what}" for name, (what, *_) in figures.KINDS.items())
    plot.add_argument("kind", choices=(*figures.KINDS, *figures.REMOVED), metavar="KIND")
    report = add("report", "one HTML page with conclusions, figures, tables and definitions", forms=False)
    for one in (plot, report):
        add_target(one, "target of the strategies")
        if one is plot:
            add_roots(one)
            one.add_argument("--count", choices=("hosts", "ranks"), default="hosts", help="default: hosts")
        one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    return top


def fraction(text: str) -> float:
    """Parses a share, 0.05 or 5%, as a number from 0 to 1."""
    value = amount(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share; hint: give a value such as 0.05 or 5%")
    return value


def amount(text: str) -> float:
    """Parses a number, or a share in percent."""
    with contextlib.suppress(ValueError):
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if math.isfinite(value):
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a number; hint: give a value such as 0.95, 95% or 60")


def target(text: str) -> tuple[str | None, float]:
    """Parses SCORE=VALUE or VALUE; see TARGET."""
    name, _, value = text.rpartition("=")
    return name or None, amount(value)


# --- input ------------------------------------------------------------------------------------------------------------


def read(roots: Sequence[Path], where: str | None) -> Loaded:
    """The runs below the roots that `where` selects. Raises Failure (2) for a bad expression or root."""
    from hvdtrain.results import groups
    from hvdtrain.results.read import folders, frame
    from hvdtrain.results.read.where import Where

    loaded = frame.load([root for root in roots if root != RESULTS or folders.exists(root)])
    loaded.roots = list(roots)
    if where is not None and len(loaded.runs):
        chosen = Where(where, groups.kinds(loaded.runs))
        columns = {name: groups.resolve(loaded.runs, name) for name in chosen.names}
        keep = [chosen.test(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        loaded = dataclasses.replace(loaded, runs=loaded.runs[keep].reset_index(drop=True), where=where)
    return loaded


def select_baseline(text: str | None, loaded: Loaded) -> Baseline | None:
    """The groups of --baseline. Raises Failure (2)."""
    from hvdtrain.results import groups
    from hvdtrain.results.comparability import Baseline
    from hvdtrain.results.read.where import Where

    if text is None:
        return None
    where = Where(text, groups.fact_kinds(groups.setting_names(loaded.runs)), option="--baseline")
    return Baseline(lambda group: where.test(dict.fromkeys(where.names) | group.facts), frozenset(where.names))


def group_columns(text: str | None, loaded: Loaded) -> list[str] | None:
    """The names of --group-by. Raises Failure (2)."""
    from hvdtrain.results import groups

    if text is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    known = groups.kinds(loaded.runs)
    for name in names:
        if name not in known:
            what = f"no column {name!r}{near(name, known)}; known: {', '.join(sorted(known))}"
            raise Failure(f"--group-by: {what}", exits.USAGE)
    return names


def find_run(run: Path, roots: Sequence[Path] = (RESULTS,)) -> Path:
    """The path if it exists, or else the run below the roots with this name, or with a name that starts with it.

    Raises Failure (2) if there is no such run, or more than one.
    """
    from hvdtrain.results.read import folders

    if folders.exists(run) or run in roots:
        return run
    below = list(folders.find([root for root in roots if folders.exists(root)], []))
    fitting = [path for path in below if path.name == str(run)]
    fitting = fitting or [path for path in below if path.name.startswith(str(run))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        shown = f"{', '.join(map(str, fitting[:3]))}{', ...' if len(fitting) > 3 else ''}"
        raise Failure(f"{run}: ambiguous, {len(fitting)} runs match ({shown}); hint: type more of it", exits.USAGE)
    hint = near(str(run), [path.name for path in below]) or "; hint: name a run folder, or a folder of runs"
    raise Failure(f"{run}: no such folder, and no such run in {', '.join(map(str, roots))}{hint}", exits.USAGE)


# --- output -----------------------------------------------------------------------------------------------------------


def tables(options: argparse.Namespace, loaded: Loaded) -> list[Table]:
    """The tables of a command."""
    from hvdtrain.results.tables import accuracy, energy, overview, scaling, strategies

    match options.command:
        case "list":
            return [overview.listing(loaded)]
        case "scaling":
            return [scaling.table(loaded, options.count, select_baseline(options.baseline, loaded))]
        case "energy":
            return energy.tables(loaded, select_baseline(options.baseline, loaded))
        case "strategies":
            return [strategies.table(loaded, options.target[1], options.best)]
    by = group_columns(options.group_by, loaded)
    if options.command == "accuracy":
        return [accuracy.table(loaded, options.target[1], by)]
    return [overview.phases(loaded, by) if options.command == "phases" else overview.overview(loaded, by)]


def print_tables(shown: Sequence[Table], options: argparse.Namespace, problems: Sequence[Problem]) -> None:
    from hvdtrain.results import text

    if options.format == "json":
        documents = [text.as_document(table, problems) for table in shown]
        document: Any = documents[0] if len(documents) == 1 else {"schema": text.SCHEMA, "tables": documents}
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(text.FORMATS[options.format](table) for table in shown))
    sys.stdout.flush()
    print_problems(problems, everything=options.command in ("list", "show"))


def print_problems(problems: Sequence[Problem], *, everything: bool = False) -> None:
    """Prints defects of files on standard error."""
    shown = problems if everything else problems[:SHOWN_PROBLEMS]
    for problem in shown:
        print(f"hvdtrain: {problem}", file=sys.stderr)
    if len(shown) < len(problems):
        print(f"hvdtrain: {len(problems) - len(shown)} more; see `hvdtrain results list`", file=sys.stderr)


def no_runs(loaded: Loaded, where: str | None) -> Failure:
    roots = ", ".join(map(str, loaded.roots))
    if where is not None and loaded.where:
        what = f"--where {where!r} selects no run in {roots}; hint: see `hvdtrain results list`"
        return Failure(what, exits.BAD_DATA)
    hint = "start one with `python -m hvdtrain.resnet --epochs 1`, or name a folder that contains runs"
    return Failure(f"no runs in {roots}; hint: {hint}", exits.BAD_DATA)


def show(options: argparse.Namespace) -> int:
    from hvdtrain.results.tables import overview

    loaded = read([find_run(options.run, options.roots)], None)
    if len(loaded.runs) != 1:
        print_problems(loaded.problems)
        what = f"{options.run}: contains {len(loaded.runs)} runs"
        raise Failure(f"{what}; hint: name one, see `hvdtrain results list`", exits.USAGE)
    print_tables([overview.run_facts(loaded), overview.run_epochs(loaded)], options, loaded.problems)
    return exits.OK


def compare(options: argparse.Namespace) -> int:
    from hvdtrain.results.tables.compare import compare as compare_runs

    before, after = (read([find_run(side)], options.where) for side in (options.a, options.b))
    for side in (before, after):
        if side.runs.empty:
            print_problems(side.problems)
            raise no_runs(side, options.where)
    table, worse = compare_runs(before, after, options.threshold)
    print_tables([table], options, [*before.problems, *after.problems])
    return exits.FAILED if worse else exits.OK


def write(options: argparse.Namespace, loaded: Loaded) -> None:
    """Writes the file of `plot`, `report` or `export`."""
    if options.command == "plot":
        settings = figures.Options(count=options.count, target=options.target[1])
        figures.save(figures.draw(options.kind, loaded, settings), options.output)
    elif options.command == "report":
        from hvdtrain.results.report import document

        document.write(loaded, options.output, options.target[1])
    else:
        from hvdtrain.results.export import export

        export(loaded.runs, options.format, options.output)
    print_problems(loaded.problems)
    if options.output:
        print(exits.printable(f"hvdtrain: wrote {options.output}"), file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Returns the exit code. Raises Failure with a message for the user."""
    for word in [*arguments[:1], *(word for word in arguments if word.startswith("--"))]:
        if hint := REMOVED.get(word.partition("=")[0]):
            raise Failure(f"{word} was removed; hint: {hint}", exits.USAGE)
    options = parser().parse_args(arguments)
    if options.command == "show":
        return show(options)
    if options.command == "compare":
        return compare(options)
    if getattr(options, "kind", None) in figures.REMOVED:
        figures.draw(options.kind, None)  # type: ignore[arg-type]  # raises Failure
    loaded = read([find_run(root) for root in options.roots], options.where)
    if loaded.runs.empty:
        print_problems(loaded.problems)
        raise no_runs(loaded, options.where)
    score, value = goal = getattr(options, "target", TARGET)
    if goal != TARGET:
        from hvdtrain.results import scores

        if score:
            loaded = dataclasses.replace(loaded, runs=scores.judge_by(loaded.runs, score), judged_by=score)
        scores.check_target(loaded.runs, value)
    if options.command in ("plot", "report", "export"):
        write(options, loaded)
    else:
        print_tables(tables(options, loaded), options, loaded.problems)
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
