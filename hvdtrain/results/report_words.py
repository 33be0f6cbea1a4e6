"""What the figures say, in plain words: each sentence is computed from the numbers that the tables print.

The first screen has a sentence per rate: how much longer several hosts take than one with the default strategy, and how
much sooner the best strategy gets there. Below stand the distance from the wire's limit, accuracy and energy, and how
sure all this is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from hvdtrain.config.options import TrainConfig
from hvdtrain.results import alike, groups, scores
from hvdtrain.results.figures import panels
from hvdtrain.results.groups import Group
from hvdtrain.results.scaling import MOST_EFFICIENCY, many, rate_words
from hvdtrain.results.statistics import Interval
from hvdtrain.results.strategies import soonness
from hvdtrain.results.table import Table, cell, number
from hvdtrain.results.tables import FIGURES, left_out

PLAIN = TrainConfig().strategy
"""Without a word about strategies ranks do this: plain Horovod"""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGEST = ("strategy", "framework", "hosts", "count", "reached", "train_to_target_s", "train_s", "speedup")
"""Columns of the first screen's table, few enough for a phone"""

WIRE = ("limit_s_per_step", "step_s", "wire_bytes_per_step", "limit_bytes_per_step")

Finding = tuple[str, str]
"""What is printed bold, with a colon, and the text after it"""


# --- the first screen -------------------------------------------------------------------------------------------------


def reached(strategies: Table) -> bool:
    """Whether any run over several hosts got to the target, so that strategies are compared by the time to it."""
    return any(row["train_to_target_s"] is not None and row["hosts"] != 1 for row in strategies.rows)


def digest(table: Table) -> Table:
    """The first screen's table: what matters most; of each strategy, and of one host, the soonest row."""
    shown = [dataclasses.replace(each, spread=each.key != "speedup") for each in table.columns if each.key in DIGEST]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(table.rows, key=soonness) if table.name == "strategies" else ():
        rows.setdefault((row["rate"], row["hosts"] == 1 or row["strategy"]), row)
    kept = [row for row in table.rows if not rows or any(row is one for one in rows.values())]
    return dataclasses.replace(table, columns=shown, rows=kept, notes=[], readings={})


def answers(table: Table) -> list[str]:
    """A sentence for each section of the strategies table, or for each rate of the scaling table."""
    if table.name == "strategies":
        return [answer(title, rows) or f"{title}: {table.readings[title]}" for title, rows in table.sections()]
    several = len({row["framework"] for row in table.rows}) > 1
    count = next(column.label for column in table.columns if column.key == "count")
    found: dict[str, list[dict[str, Any]]] = {}
    for _, (base, *rows) in table.sections():
        for row in (row for row in rows if base["count"] == 1 and row["count"] != 1):
            at = rate_words(row["rate_mbit"]) + (f", {row['framework']}" if several else "")
            at = "" if count == "ranks" and row["rate_mbit"] is None and not several else at
            found.setdefault(at, []).append(row | {"hosts": row["count"], "train_to_target_s": row["train_s"]})
    alone = [f"{title}: {said}" for title, said in table.readings.items()]
    told = [(at, row["strategy"], row["hosts"]) for at, rows in found.items() for row in rows]
    if len(set(told)) < len(told):  # several settings of one name, which the sections' own words tell apart
        return alone
    return [said for title, rows in found.items() if (said := answer(title, rows, count))] or alone


def answer(title: str, rows: Sequence[dict[str, Any]], count: str = "hosts") -> str:
    """`At 10 Mbit/s two hosts need 43 times as long as one with plain Horovod; with X four are 1.7 times as fast.`

    Empty if nothing is compared with one host, or with one rank.
    """
    several = sorted((row for row in rows if row["hosts"] and row["hosts"] > 1), key=lambda row: float(row["hosts"]))
    soonest = {row["hosts"]: row for row in sorted(several, key=soonness, reverse=True) if plainly(row)}
    plain = [row for row in several if soonest.get(row["hosts"]) is row]
    compared = [row for row in several if row["speedup"] is not None]
    clauses = [f"{size(row, count)} {verdict(row)}" for row in plain if row in compared]
    if clauses:
        clauses[0] += f" as one with plain Horovod ({PLAIN})"
        clauses = [", ".join(clauses)]
    if failed := [size(row, count) for row in plain if row["train_to_target_s"] is None]:
        clauses.append(f"with plain Horovod {' and '.join(failed)} do not get there")
    if others := [row for row in compared if not plainly(row)]:
        best = max(others, key=lambda row: float(row["speedup"].mean))
        clauses.append(f"with {best['strategy']} {size(best, count)} {verdict(best)}" + ("" if clauses else " as one"))
    at = title.capitalize() if title.startswith("no ") else f"At {title}"
    return sentence([f"{at} {clauses[0]}" if title else clauses[0], *clauses[1:]]) if clauses else ""


def plainly(row: dict[str, Any]) -> bool:
    """Whether the row is of the default strategy; behind its name may stand that of a sweep's point."""
    return str(row["strategy"]).partition(" (")[0] == PLAIN


def size(row: dict[str, Any], count: str) -> str:
    number_ = int(row["hosts"])
    return f"{NUMBERS[number_] if number_ < len(NUMBERS) else number_} {count}"


