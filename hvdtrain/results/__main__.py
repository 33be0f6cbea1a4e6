"""The command line of the results: `hvdtrain results ...`."""

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

from hvdtrain.results import plots
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure

if TYPE_CHECKING:
    from hvdtrain.results.alike import Chosen
    from hvdtrain.results.folders import Problem
    from hvdtrain.results.load import Loaded
    from hvdtrain.results.table import Table

PURPOSE = """Tables, figures and a report from the records that runs left; nothing is ever taken from a log.

examples:
  hvdtrain results list results/
  hvdtrain results scaling results/lucero2022 --where 'strategy=allreduce'
  hvdtrain results table results/ --where 'rate_mbit=10 and hosts>1' --format markdown
  hvdtrain results accuracy results/ --target 0.95
  hvdtrain results strategies results/ --target 0.95
  hvdtrain results energy results/ --reference cruz2021
  hvdtrain results compare results/before results/after --threshold 5%
  hvdtrain results plot time results/ -o time.svg
  hvdtrain results report results/ -o report.html

A root is a run's folder, or a folder with runs somewhere below it; several may be given (default: results/). Only
complete runs enter figures. Runs that differ in nothing but seed, repeat and luck are put together, and each figure is
their mean with its 95 % interval. What was found wrong with files goes to standard error.
"""
FORMATS = ("table", "csv", "json", "markdown", "latex")
SHOWN_PROBLEMS = 10
RESULTS = Path("results")
TARGET = (None, 0.95)
"""A score's name, None for the primary metric, and its value"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain results", description=PURPOSE)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def rooted(one: argparse.ArgumentParser) -> None:
        one.add_argument("roots", nargs="*", type=Path, default=[RESULTS], metavar="ROOT")
        one.add_argument("--where", metavar="TEST", help="only runs with, e.g., 'rate_mbit=10 and hosts>1'")

    def add(name: str, purpose: str, *, roots: bool = True, forms: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        if roots:
            rooted(one)
        if forms:
            one.add_argument("--format", choices=FORMATS, default="table", help="how to print (default: table)")
            one.add_argument("--json", action="store_const", dest="format", const="json", help="same as --format json")
            one.add_argument("--detail", action="store_true", help="each figure on a line, with all of its spread")
        return one

    def grouped(one: argparse.ArgumentParser) -> None:
        one.add_argument("--group-by", metavar="A,B,..", help="columns or settings that make a group (default: all)")

    def raced(one: argparse.ArgumentParser, what: str) -> None:
        words = f"{what}: 0.95, 95%% (default) of the primary metric, or SCORE=VALUE"
        one.add_argument("--target", type=target, default=TARGET, help=words)

    def based(one: argparse.ArgumentParser) -> None:
        one.add_argument("--baseline", metavar="TEST", help="what to compare with, e.g. 'hosts=1 and device=gpu'")
        one.add_argument("--reference", metavar="STUDY", help="print a published study's figures too, e.g. cruz2021")

    add("list", "all runs and their state")
    show = add("show", "everything known of one run", roots=False)
    show.add_argument(
        "run", type=Path, metavar="RUN", help="its folder, or its name as `list` prints it, or a beginning"
    )
    show.add_argument("roots", nargs="*", type=Path, default=[RESULTS], metavar="ROOT", help="where the name is")
    grouped(add("table", "the main figures of each group of repeats"))
    scaling = add("scaling", "does each added host make training faster, and by how much")
    based(scaling)
    scaling.add_argument("--count", choices=("hosts", "ranks"), help="what is added (default: whichever varies)")
    based(add("energy", "joules, energy-delay product, samples per joule"))
    accuracy = add("accuracy", "accuracies, and the time to reach one")
    raced(accuracy, "score of an epoch")
    grouped(accuracy)
    chosen = add("strategies", "which strategy gets to an accuracy soonest, at each rate, and at what cost")
    raced(chosen, "score of an epoch")
    words = "each strategy, and one host, with the batch, learning rate and epochs that got there soonest"
    chosen.add_argument("--best", action="store_true", help=words)
    add("inference", "what a training step and inference take on each device, and from which size on which is faster")
    grouped(add("phases", "where the time goes"))
    compare = add("compare", "whether B is worse than A (exit code 1; 65: nothing to compare)", roots=False)
    compare.add_argument("a", type=Path, metavar="A", help="a run's folder, or a folder of runs, or a run's name")
    compare.add_argument("b", type=Path, metavar="B")
    compare.add_argument("--threshold", type=fraction, default=0.05, help="smallest change that counts (default: 5%%)")
    compare.add_argument("--where", metavar="TEST", help="only runs with, e.g., 'hosts>1'")
    export = add("export", "every column of every run, for other programs", forms=False)
    export.add_argument("--format", choices=("csv", "json", "parquet"), default="csv", help="default: csv")
    export.add_argument("--json", action="store_const", dest="format", const="json", help="same as --format json")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="instead of standard output")
    plot = add("plot", "a figure as SVG, PNG or PDF", roots=False, forms=False)
    plot.description = "A figure:\n" + "\n".join(f"  {name:<14}{what}" for name, (what, *_) in plots.KINDS.items())
    plot.add_argument("kind", choices=tuple(plots.KINDS), metavar="KIND")
    report = add("report", "one self-contained HTML page: summary, figures, tables, definitions", forms=False)
    for one in (plot, report):
        raced(one, "score that strategies race to")
        if one is plot:
            rooted(one)
            one.add_argument("--count", choices=("hosts", "ranks"), default="hosts", help="default: hosts")
            one.add_argument("--runs", metavar="A,B,..", default="", help="names of runs (power, resources)")
        one.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    return top


def fraction(text: str) -> float:
    """Reads a share, 0.05 or 5%, as a number from 0 to 1."""
    value = amount(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: give, e.g., 0.05 or 5%")
    return value


def amount(text: str) -> float:
    """Reads a number, or a share in percent."""
    with contextlib.suppress(ValueError):
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if math.isfinite(value):
            return value
    raise argparse.ArgumentTypeError(f"{text} is no number: give, e.g., 0.95, 95% or 60")


def target(text: str) -> tuple[str | None, float]:
    """Reads what TARGET has."""
    name, _, value = text.rpartition("=")
    return name or None, amount(value)


# --- what is read -----------------------------------------------------------------------------------------------------


def read(roots: Sequence[Path], where: str | None) -> Loaded:
    """The runs below the roots that `where` chooses. Raises Failure (2) for a wrong expression or root."""
    from hvdtrain.results import folders, groups, load
    from hvdtrain.results.where import Where

    loaded = load.load([root for root in roots if root != RESULTS or folders.there(root)])
    loaded.roots = list(roots)
    if where is not None and len(loaded.runs):
        chosen = Where(where, groups.kinds(loaded.runs))
        columns = {name: groups.resolve(loaded.runs, name) for name in chosen.names}
        keep = [chosen.test(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        loaded = dataclasses.replace(loaded, runs=loaded.runs[keep].reset_index(drop=True), where=where)
    return loaded


def baseline(text: str | None, loaded: Loaded) -> Chosen | None:
    """The groups of --baseline. Raises Failure (2)."""
    from hvdtrain.results import groups
    from hvdtrain.results.alike import Chosen
    from hvdtrain.results.where import Where

    if text is None:
        return None
    where = Where(text, groups.fact_kinds(groups.setting_names(loaded.runs)), option="--baseline")
    return Chosen(lambda group: where.test(dict.fromkeys(where.names) | group.facts), frozenset(where.names))


def columns(text: str | None, loaded: Loaded) -> list[str] | None:
    """The names of --group-by. Raises Failure (2)."""
    from hvdtrain.results import groups

    if text is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    known = groups.kinds(loaded.runs)
    for name in names:
        if name not in known:
            raise Failure(
                f"--group-by: no column {name!r}{near(name, known)}; known: {', '.join(sorted(known))}", exits.USAGE
            )
    return names


# --- what is said -----------------------------------------------------------------------------------------------------


def tables(asked: argparse.Namespace, loaded: Loaded) -> list[Table]:
    """The tables of a command that makes tables of the roots' runs."""
    from hvdtrain.results import accuracy, devices, energy, reference, scaling_table, strategies
    from hvdtrain.results import tables as plain

    if asked.command == "list":
        return [plain.listing(loaded)]
    if asked.command in ("scaling", "energy"):
        study = None if asked.reference is None else reference.load(asked.reference)
        base = baseline(asked.baseline, loaded)
        if asked.command == "energy":
            return energy.energy(loaded, base, study)
        return scaling_table.scaling(loaded, asked.count, base, study)
    if asked.command == "strategies":
        return [strategies.strategies(loaded, asked.target[1], asked.best)]
    if asked.command == "inference":
        return [devices.inference(loaded)]
    by = columns(asked.group_by, loaded)
    if asked.command == "accuracy":
        return [accuracy.accuracy(loaded, asked.target[1], by)]
    return [plain.phases(loaded, by) if asked.command == "phases" else plain.overview(loaded, by)]


