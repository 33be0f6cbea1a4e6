"""The commands of `hvdtrain results`: reading, tables, files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.results import RESULTS, TARGET, figures, groups, scores, text
from hvdtrain.results.export import export
from hvdtrain.results.read import folders, frame
from hvdtrain.results.read.folders import Problem
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.read.where import Where
from hvdtrain.results.tables import accuracy, energy, overview, scaling, strategies
from hvdtrain.results.tables.model import Table
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

SHOWN_PROBLEMS = 10


# --- input ------------------------------------------------------------------------------------------------------------


def read(roots: Sequence[Path], where: str | None) -> Loaded:
    """The runs below the roots that `where` selects. Raises Failure (2) for a bad expression or root."""
    loaded = frame.load([root for root in roots if root != RESULTS or folders.exists(root)])
    loaded.roots = list(roots)
    if where is not None and len(loaded.runs):
        chosen = Where(where, groups.kinds(loaded.runs))
        columns = {name: groups.resolve(loaded.runs, name) for name in chosen.names}
        keep = [chosen.test(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
        loaded = dataclasses.replace(loaded, runs=loaded.runs[keep].reset_index(drop=True), where=where)
    return loaded


def group_columns(listed: str | None, loaded: Loaded) -> list[str] | None:
    """The names of --group-by. Raises Failure (2)."""
    if listed is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in listed.split(",")))
    known = groups.kinds(loaded.runs)
    for name in names:
        if name not in known:
            what = f"no column {name!r}{near(name, known)}; known: {', '.join(sorted(known))}"
            raise Failure(f"--group-by: {what}", exits.USAGE)
    return names


# --- output -----------------------------------------------------------------------------------------------------------


def tables(options: argparse.Namespace, loaded: Loaded) -> list[Table]:
    """The tables of a command."""
    match options.command:
        case "list":
            return [overview.listing(loaded)]
        case "scaling":
            return [scaling.table(loaded)]
        case "energy":
            return [energy.table(loaded)]
        case "strategies":
            return [strategies.table(loaded, options.target[1], options.best)]
    by = group_columns(options.group_by, loaded)
    if options.command == "accuracy":
        return [accuracy.table(loaded, options.target[1], by)]
    return [overview.phases(loaded, by) if options.command == "phases" else overview.overview(loaded, by)]


def print_tables(shown: Sequence[Table], options: argparse.Namespace, problems: Sequence[Problem]) -> None:
    if options.format == "json":
        documents = [text.as_document(table, problems) for table in shown]
        made: Any = documents[0] if len(documents) == 1 else {"schema": text.SCHEMA, "tables": documents}
        sys.stdout.write(json.dumps(made, indent=2, allow_nan=False) + "\n")
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


def nonempty(loaded: Loaded, where: str | None) -> Loaded:
    """Raises Failure (65) if there is no run."""
    if not loaded.runs.empty:
        return loaded
    print_problems(loaded.problems)
    roots = ", ".join(map(str, loaded.roots))
    what = f"no runs in {roots}; hint: start one with `python -m hvdtrain.resnet --epochs 1`, or name a folder of runs"
    if where is not None and loaded.where:
        what = f"--where {where!r} selects no run in {roots}; hint: see `hvdtrain results list`"
    raise Failure(what, exits.BAD_DATA)


# --- commands ---------------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    loaded = read([folders.find_run(options.run, options.roots)], None)
    if len(loaded.runs) != 1:
        print_problems(loaded.problems)
        what = f"{options.run}: contains {len(loaded.runs)} runs"
        raise Failure(f"{what}; hint: name one, see `hvdtrain results list`", exits.USAGE)
    print_tables([overview.run_facts(loaded), overview.run_epochs(loaded)], options, loaded.problems)
    return exits.OK


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code."""
    if options.command == "show":
        return show(options)
    loaded = nonempty(read([folders.find_run(root) for root in options.roots], options.where), options.where)
    score, value = getattr(options, "target", TARGET)
    if (score, value) != TARGET:
        if score:
            loaded = dataclasses.replace(loaded, runs=scores.judge_by(loaded.runs, score))
        scores.check_target(loaded.runs, value)
    match options.command:
        case "plot":
            figures.save(figures.draw(options.kind, loaded), options.output)
        case "report":
            from hvdtrain.results.report import document  # loads Jinja2 and matplotlib

            document.write(loaded, options.output, value)
        case "export":
            export(loaded, options.to, options.output)
        case _:
            print_tables(tables(options, loaded), options, loaded.problems)
            return exits.OK
    print_problems(loaded.problems)
    if options.output:
        print(exits.printable(f"hvdtrain: wrote {options.output}"), file=sys.stderr)
    return exits.OK
