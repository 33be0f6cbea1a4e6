"""Which runs stand side by side: a panel per setting, curves per rate, in one order, with one set of names and looks.

In all figures of the same runs a rate is one colour and line style, a number of hosts one marker, a strategy a title or
the name of a row.
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
from hvdtrain.results.figures import style
from hvdtrain.results.load import Loaded
from hvdtrain.results.scaling import Row, many
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

HOW = {"collectives": "over {}", "launcher": "by {}", "fill": "beside {:g} busy hosts"}
"""Told only where nothing else tells runs apart: one process has no collectives, and each strategy has its own"""

# What tells one panel from another, and how its title says so. Hosts and rate are the axes inside a panel.
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


def ordered(rates: Iterable[float]) -> list[float]:
    """Each rate once, slowest first, unlimited (NaN) last."""
    found = list(rates)
    return sorted({mbit for mbit in found if not math.isnan(mbit)}) + [math.nan] * any(map(math.isnan, found))


def rates(runs: pd.DataFrame) -> list[float]:
    """The rates of the runs on several hosts; only NaN if there are none."""
    return ordered(runs.loc[runs["hosts"] > 1, "rate_mbit"]) or [math.nan]


def place(rates: Sequence[float], mbit: float) -> int:
    """Where a rate stands among `rates` (NaN, unlimited, equals NaN)."""
    return next(i for i, one in enumerate(rates) if one == mbit or (math.isnan(one) and math.isnan(mbit)))


class Looks:
    """How each rate and each number of hosts of the runs is drawn, in whatever figure."""

    def __init__(self, loaded: Loaded) -> None:
        runs = groups.usable(loaded.runs)
        self.rates = rates(runs)
        self.hosts = sorted({int(number) for number in runs["hosts"].dropna()})

    def line(self, mbit: float, number: float = 2) -> dict[str, Any]:
        """Colour and line style; one host, which uses no link, is ink."""
        return style.line(place(self.rates, mbit)) if number > 1 else {"color": style.INK, "linestyle": "-"}

    def marker(self, number: float) -> dict[str, Any]:
        return style.marker(self.hosts.index(int(number)))

    def legend(self, axis: Any, numbers: Iterable[float]) -> None:
        """Entries for the markers of these numbers of hosts."""
        for number in sorted(set(numbers)):
            axis.plot([], [], color=style.SOFT, linestyle="none", **self.marker(number), label=many(number, "hosts"))


def at_rate(runs: pd.DataFrame, mbit: float) -> pd.DataFrame:
    """The runs of one rate, and those on one host: the baseline of every rate."""
    same = runs["rate_mbit"].isna() if math.isnan(mbit) else runs["rate_mbit"] == mbit
    return runs[same | (runs["hosts"] == 1)]


def usable(runs: pd.DataFrame, *, needs: str, lacking: str) -> pd.DataFrame:
    """Complete timing runs without a mark and with a value in the column `needs`, in a fixed order.

    Raises Failure (65) with `lacking` when there is none.
    """
    found = groups.usable(runs)
    found = found[(found["kind"] == "timing") & found["hosts"].notna() & found[needs].notna()]
    if found.empty:
        raise Failure(lacking, exits.BAD_DATA)
    return found.sort_values(["framework", "strategy", "hosts", "rate_mbit", "run"], kind="stable")


def batches(runs: pd.DataFrame) -> pd.Series[str]:
    """Per run, the batch that stays equal while hosts are added: the global one, else that of a rank."""
    strong = runs["global_batch"].map(functools.partial(batch, "strong"))
    weak = runs["rank_batch"].map(functools.partial(batch, "weak"))
    spread = runs.groupby(weak)["global_batch"].transform("nunique") > 1
    steady = runs.groupby(strong)["hosts"].transform("nunique") > 1
    return strong.where(steady | ~spread, weak)


def batch(kind: str, size: Any) -> str:
    """How a title says the batch that is equal in a strong or weak comparison."""
    words = "batch {:g} per rank" if kind == "weak" else "global batch {:g}"
    return "unknown batch" if groups.is_missing(size) else words.format(size)


def check(number: int, most: int, what: str) -> None:
    """Raises Failure (2) if a figure of `number` panels or bars could not be read."""
    if number > most:
        raise Failure(f"{number} {what} are too many for one figure ({most}): choose runs with --where", exits.USAGE)


def split(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(title, runs) of each panel; titles name what differs between the panels. Raises Failure (2) for too many."""
    keyed = told(runs.assign(batch=batches(runs)))
    parts = [part for _, part in keyed.groupby([*TITLE, "settings"], dropna=False, sort=True)]
    check(len(parts), MOST_PANELS, "settings")
    yield from zip(titles([part.iloc[0].to_dict() for part in parts]), parts, strict=True)


