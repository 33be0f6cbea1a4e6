"""Columns, cells and notes that several tables share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import GROUP, RUNS, Column, label
from hvdtrain.results.groups import Group, short
from hvdtrain.results.statistics import Statistic
from hvdtrain.system.exits import printable

SPREAD_NOTE = (
    "mean ± half of its 95 % interval (Student's t, for three or more runs; two runs: both values); --format csv or "
    "json has median, min, max and n"
)
N = Column("n", "n")
FIRST = ("strategy", "device", "hosts", "rate_mbit")
"""Settings in front of the others"""
FOLLOW = ("rank_batch", "backend", "network", "launcher", "fill")
"""Settings that usually follow from others"""
PARTS = {"train": "train", "validation": "validation", "test": "test", "best_validation": "best validation"}


def key_column(name: str, role: Literal["setting", "data"] = "setting") -> Column:
    """The column of a setting."""
    return dataclasses.replace(RUNS.get(name) or Column(name, label(name)), role=role, of=None)


def key_columns(experiments: Sequence[Group], shown: Sequence[str], skip: Sequence[str] = ()) -> list[Column]:
    """The columns of all settings except `skip`, in an order that does not depend on values. People see those in
    `shown`, and what is equal in all groups."""
    keys = [name for name in (experiments[0].key if experiments else GROUP) if name != "settings"]
    varied = groups.varying(experiments)
    inner = sorted({name for group in experiments for name in group.settings})
    first = [name for name in FIRST if name in keys]
    names = [name for name in dict.fromkeys([*first, *keys, *inner]) if name not in skip]
    seen = {*shown, *(name for name in keys if name not in varied)}
    return [key_column(name, "setting" if name in seen else "data") for name in names]


def key_cells(group: Group, names: Sequence[str]) -> dict[str, Any]:
    return {name: short(name, group.value(name)) for name in names}


def cells(group: Group, names: Sequence[str], figures: Sequence[Column]) -> dict[str, Any]:
    """The settings `names`, the number of runs, and the statistics of the measurements."""
    return key_cells(group, names) | {"n": group.n} | {one.key: group.statistic(one.key) for one in figures}


def score_columns(
    runs: pd.DataFrame, part: str = "test", names: Sequence[str] = (), role: Literal["result", "detail"] = "result"
) -> list[Column]:
    """Columns of the primary metrics of the runs, or of the scores `names`. Shares are printed in percent."""
    known, chosen = scores.of(runs), names or scores.primary(runs)
    made = []
    for name in chosen:
        score, words = known[name], PARTS[part]
        if len(chosen) > 1 or "validation" not in part:
            words = f"{words} {score.label}"
        unit, factor = ("%", 100.0) if score.share else (score.unit, 1.0)
        made.append(Column(f"{part}_{name}", printable(words), printable(unit), factor, role=role, of=Statistic))
    return made


# --- which settings to show -------------------------------------------------------------------------------------------


def varying(experiments: Sequence[Group]) -> list[str]:
    """The settings that differ between the groups, and always hosts; without those in FOLLOW that the others imply."""
    different = groups.varying(experiments)
    names = [name for name in FIRST if name in different or name == "hosts"]
    names += [name for name in different if name not in names]

    def distinct(chosen: Sequence[str]) -> int:
        return len({json.dumps([group.value(name) for name in chosen]) for group in experiments})

    for name in FOLLOW:
        rest = [other for other in names if other != name]
        if distinct(rest) == distinct(names):
            names = rest
    return names


def ordered(experiments: Sequence[Group]) -> list[Group]:
    """Sorts groups by workload, framework, strategy and device, single hosts first, then by rate and hosts."""

    def place(group: Group) -> tuple[Any, ...]:
        rate, hosts = group.key.get("rate_mbit"), group.key.get("hosts") or 0
        names = tuple(str(group.key.get(name)) for name in ("workload", "framework", "strategy", "device"))
        return (*names, hosts > 1, rate is None, rate or 0, hosts)

    return sorted(experiments, key=place)


def grouped(runs: pd.DataFrame, group_by: Sequence[str] | None) -> tuple[list[Group], list[Column]]:
    """The groups of the runs that count, in order, and the columns of their settings."""
    experiments = ordered(groups.by(groups.usable(runs), group_by or GROUP))
    return experiments, key_columns(experiments, group_by or varying(experiments))


# --- notes ------------------------------------------------------------------------------------------------------------


def group_notes(runs: pd.DataFrame, experiments: Sequence[Group], *, timing: bool = True) -> list[str]:
    """Warnings about groups that mix processors or experiments, and notes on the runs that do not count, and why."""
    notes = []
    names = sorted({name for group in experiments for name in group.values("processor")})
    if len(names) > 1:
        notes.append(f"warning: the runs used different processors: {'; '.join(names)}")
    if inside := {name for group in experiments for name in groups.varying(groups.by(group.runs))}:
        notes.append(f"warning: these groups average over different {', '.join(sorted(inside))}")
    for state, why in (("unfinished", "did not finish"), ("refused", "have records that cannot be trusted")):
        if count := int((runs["state"] == state).sum()):
            notes.append(f"left out: {count} runs that {why}; `hvdtrain results list` shows them")
    marked = runs[(runs["state"] == "complete") & runs["marked"].notna()]
    notes += [f"left out: {name}, marked: {why}" for name, why in zip(marked["run"], marked["marked"], strict=True)][:5]
    if len(marked) > 5:
        notes.append(f"left out: {len(marked) - 5} more marked runs")
    sampled = int(((runs["state"] == "complete") & (runs["kind"] != "timing")).sum())
    if timing and sampled:
        notes.append(f"left out of times: {sampled} energy runs, because sampling may slow them down")
    return notes
