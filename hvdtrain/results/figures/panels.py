"""Panels and curves: which runs share axes, and one set of titles, colours and markers for all figures.

In all figures of the same runs, a rate has one colour and line style and a number of hosts one marker.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from hvdtrain.results import groups, scaling
from hvdtrain.results.comparability import Count, many
from hvdtrain.results.figures import style
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import Row
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

HOW = {"backend": "over {}", "launcher": "by {}", "fill": "with {:g} busy neighbours"}
"""Shown only if nothing else distinguishes the runs: a single process has no backend, and each strategy has its own"""

# The settings that separate panels, and how a title names them. Hosts and rate are the axes inside a panel.
TITLE = {
    "framework": "{}",
    "strategy": "{}",
    "workload": "{}",
    "device": "on {}",
    "cores": "{:g} cores per host",
    "threads": "{:g} threads per rank",
    "precision": "{}",
    "ranks_per_host": "{:g} ranks per host",
    "parameters": "{:,.0f} parameters",
    "data_fingerprint": "data {:.6}",
    "train_samples": "{:,.0f} samples",
    "epochs": "{:g} epochs",
    "batch": "{}",
    **dict.fromkeys(HOW, "{}"),
}
ALWAYS = ("framework", "strategy")
MOST_PANELS = 12
MOST_BARS = 60


def rates(runs: pd.DataFrame) -> list[float]:
    """The rates of the runs on several hosts, slowest first, unlimited (NaN) last. Only NaN if there are none."""
    found = runs.loc[runs["hosts"] > 1, "rate_mbit"]
    known = sorted(float(mbit) for mbit in found.dropna().unique())
    return known + [math.nan] * bool(found.isna().any()) or [math.nan]


class Looks:
    """The look of each rate and of each number of hosts."""

    def __init__(self, loaded: Loaded) -> None:
        runs = groups.usable(loaded.runs)
        self.rates = rates(runs)
        self.hosts = sorted({int(number) for number in runs["hosts"].dropna()})

    def line(self, mbit: float, hosts: float = 2) -> dict[str, Any]:
        """Colour and line style. A single host uses no link and is drawn in black."""
        if hosts <= 1:
            return {"color": style.INK, "linestyle": "-"}
        return style.line(next(i for i, one in enumerate(self.rates) if one == mbit or (one != one and mbit != mbit)))

    def marker(self, hosts: float) -> dict[str, Any]:
        return style.marker(self.hosts.index(int(hosts)))

    def legend(self, axis: Any, numbers: Iterable[float]) -> None:
        """Adds entries for the markers of these numbers of hosts."""
        for number in sorted(set(numbers)):
            axis.plot([], [], color=style.SOFT, linestyle="none", **self.marker(number), label=many(number, "hosts"))


def at_rate(runs: pd.DataFrame, mbit: float) -> pd.DataFrame:
    """The runs of one rate, and those on a single host, which are the baseline of every rate."""
    same = runs["rate_mbit"].isna() if math.isnan(mbit) else runs["rate_mbit"] == mbit
    return runs[same | (runs["hosts"] == 1)]


def usable(runs: pd.DataFrame, column: str, missing: str) -> pd.DataFrame:
    """Timing runs that count and have a value in the column, in a fixed order.

    Raises Failure (65) with the message `missing` if there is none.
    """
    found = groups.usable(runs)
    found = found[(found["kind"] == "timing") & found["hosts"].notna() & found[column].notna()]
    if found.empty:
        raise Failure(missing, exits.BAD_DATA)
    return found.sort_values(["framework", "strategy", "hosts", "rate_mbit", "run"], kind="stable")


def batch(kind: str, size: Any) -> str:
    """The batch that is equal in a strong or weak comparison, as text."""
    words = "batch {:g} per rank" if kind == "weak" else "global batch {:g}"
    return "unknown batch" if groups.is_missing(size) else words.format(size)


def check(number: int, most: int, what: str) -> None:
    """Raises Failure (2) if a figure would have too many panels or bars."""
    if number > most:
        raise Failure(f"{number} {what} exceed the {most} of one figure; hint: select runs with --where", exits.USAGE)


def split(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(title, runs) of each panel. Titles name the differences between panels. Raises Failure (2) for too many."""
    strong = runs["global_batch"].map(functools.partial(batch, "strong"))
    weak = runs["rank_batch"].map(functools.partial(batch, "weak"))
    spread = runs.groupby(weak)["global_batch"].transform("nunique") > 1
    steady = runs.groupby(strong)["hosts"].transform("nunique") > 1
    keyed = with_how(runs.assign(batch=strong.where(steady | ~spread, weak)))
    parts = [part for _, part in keyed.groupby([*TITLE, "settings"], dropna=False, sort=True)]
    check(len(parts), MOST_PANELS, "settings")
    yield from zip(titles([part.iloc[0].to_dict() for part in parts]), parts, strict=True)


