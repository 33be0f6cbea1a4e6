"""`hvdtrain results report`: everything about the runs on one page that opens offline, in a browser or on paper.

The first screen is the answer: a sentence per rate, one figure, one table of strategies. Everything else stands below.
The page takes its numbers from the tables and its figures from `plots`, and holds no date but that of the data: equal
runs give an equal page, to the byte.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.results import (
    accuracy,
    energy,
    groups,
    plots,
    report_facts,
    report_page,
    report_words,
    scaling_table,
    scores,
)
from hvdtrain.results import strategies as strategies_table
from hvdtrain.results import tables as plain
from hvdtrain.results.columns import Column
from hvdtrain.results.load import Loaded
from hvdtrain.results.report_page import text
from hvdtrain.results.scaling import what_varies
from hvdtrain.results.table import Table
from hvdtrain.system.exits import Failure

TITLE = "How training scales"

# Kind of plots.KINDS, in the order of the page -> heading and how to read it.
CAPTIONS = {
    "strategies": (
        "Time to the target, strategy by strategy",
        "Seconds of training until the end of the first epoch that reaches the validation accuracy named below the "
        "axis. Left of the dotted line several hosts are sooner than one.",
    ),
    "time": (
        "Training time against hosts",
        "Seconds of the training phase. A curve that rises says that more hosts make training slower at that rate; one "
        "host uses no link and opens every curve.",
    ),
    "speedup": (
        "Speed-up of training",
        "Training time of the baseline divided by that of more hosts. On the ideal line n hosts take a n-th of the "
        "time; below the dotted line they take longer than the baseline.",
    ),
    "efficiency": (
        "Efficiency by hosts and rate",
        "The part of the ideal speed-up that is reached; bright is good. An empty cell was not run.",
    ),
    "phases": (
        "Where the time goes",
        "Above, a step of rank 0 without warm-up; below, a whole run. What backward hides of the exchange counts as "
        "compute. Each rate has its own scale; the number is the length of the whole bar.",
    ),
    "wire": (
        "Bytes on the wire against the limit",
        "Left: bytes per step through the busiest host's NIC, beside the least that a full-precision allreduce must "
        "send and what was given to the exchange. Right: the time those least bytes need at the rate, as a share of a "
        "step. Near 100 % the wire is all there is, and only sending less can help.",
    ),
    "accuracy": ("Accuracy against epochs", "Validation accuracy after each epoch, mean over the repeats."),
    "accuracy-time": (
        "Accuracy against time",
        "The same against seconds of training, validation and checkpoints: what counts is how far left a curve is.",
    ),
    "power": ("Power against time", "Power of each measured device, one run in each panel."),
    "resources": (
        "Use of each host against time",
        "CPU, memory, GPU and network of each host, one run in each panel; the mean is over hosts and time.",
    ),
}

MEASURED = {
    "Times": "By rank 0's monotonic clock, around work that has ended on the device. Loading and initialisation are "
    "outside the timed run (MLPerf's rule); training, validation, test and checkpoints have clocks of their own. The "
    "first steps of a process are marked as warm-up and left out of times per step and of samples per second.",
    "Repeats": "Runs that agree in everything but seed and repeat are one group. A figure is the mean over a group, "
    "and its 95 % interval Student's; ratios and differences of means have Welch's. No run is dropped for being slow.",
    "Links": "Every run over several hosts measures its links for about a second before step 0. Bytes on the wire are "
    "the operating system's counters of the NIC, from the start of the loop to the end of the test evaluation, headers "
    "and all other traffic included.",
    "Power": "One sampler per host reads energy counters (RAPL, NVML) or integrates power. Runs of a sweep that sample "
    "power are apart from those that are timed, since sampling may disturb times. A device without a sensor is listed "
    "as such and counted nowhere.",
    "Accuracy": "Counted exactly over all ranks, as one process would.",
}


def write(loaded: Loaded, path: Path, target: float = 0.95) -> None:
    """Writes the page; strategies race to the `target`, a fraction of 1. Raises Failure (73)."""
    plots.write(path, page(loaded, target).encode("utf-8", "replace"))


def tables(loaded: Loaded, target: float = 0.95) -> list[Table]:
    """The tables of the page, in its order; the strategies only if some run over several hosts got to the target."""
    race = strategies_table.strategies(loaded, target)
    made = [race] if report_words.reached(race) else []
    made += [*scaling_table.scaling(loaded), plain.overview(loaded), accuracy.accuracy(loaded, target)]
    return [*made, *energy.energy(loaded), plain.phases(loaded)]


def page(loaded: Loaded, target: float = 0.95) -> str:
    """The page as an HTML document."""
    numbered = iter(range(1, 1000))
    shown = [one for one in tables(loaded, target) if one.rows] if not groups.usable(loaded.runs).empty else []
    main = "strategies" if shown and shown[0].name == "strategies" else "time"
    count = what_varies(groups.by(groups.usable(loaded.runs)))
    drawn, lacking = figures(loaded, plots.Options(target=target, count=count), main)
    first = first_screen(shown, drawn.pop(main, ""), numbered, scores.goal(loaded.runs, target)) if shown else ""
    sections = [("What else the runs say", findings(loaded))]
    not_shown = f"<h3>Not shown</h3>\n{report_page.bullets(lacking, 'findings')}" if lacking else ""
    sections.append(("Figures", "\n".join([*drawn.values(), not_shown])))
    sections.append(("Tables", main_tables(shown, numbered)))
    sections.append(("Definitions", definitions(shown, scores.all_columns(loaded.runs))))
    sections.append(("How it was measured", report_page.definitions(MEASURED.items())))
    facts = [report_facts.environment(loaded), report_facts.links(loaded.runs), report_facts.power_sensors(loaded)]
    sections.append(("Environment", "\n".join(report_page.table(one, next(numbered)) for one in facts if one.rows)))
    sections.append(("Problems found", problems(loaded, numbered)))
    sections.append(("How to repeat it", repeat(loaded, target)))
    sections.append(("All runs", report_page.table(plain.listing(loaded), next(numbered))))
    return report_page.page(TITLE, header(loaded), first, sections)


def first_screen(shown: list[Table], figure: str, numbered: Iterator[int], goal: str) -> str:
    """The answers; below them, side by side, a figure and a table."""
    raced = shown[0].name == "strategies"
    what = f"Training time to {goal}" if raced else "Training time for the same epochs"
    said = report_page.bullets((("", sentence) for sentence in report_words.answers(shown[0])), "short")
    table = report_page.table(report_words.digest(shown[0]), next(numbered))
    return f'<h2>{text(what)}</h2>\n{said}\n<div class="beside">\n{figure}\n{table}\n</div>'


def header(loaded: Loaded) -> str:
    """Says what the page is about and when the runs ran."""
    days = sorted({str(utc)[:10] for utc in loaded.runs["started_utc"].dropna()})
    when = "of unknown date" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    states = loaded.runs["state"].value_counts()
    counts = ", ".join(f"{states[state]} {state}" for state in ("complete", "unfinished", "refused") if state in states)
    sweeps = sorted({str(name) for name in loaded.runs["sweep"].dropna()})
    named = f" Sweeps: {', '.join(sweeps)}." if sweeps else ""
    folders = ", ".join(map(str, loaded.roots)) + (f" where {loaded.where}" if loaded.where else "")
    return f"<p>Data of {text(when)} from {text(folders)}: {text(counts or 'no runs')}.{text(named)}</p>"


def findings(loaded: Loaded) -> str:
    """Each question with its answers."""
    return "\n".join(
        f"<h3>{text(question)}</h3>\n{report_page.bullets(answers, 'findings')}"
        for question, answers in report_words.findings(loaded.runs)
    )


def figures(loaded: Loaded, options: plots.Options, main: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Kind -> HTML of each figure that the runs can fill, the `main` one first and narrow; and what the others lack."""
    drawn: dict[str, str] = {}
    lacking: list[tuple[str, str]] = []
    for kind in sorted(CAPTIONS, key=lambda kind: kind != main):
        heading, caption = CAPTIONS[kind]
        if kind in ("time", "speedup", "efficiency"):
            heading, caption = (words.replace("hosts", options.count) for words in (heading, caption))
        try:
            figure = plots.draw(kind, loaded, dataclasses.replace(options, columns=1 if kind == main else 2))
        except Failure as failure:
            lacking.append((heading, str(failure)))
            continue
        drawn[kind] = report_page.figure(figure, kind, len(drawn) + 1, heading, caption)
    return drawn, lacking