def verdict(row: dict[str, Any]) -> str:
    """`need 43 times as long`, `are 1.7 times as fast`; about as long where the speed-up rounds to 1, or may be 1."""
    speedup: Interval = row["speedup"]
    low, high = speedup.span or (speedup.mean, speedup.mean)
    faster = speedup.mean > 1
    times = f"{float(f'{speedup.mean if faster else 1 / speedup.mean:.2g}'):g}"
    if low <= 1 <= high or times == "1":
        return "take about as long"
    doubt = " (suspect: more than they can share)" if speedup.mean > MOST_EFFICIENCY * row["hosts"] else ""
    doubt += "" if speedup.span else " (single runs)"
    return (f"are {times} times as fast" if faster else f"need {times} times as long") + doubt


# --- below ------------------------------------------------------------------------------------------------------------


def findings(runs: pd.DataFrame) -> list[tuple[str, list[Finding]]]:
    """Question -> answers, for those questions that the runs can answer."""
    found = [group for group in groups.by(groups.usable(runs)) if group.key["hosts"]]
    if not any(group.values("train_s") for group in found):
        return [("What can be said", [("Nothing yet", "There is no complete timing run.")])]
    names = dict(zip(map(id, found), group_names(found), strict=True))
    asked = {
        "How far is it from what the wire allows?": list(wire(found)),
        "What did it learn, and what did it take?": list(scores_and_energy(runs, found, names)),
        "How sure is this?": certainty(runs, found, names),
    }
    return [(question, answers) for question, answers in asked.items() if answers]


def wire(found: Sequence[Group]) -> Iterator[Finding]:
    """At each rate: how much of a step the wire needs at least, and how many times the least bytes went over it."""
    several = [group for group in found if group.key["hosts"] > 1 and any(group.values("limit_bytes_per_step"))]
    by_rate: dict[float | None, list[Group]] = {}
    for group in sorted(several, key=lambda group: group.key["rate_mbit"] or math.inf):
        by_rate.setdefault(group.key["rate_mbit"], []).append(group)
    for rate, here in by_rate.items():
        limit_s, step_s, bytes_, least = ([group.statistic(name) for group in here] for name in WIRE)
        shares = [100 * a.mean / b.mean for a, b in zip(limit_s, step_s, strict=True) if a and b]
        ratios = [a.mean / b.mean for a, b in zip(bytes_, least, strict=True) if a and b]
        words = []
        if shares:
            words.append(f"a full-precision allreduce at the wire's limit would need {span(shares)} % of a step's time")
        if ratios:
            words.append(f"the busiest host sent or received {span(ratios)} times the bytes of that limit")
        if words:
            yield ("Without a throttle" if rate is None else f"At {rate_words(rate)}"), sentence(words)


def span(values: Sequence[float]) -> str:
    least, most = number(min(values)), number(max(values))
    return least if least == most else f"{least} to {most}"


def sentence(words: Sequence[str]) -> str:
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def scores_and_energy(runs: pd.DataFrame, found: Sequence[Group], names: dict[int, str]) -> Iterator[Finding]:
    """The groups with the highest and the lowest primary metric, the least and the most energy, among those that did
    the same work."""
    asked = [
        (column, f"{column.label[0].upper()}{column.label[1:]}", "lowest with", "highest with")
        for column in scores.figures(runs)
    ]
    joules = "Energy of a run, all measured devices of all hosts"
    for column, lead, least, most in (*asked, (FIGURES["energy_j"], joules, "least with", "most with")):
        for members in alike.classes(found, (*alike.WORK, "precision")):
            known = [(one, names[id(group)]) for group in members if (one := group.statistic(column.key))]
            ranked = sorted(known, key=lambda each: each[0].mean)
            ends = [(least, *ranked[0]), (most, *ranked[-1])][: len(ranked)] if ranked else []
            if words := [f"{how} {who}: {cell(one, column)} {column.unit} (n = {one.n})" for how, one, who in ends]:
                yield lead, sentence(words)


def group_names(found: Sequence[Group]) -> list[str]:
    """A name for each group, as in the figures, with hosts and rate."""
    keys = [group.key | {"batch": panels.batch("strong", group.key["global_batch"])} for group in found]
    names = panels.titles(panels.told(pd.DataFrame(keys)).to_dict("records"))
    for index, group in enumerate(found):
        number_, mbit = group.key["hosts"], group.key["rate_mbit"]
        names[index] += f" on {many(number_, 'hosts')}" + (f" at {rate_words(mbit)}" if number_ > 1 and mbit else "")
    return names


def certainty(runs: pd.DataFrame, found: Sequence[Group], names: dict[int, str]) -> list[Finding]:
    """How many runs are behind a figure, how far they spread at most, and what was left out."""
    timed = [(one, names[id(group)]) for group in found if (one := group.statistic("train_s"))]
    counts = [one.n for one, _ in timed]
    spread = [((one.span[1] - one.span[0]) / 2 / one.mean, name) for one, name in timed if one.span and one.mean]
    total = f"{sum(counts)} timing runs of {len(counts)} settings, {span(counts)} of each"
    said = [("Repeats", f"{total}." if spread else f"{total}: how far they spread is not known.")]
    if spread:
        half, name = max(spread)
        said.append(("Spread", f"A mean training time has a spread of ± {number(100 * half)} % at most ({name})."))
        if single := counts.count(1):
            said.append(("Single runs", f"{single} settings were run once: their spread is not known."))
    return said + [("Not counted", f"{note.removeprefix('left out: ')}.") for note in left_out(runs)]
