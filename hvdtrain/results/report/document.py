"""The content of the report, one HTML page that opens offline, in a browser or on paper.

The first screen has the conclusions of the main table, one figure and that table. The page takes its numbers from the
tables and contains no date except that of the data: the same runs give the same page, to the byte.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.results import export, figures, groups, scores
from hvdtrain.results.columns import Column
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.report import facts, html
from hvdtrain.results.report.html import text
from hvdtrain.results.scaling import what_varies
from hvdtrain.results.tables import accuracy, energy, overview, scaling, strategies
from hvdtrain.results.tables.model import Table
from hvdtrain.system.exits import Failure

TITLE = "How training scales"

# Figure, in the order of the page -> heading and explanation.
CAPTIONS = {
    "time": (
        "Training time over hosts",
        "Seconds of the training phase. In a rising curve, more hosts make training slower at that rate. A single host "
        "uses no link, so it is the first point of every curve.",
    ),
    "accuracy-time": (
        "Accuracy over time",
        "Validation accuracy after each epoch, mean over the repeats, over seconds of training, validation and "
        "checkpoints. The curve furthest to the left is best.",
    ),
}

METHOD = {
    "Times": "Rank 0's monotonic clock, after work on the device has finished, without loading and initialisation "
    "(MLPerf's rule). The first steps of a process are warm-up and do not count for times per step and samples per "
    "second.",
    "Repeats": "Runs that agree in everything except seed and repeat form a group. A value is the mean over a group "
    "with its 95 % interval (Student's t); ratios have Welch's. No run is dropped for being slow.",
    "Network": "Bytes are the NIC's counters from the start of the loop to the end of the test, including headers and "
    "other traffic.",
    "Power": "A sweep separates runs with power sampling from timed runs, because sampling may slow them down. Devices "
    "without a sensor do not count.",
}


def write(loaded: Loaded, path: Path, target: float = 0.95) -> None:
    """Writes the page. `target` is a value of the primary metric. Raises Failure (73)."""
    export.write(path, page(loaded, target).encode("utf-8", "replace"))


def tables(loaded: Loaded, target: float = 0.95) -> list[Table]:
    """The tables of the page in order. Strategies are compared only if a run over several hosts reached the target."""
    race = strategies.table(loaded, target)
    raced = any(row["train_to_target_s"] is not None and row["hosts"] != 1 for row in race.rows)
    made = [*([race] if raced else []), scaling.table(loaded), overview.overview(loaded)]
    return [*made, accuracy.table(loaded, target), *energy.tables(loaded), overview.phases(loaded)]


def page(loaded: Loaded, target: float = 0.95) -> str:
    """The page as an HTML document."""
    numbers = iter(range(1, 1000))
    shown = [one for one in tables(loaded, target) if one.rows] if not groups.usable(loaded.runs).empty else []
    count = what_varies(groups.by(groups.usable(loaded.runs)))
    drawn, missing = _figures(loaded, figures.Options(count=count))
    goal = scores.goal(loaded.runs, target)
    first = _first_screen(shown, drawn.pop("time", ""), numbers, goal) if shown else "<p>No complete timing run.</p>"
    not_shown = f"<h3>Not shown</h3>\n{html.bullets(missing, 'findings')}" if missing else ""
    sections = [
        ("Figures", "\n".join([*drawn.values(), not_shown])),
        ("Tables", _main_tables(shown, numbers)),
        ("Definitions", _definitions(shown, scores.all_columns(loaded.runs))),
        ("Method", html.definitions(METHOD.items())),
        ("Environment", html.table(facts.environment(loaded), next(numbers))),
        ("Problems", _problems(loaded)),
        ("Commands", _commands(loaded, target)),
        ("All runs", html.table(overview.listing(loaded), next(numbers))),
    ]
    return html.page(TITLE, _header(loaded), first, sections)


def _first_screen(shown: list[Table], figure: str, numbers: Iterator[int], goal: str) -> str:
    """The conclusions, and next to each other a figure and the main table."""
    main = shown[0]
    what = f"Training time to {goal}" if main.name == "strategies" else "Training time for the same epochs"
    conclusions = html.bullets(main.readings.items(), "short")
    table = html.table(dataclasses.replace(main, notes=[], readings={}), next(numbers))
    return f"<h2>{text(what)}</h2>\n{conclusions}\n{figure}\n{table}"


def _header(loaded: Loaded) -> str:
    days = sorted({str(utc)[:10] for utc in loaded.runs["started_utc"].dropna()})
    when = "unknown date" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    states = loaded.runs["state"].value_counts()
    counts = ", ".join(f"{states[state]} {state}" for state in ("complete", "unfinished", "refused") if state in states)
    sweeps = sorted({str(name) for name in loaded.runs["sweep"].dropna()})
    named = f" Sweeps: {', '.join(sweeps)}." if sweeps else ""
    folders = ", ".join(map(str, loaded.roots)) + (f" where {loaded.where}" if loaded.where else "")
    return f"<p>Data of {text(when)} from {text(folders)}: {text(counts or 'no runs')}.{text(named)}</p>"


def _figures(loaded: Loaded, options: figures.Options) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Figure -> HTML of the figures that have data; and why the others have none."""
    drawn: dict[str, str] = {}
    missing: list[tuple[str, str]] = []
    for kind, (heading, caption) in CAPTIONS.items():
        if kind == "time":
            heading, caption = (words.replace("hosts", options.count) for words in (heading, caption))
        try:
            figure = figures.draw(kind, loaded, options)
        except Failure as failure:
            missing.append((heading, str(failure)))
            continue
        drawn[kind] = html.figure(figure, kind, len(drawn) + 1, heading, caption)
    return drawn, missing


