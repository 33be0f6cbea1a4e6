"""What the figures say, in plain words: each sentence is computed from the numbers that the tables print.

Whether added hosts help is said by the readings of the scaling table; here stand the fastest setting, the distance
from the wire's limit, accuracy and energy, and how sure all this is. One setting is clearly faster than another where
the 95 % interval of the difference of their means (Welch) leaves out zero.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import pandas as pd

from hvdtrain.exits import Failure
from hvdtrain.results import alike, groups
from hvdtrain.results.figures import panels
from hvdtrain.results.figures.panels import Panel
from hvdtrain.results.statistics import Statistic, difference
from hvdtrain.results.table import Column, Table, cell, number
from hvdtrain.results.tables import FIGURES, left_out

TASK = (*alike.CHOSEN, "batch")
"""Settings that differ in one of these did different work, or had other means: their times are not compared"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """`lead` is printed bold, with a colon, before `text`."""

    lead: str
    text: str


@dataclasses.dataclass(frozen=True)
class Setting:
    """One group of repeats, named as in the figures."""

    name: str
    hosts: int
    task: tuple[object, ...]
    train_s: Statistic
    step_s: Statistic | None
    wire_bytes: Statistic | None
    limit_bytes: float | None
    limit_s: float | None


def findings(runs: pd.DataFrame, tables: dict[str, Table]) -> list[tuple[str, list[Finding]]]:
    """Question -> answers, for those questions that the runs can answer."""
    try:
        drawn = panels.compare(runs, "hosts", "train_s", "there is no complete timing run", most=sys.maxsize)
    except Failure as failure:
        return [("What can be said", [Finding("Nothing yet", f"{failure}.")])]
    readings = tables["scaling"].readings if "scaling" in tables else {}
    by_rate = settings(drawn)
    asked = {
        "Does each added host make training slower?": [Finding(title, text) for title, text in readings.items()],
        "Which setting is fastest?": fastest(by_rate),
        "How far is it from what the wire allows?": wire(by_rate),
        "What did it learn, and what did it take?": accuracy_and_energy(runs),
        "How sure is this?": certainty(runs, by_rate),
    }
    return [(question, answers) for question, answers in asked.items() if answers]


def in_short(scaling: Table) -> list[Finding]:
    """The first clause of each reading of the scaling table, with the curves that it is said of."""
    said: dict[str, list[str]] = {}
    for curve, reading in scaling.readings.items():
        said.setdefault(reading.partition(":")[0], []).append(curve.partition(" (")[0])
    return [Finding(clause, f"{'; '.join(curves)}.") for clause, curves in said.items()]


def settings(drawn: Sequence[Panel]) -> dict[float, list[Setting]]:
    """Rate -> all settings that were run at it, those on one host too; NaN: only unlimited, or only one host."""
    rates = panels.ordered(mbit for panel in drawn for mbit, _ in panel.curves)
    found: dict[float, list[Setting]] = {mbit: [] for mbit in rates}
    for panel in drawn:
        for mbit, rows in panel.curves:
            here = found[rates[panels.place(rates, mbit)]]
            for row in rows.to_dict("records"):
                one = Setting(
                    name=f"{panel.title} on {panels.hosts(row['hosts'])}",
                    hosts=int(row["hosts"]),
                    task=tuple((row | {"batch": panel.about["batch"]})[name] for name in TASK),
                    train_s=row["train_s"],
                    step_s=row["step_s"],
                    wire_bytes=row["wire_bytes_per_step"],
                    limit_bytes=row["limit_bytes_per_step"],
                    limit_s=row["limit_s_per_step"],
                )
                if one not in here:
                    here.append(one)
    return found


def seconds(value: Statistic) -> str:
    return cell(value, FIGURES["train_s"]) + " s"


def at(mbit: float) -> str:
    return "Without a throttle" if math.isnan(mbit) else f"At {panels.rate(mbit)}"


def fastest(by_rate: dict[float, list[Setting]]) -> list[Finding]:
    """The fastest setting of all at each rate, and of those on several hosts; nothing where there is no choice."""
    found = []
    for mbit, here in by_rate.items():
        for task in dict.fromkeys(one.task for one in here):
            ranked = sorted((one for one in here if one.task == task), key=lambda one: one.train_s.mean)
            if len(ranked) < 2:
                continue
            text = f"{ranked[0].name}: training took {seconds(ranked[0].train_s)}, {ahead(ranked[0], ranked[1])}."
            several = [one for one in ranked if one.hosts > 1]
            if ranked[0].hosts == 1 and several and several != ranked[1:2]:
                text += f" Of several hosts, {several[0].name}: {seconds(several[0].train_s)}"
                text += f", {ahead(several[0], several[1])}." if len(several) > 1 else "."
            found.append(Finding(at(mbit), text))
    return found


def ahead(first: Setting, second: Setting) -> str:
    gap = difference(first.train_s, second.train_s)
    other = f"{second.name} ({seconds(second.train_s)})"
    if gap.low is None or gap.high is None:
        return f"before {other}; single runs, so it is not known whether that is more than chance"
    return f"clearly before {other}" if gap.high < 0 else f"not clearly before {other}"


def wire(by_rate: dict[float, list[Setting]]) -> list[Finding]:
    """At each rate: how much of a step the wire needs at least, and how many times the least bytes went over it."""
    found = []
    for mbit, here in by_rate.items():
        several = [one for one in here if one.hosts > 1 and one.limit_bytes]
        shares = [100 * one.limit_s / one.step_s.mean for one in several if one.limit_s and one.step_s]
        ratios = [one.wire_bytes.mean / one.limit_bytes for one in several if one.wire_bytes and one.limit_bytes]
        words = []
        if shares:
            words.append(f"a full-precision allreduce at the wire's limit would need {span(shares)} % of a step's time")
        if ratios:
            words.append(f"the busiest host sent or received {span(ratios)} times the bytes of that limit")
        if words:
            found.append(Finding(at(mbit), sentence("; ".join(words))))
    return found


def span(values: Sequence[float]) -> str:
    least, most = number(min(values)), number(max(values))
    return least if least == most else f"{least} to {most}"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def accuracy_and_energy(runs: pd.DataFrame) -> list[Finding]:
    """The groups with the best and the worst test accuracy, the least and the most energy, among those that did the
    same work."""
    found = []
    all_groups = groups.by(groups.usable(runs))
    names = dict(zip(map(id, all_groups), group_names(all_groups), strict=True))
    for column, lead, least, most in (
        ("test_accuracy", "Test accuracy", "lowest with", "highest with"),
        ("energy_j", "Energy of a run, all measured devices of all hosts", "least with", "most with"),
    ):
        for same in alike.classes(all_groups, (*alike.WORK, "precision")):
            known = [(group.statistic(column), names[id(group)]) for group in same]
            ranked = sorted(((one, name) for one, name in known if one is not None), key=lambda each: each[0].mean)
            if not ranked:
                continue
            words = [f"{least} {ranked[0][1]}: {with_unit(ranked[0][0], FIGURES[column])}"]
            if len(ranked) > 1:
                words.append(f"{most} {ranked[-1][1]}: {with_unit(ranked[-1][0], FIGURES[column])}")
            found.append(Finding(lead, sentence("; ".join(words))))
    return found


def with_unit(value: Statistic, column: Column) -> str:
    return f"{cell(value, column)} {column.unit} (n = {value.n})"


def group_names(found: Sequence[groups.Group]) -> list[str]:
    """A name for each group, as in the figures, with hosts and rate."""
    names = panels.titles([group.key | {"batch": panels.batch("strong", group.key["global_batch"])} for group in found])
    for index, group in enumerate(found):
        hosts, mbit = group.key["hosts"], group.key["rate_mbit"]
        names[index] += f" on {panels.hosts(hosts)}" + (f" at {panels.rate(mbit)}" if hosts > 1 and mbit else "")
    return names


def certainty(runs: pd.DataFrame, by_rate: dict[float, list[Setting]]) -> list[Finding]:
    """How many runs are behind a figure, how far they spread at most, and what was left out."""
    every = {one.name + at(mbit) * (one.hosts > 1): (one, mbit) for mbit, here in by_rate.items() for one in here}
    counts = [one.train_s.n for one, _ in every.values()]
    repeats = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    total = f"{sum(counts)} timing runs of {len(counts)} settings, {repeats} of each"
    spread = [
        (100 * (one.train_s.high - one.train_s.mean) / one.train_s.mean, one, mbit)
        for one, mbit in every.values()
        if one.train_s.high is not None and one.train_s.mean > 0
    ]
    found = [Finding("Repeats", f"{total}." if spread else f"{total}: how far they spread is not known.")]
    if spread:
        half, one, mbit = max(spread, key=lambda each: each[0])
        where = f"{one.name}, {panels.rate(mbit)}" if one.hosts > 1 else one.name
        found.append(
            Finding("Spread", f"The 95 % interval of a mean training time is at most ± {number(half)} % ({where}).")
        )
    if single := sum(count == 1 for count in counts) if spread else 0:
        found.append(Finding("Single runs", f"{single} settings were run once: their spread is not known."))
    return found + [Finding("Not counted", f"{note.removeprefix('left out: ')}.") for note in left_out(runs)]