def main_tables(shown: list[Table], numbered: Iterator[int]) -> str:
    """The tables, headed by the notes that more than one of them has."""
    counted = Counter(note for one in shown for note in one.notes)
    common = [note for note, number in counted.items() if number > 1]
    head = f"<p>For all tables:</p>\n{report_page.bullets([('', note) for note in common], 'notes')}" if common else ""
    return "\n".join([head, *(report_page.table(one, next(numbered), common) for one in shown)])


def definitions(shown: list[Table], known: Mapping[str, Column]) -> str:
    """The meaning of every column that a table shows, and its name and unit in CSV and JSON."""
    keys = {column.key: column.heading for one in shown for column in one.columns if column.key in known}
    units = {key: f", in {known[key].unit}" if known[key].unit else "" for key in keys}
    return report_page.definitions((keys[key], f"{known[key].meaning} ({key}{units[key]})") for key in keys)


def problems(loaded: Loaded, numbered: Iterator[int]) -> str:
    """Everything that kept a run, or a part of one, out of the figures."""
    runs = loaded.runs
    items = [(run, state) for run, state in zip(runs["run"], runs["state"], strict=True) if state != "complete"]
    marked = runs[runs["marked"].notna()]
    items += [(run, f"marked, {why}") for run, why in zip(marked["run"], marked["marked"], strict=True)]
    found = report_facts.problems(loaded.problems)
    if not items and not found.rows:
        return "<p>None: every run is complete, and every record of it was read.</p>"
    listed = report_page.bullets(items, "findings") if items else ""
    return listed + (report_page.table(found, next(numbered)) if found.rows else "")


def repeat(loaded: Loaded, target: float) -> str:
    """The command that makes this page again, and those that made the runs."""
    roots = [str(root) for root in loaded.roots] + (["--where", loaded.where] if loaded.where else [])
    goal = f"{loaded.judged}={target!r}" if loaded.judged else repr(target)
    roots += [] if goal == "0.95" else ["--target", goal]
    page_again = shlex.join(["hvdtrain", "results", "report", *roots, "-o", "report.html"])
    each_figure = shlex.join(["hvdtrain", "results", "plot", "time", *roots, "-o", "time.svg"])
    made = list(report_facts.commands(loaded))
    return (
        f"<p>This page, and one of its figures as a file:</p>\n{report_page.commands([[page_again, each_figure]])}\n"
        f"<p>The runs, the first of each group of repeats (the others differ in seed and folder):</p>\n"
        f"{report_page.commands(dict.fromkeys(made)) or '<p>There is none.</p>'}"
    )