def _main_tables(shown: list[Table], numbers: Iterator[int]) -> str:
    """The tables, after the notes that several of them have in common."""
    counted = Counter(note for one in shown for note in one.notes)
    common = [note for note, number in counted.items() if number > 1]
    head = f"<p>For all tables:</p>\n{html.bullets([('', note) for note in common], 'notes')}" if common else ""
    return "\n".join([head, *(html.table(one, next(numbers), common) for one in shown)])


def _definitions(shown: list[Table], known: Mapping[str, Column]) -> str:
    """The meaning of every column of the tables, and its name and unit in CSV and JSON."""
    columns = (column for one in shown for part in one.parts() for column in part.columns)
    keys = {column.key: column.heading for column in columns if column.key in known}
    units = {key: f", in {known[key].unit}" if known[key].unit else "" for key in keys}
    return html.definitions((keys[key], f"{known[key].meaning} ({key}{units[key]})") for key in keys)


def _problems(loaded: Loaded) -> str:
    """Everything that kept a run, or a part of one, out of the tables."""
    runs = loaded.runs
    items = [(run, state) for run, state in zip(runs["run"], runs["state"], strict=True) if state != "complete"]
    marked = runs[runs["marked"].notna()]
    items += [(run, f"marked, {why}") for run, why in zip(marked["run"], marked["marked"], strict=True)]
    items += [("", str(problem)) for problem in loaded.problems]
    return (
        html.bullets(items, "findings") if items else "<p>None: every run is complete, and every record was read.</p>"
    )


def _commands(loaded: Loaded, target: float) -> str:
    """The command for this page, and the commands of the runs."""
    words = [str(root) for root in loaded.roots] + (["--where", loaded.where] if loaded.where else [])
    goal = f"{loaded.judged_by}={target!r}" if loaded.judged_by else repr(target)
    words += [] if goal == "0.95" else ["--target", goal]
    report = shlex.join(["hvdtrain", "results", "report", *words, "-o", "report.html"])
    plot = shlex.join(["hvdtrain", "results", "plot", "time", *words, "-o", "time.svg"])
    return (
        f"<p>This page, and one of its figures as a file:</p>\n{html.commands([[report, plot]])}\n"
        f"<p>The first run of each group of repeats (the others differ in seed and folder):</p>\n"
        f"{html.commands(dict.fromkeys(facts.commands(loaded))) or '<p>None.</p>'}"
    )