def say(found: Sequence[Table], asked: argparse.Namespace, problems: Sequence[Problem]) -> None:
    from hvdtrain.results import output
    from hvdtrain.results.table import detail

    shown = [detail(table) if asked.detail else table for table in found]
    if asked.format == "json":
        documents = [output.as_document(table, problems) for table in shown]
        document: Any = documents[0] if len(documents) == 1 else {"schema": output.SCHEMA, "tables": documents}
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(output.FORMATS[asked.format](table) for table in shown))
    sys.stdout.flush()
    complain(problems, everything=asked.command in ("list", "show"))


def complain(problems: Sequence[Problem], *, everything: bool = False) -> None:
    """Prints what is wrong with files on standard error."""
    shown = problems if everything else problems[:SHOWN_PROBLEMS]
    for problem in shown:
        print(f"hvdtrain: {problem}", file=sys.stderr)
    if len(shown) < len(problems):
        print(f"hvdtrain: {len(problems) - len(shown)} more of these: hvdtrain results list", file=sys.stderr)


def nothing(loaded: Loaded, where: str | None) -> Failure:
    """Why there is nothing to show, and what to do about it."""
    roots = ", ".join(map(str, loaded.roots))
    if where is not None and loaded.where:
        return Failure(f"no run in {roots} fits --where {where!r}; see `hvdtrain results list {roots}`", exits.BAD_DATA)
    return Failure(
        f"no runs in {roots}: start one with `python -m hvdtrain.resnet --epochs 1`, or many with `hvdtrain sweep "
        "launch/sweeps/quick.toml`, or name the folder that holds some",
        exits.BAD_DATA,
    )