def with_how(runs: pd.DataFrame, points: Sequence[str] = ("hosts", "rate_mbit")) -> pd.DataFrame:
    """The runs (or curves) with the words of HOW, or "" if these do not separate rows that agree otherwise."""
    same = runs.groupby([*(name for name in TITLE if name not in HOW), "settings", *points], dropna=False)
    words = {}
    for name, form in HOW.items():
        differs = same[name].transform("nunique", dropna=False) > 1
        words[name] = [
            "" if groups.is_missing(value) or not shown else form.format(value)
            for value, shown in zip(runs[name], differs, strict=True)
        ]
    return runs.assign(**words)


def titles(panels: Sequence[dict[str, Any]]) -> list[str]:
    """Titles: framework, strategy, and the other differences between the panels."""
    inner = [groups.settings(each["settings"]) for each in panels]
    columns = [name for name in TITLE if name in ALWAYS or len({str(each[name]) for each in panels}) > 1]
    names = sorted({key for one in inner for key in one})
    names = [name for name in names if len({str(one.get(name)) for one in inner}) > 1]
    found = []
    for each, own in zip(panels, inner, strict=True):
        words = [_words(name, each[name]) for name in columns] + [f"{name} {own.get(name)}" for name in names]
        found.append(", ".join([" ".join(words[: len(ALWAYS)]), *filter(None, words[len(ALWAYS) :])]))
    return found


def _words(name: str, value: Any) -> str:
    return f"unknown {name.replace('_', ' ')}" if groups.is_missing(value) else TITLE[name].format(value)


# --- scaling curves ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """The curves of one setting."""

    title: str
    curves: list[tuple[float, list[Row]]]
    """Rate (NaN: unlimited, or a single host) and points of each curve, baseline first, slowest rate first"""


def curves(runs: pd.DataFrame, count: Count, column: str, missing: str) -> list[Panel]:
    """The curves of `scaling.rows` by setting, with the points that have a `column` (train_s or speedup).

    Raises Failure (65) with the message `missing` if there is none, Failure (2) for too many panels.
    """
    rows = scaling.rows(groups.by(groups.usable(runs)), count)
    known = [row for row in rows if getattr(row, column) is not None and row.group.key["hosts"] is not None]
    found, abouts = [], []
    for _, curve in itertools.groupby(known, key=lambda row: row.curve):
        points = list(curve)
        last, key = points[-1], points[-1].group.key
        if column != "train_s" and last.group is last.baseline:
            continue  # a single group without a comparison
        found.append(points)
        abouts.append(key | {"batch": batch(last.kind, key["rank_batch" if last.kind == "weak" else "global_batch"])})
    if not found:
        raise Failure(missing, exits.BAD_DATA)
    by_setting: dict[tuple[str, ...], tuple[dict[str, Any], list[tuple[float, list[Row]]]]] = {}
    for points, about in zip(found, with_how(pd.DataFrame(abouts), ["rate_mbit"]).to_dict("records"), strict=True):
        setting = tuple(str(about[name]) for name in (*TITLE, "settings"))
        mbit = points[-1].group.key["rate_mbit"]
        by_setting.setdefault(setting, (about, []))[1].append((math.nan if mbit is None else float(mbit), points))
    check(len(by_setting), MOST_PANELS, "settings")
    names = titles([about for about, _ in by_setting.values()])
    return [Panel(name, drawn) for name, (_, drawn) in zip(names, by_setting.values(), strict=True)]