def told(runs: pd.DataFrame, points: Sequence[str] = ("hosts", "rate_mbit")) -> pd.DataFrame:
    """The runs, or groups or curves of them, with the words of HOW in its columns; nothing there where those that are
    alike in all else, and in `points`, agree."""
    same = runs.groupby([*(name for name in TITLE if name not in HOW), "settings", *points], dropna=False)
    words = {}
    for name, form in HOW.items():
        several = same[name].transform("nunique", dropna=False) > 1
        words[name] = [
            "" if groups.is_missing(value) or not apart else form.format(value)
            for value, apart in zip(runs[name], several, strict=True)
        ]
    return runs.assign(**words)


def titles(settings: Sequence[dict[str, Any]]) -> list[str]:
    """A title for each of these: framework, strategy, and whatever else differs between them."""
    inner = [groups.settings(each["settings"]) for each in settings]
    columns = [name for name in TITLE if name in ALWAYS or len({str(each[name]) for each in settings}) > 1]
    names = sorted({key for one in inner for key in one})
    names = [name for name in names if len({str(one.get(name)) for one in inner}) > 1]
    found = []
    for each, own in zip(settings, inner, strict=True):
        words = [words_of(name, each[name]) for name in columns] + [f"{name} {own.get(name)}" for name in names]
        found.append(", ".join([" ".join(words[: len(ALWAYS)]), *filter(None, words[len(ALWAYS) :])]))
    return found


def words_of(name: str, value: Any) -> str:
    """What a title says of a column's value."""
    return f"unknown {name.replace('_', ' ')}" if groups.is_missing(value) else TITLE[name].format(value)


# --- one panel per scaling curve's setting ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Panel:
    """The curves of one setting, which get axes of their own."""

    title: str
    curves: list[tuple[float, list[Row]]]
    """Rate (NaN: unlimited, or one host only) and points of each curve, baseline first; slowest rate first"""


def compare(runs: pd.DataFrame, count: scaling.Count, column: str, lacking: str) -> list[Panel]:
    """The curves of `scaling.rows` by setting, with those points that have a `column` (train_s, speedup, efficiency).

    Raises Failure (65) with `lacking` if there is none, Failure (2) for more settings than a figure can show.
    """
    made = scaling.rows(groups.by(groups.usable(runs)), count)
    known = [row for row in made if getattr(row, column) is not None and row.group.key["hosts"] is not None]
    curves, abouts = [], []
    for _, curve in itertools.groupby(known, key=lambda row: row.curve):
        points = list(curve)
        last, key = points[-1], points[-1].group.key
        if column != "train_s" and last.group is last.baseline:
            continue  # one group alone, with nothing to compare it to
        curves.append(points)
        abouts.append(key | {"batch": batch(last.kind, key["rank_batch" if last.kind == "weak" else "global_batch"])})
    if not curves:
        raise Failure(lacking, exits.BAD_DATA)
    found: dict[tuple[str, ...], tuple[dict[str, Any], list[tuple[float, list[Row]]]]] = {}
    for points, about in zip(curves, told(pd.DataFrame(abouts), ["rate_mbit"]).to_dict("records"), strict=True):
        setting = tuple(str(about[name]) for name in (*TITLE, "settings"))
        mbit = points[-1].group.key["rate_mbit"]
        found.setdefault(setting, (about, []))[1].append((math.nan if mbit is None else float(mbit), points))
    check(len(found), MOST_PANELS, "settings")
    names = titles([about for about, _ in found.values()])
    return [Panel(name, drawn) for name, (_, drawn) in zip(names, found.values(), strict=True)]