def show(asked: argparse.Namespace) -> int:
    from hvdtrain.results import show as one

    loaded = read([named(asked.run, asked.roots)], None)
    if len(loaded.runs) != 1:
        complain(loaded.problems)
        raise Failure(f"{asked.run}: holds {len(loaded.runs)} runs; name one (hvdtrain results list)", exits.USAGE)
    say([one.facts(loaded), one.epochs(loaded)], asked, loaded.problems)
    return exits.OK


def named(run: Path, roots: Sequence[Path] = (RESULTS,)) -> Path:
    """A folder as it is given, or that of the run below the roots whose name, or a beginning of it, is given.

    Raises Failure (2) for a name that no run there has, or several.
    """
    from hvdtrain.results import folders

    if folders.there(run) or run in roots:
        return run
    below = list(folders.find([root for root in roots if folders.there(root)], []))
    fitting = [path for path in below if path.name == str(run)]
    fitting = fitting or [path for path in below if path.name.startswith(str(run))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        shown = f"{', '.join(map(str, fitting[:3]))}{', ...' if len(fitting) > 3 else ''}"
        raise Failure(f"{run}: {len(fitting)} runs are named so ({shown}): give more of the name", exits.USAGE)
    hint = near(str(run), [path.name for path in below]) or "; give a run's folder, or a folder of runs"
    what = f"no such folder, and no run of that name in {', '.join(map(str, roots))}{hint}"
    raise Failure(f"{run}: {what}", exits.USAGE)


def compare(asked: argparse.Namespace) -> int:
    from hvdtrain.results.compare import compare as compared

    before, after = (read([named(side)], asked.where) for side in (asked.a, asked.b))
    for side in (before, after):
        if side.runs.empty:
            complain(side.problems)
            raise nothing(side, asked.where)
    table, worse = compared(before, after, asked.threshold)
    say([table], asked, [*before.problems, *after.problems])
    return exits.FAILED if worse else exits.OK


def write(asked: argparse.Namespace, loaded: Loaded) -> None:
    """Makes the file of `plot` or `report`."""
    if asked.command == "plot":
        names = tuple(name for name in asked.runs.split(",") if name)
        options = plots.Options(count=asked.count, runs=names, target=asked.target[1])
        plots.save(plots.draw(asked.kind, loaded, options), asked.output)
    else:
        from hvdtrain.results import report

        report.write(loaded, asked.output, asked.target[1])
    complain(loaded.problems)
    print(exits.printable(f"hvdtrain: wrote {asked.output}"), file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Returns the exit code; raises Failure, whose message is for the user."""
    asked = parser().parse_args(arguments)
    if asked.command == "show":
        return show(asked)
    if asked.command == "compare":
        return compare(asked)
    loaded = read([named(root) for root in asked.roots], asked.where)
    if loaded.runs.empty and not getattr(asked, "reference", None):
        complain(loaded.problems)
        raise nothing(loaded, asked.where)
    score, value = goal = getattr(asked, "target", TARGET)
    if goal != TARGET:
        from hvdtrain.results import scores

        if score:
            loaded = dataclasses.replace(loaded, runs=scores.judged_by(loaded.runs, score), judged=score)
        scores.check_target(loaded.runs, value)
    if asked.command in ("plot", "report"):
        write(asked, loaded)
    elif asked.command == "export":
        from hvdtrain.results.export import export

        export(loaded.runs, asked.format, asked.output)
        complain(loaded.problems)
    else:
        say(tables(asked, loaded), asked, loaded.problems)
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
