"""Speed-up and efficiency: how much faster n hosts (or ranks) train than the baseline.

    speed-up          T_base / T_n
    strong efficiency T_base n_base / (T_n n)                at an equal global batch
    weak efficiency   (rate_n / n) / (rate_base / n_base)    at an equal batch per rank, rate in samples/s

T is the time of the training phase, or of the whole run, for the same epochs over the same training set. The baseline
of a group has the fewest hosts among the groups that are comparable with it. A single host has no rate, so it is the
baseline of every rate; other baselines must have the group's rate. If there are several, the best match in strategy,
settings and launcher is used, then the one whose other hosts were busy too, then the one with the fastest run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

from hvdtrain.results.comparability import (
    BATCH,
    MUST,
    Count,
    Kind,
    batch_kinds,
    count_of,
    differing,
    same_rate,
)
from hvdtrain.results.groups import Group
from hvdtrain.results.statistics import Interval, Statistic, ratio

PREFERRED = ("strategy", "ranks_per_host", "settings", "backend", "launcher")
"""What a group and its baseline should have in common, most important first"""
MOST_EFFICIENCY = 1.1
"""A larger efficiency has another cause than the added hosts, or the baseline was disturbed"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A group compared with one baseline. The baseline itself is the first row of each of its curves."""

    group: Group
    baseline: Group
    kind: Kind
    count: float
    speedup: Interval | None = None
    speedup_end_to_end: Interval | None = None
    efficiency: Interval | None = None
    curve: int = 0

    @property
    def train_s(self) -> Statistic | None:
        return self.group.statistic("train_s")

    @property
    def suspect(self) -> bool:
        """Whether the efficiency is higher than sharing the work can explain."""
        return self.efficiency is not None and self.efficiency.mean > MOST_EFFICIENCY


def what_varies(groups: Sequence[Group]) -> Count:
    """Hosts, unless all runs have the same number of hosts and differ in ranks."""
    same_hosts = len({group.key["hosts"] for group in groups}) == 1
    return "ranks" if same_hosts and len({group.key["ranks_per_host"] for group in groups}) > 1 else "hosts"


def rows(groups: Sequence[Group], count: Count = "hosts") -> list[Row]:
    """All groups as curves, each in ascending order from its baseline. A group without a baseline is its own curve."""
    curves: dict[tuple[Any, ...], list[Row]] = {}
    compared: set[int] = set()
    for group in groups:
        for kind, base in _baselines(group, groups, count).items():
            members = curves.setdefault(_curve(group, base, kind, count), [])
            if not members:
                members.append(_row(base, base, kind, count))
            members.append(_row(group, base, kind, count))
            compared |= {id(group), id(base)}
    for group in groups:
        if id(group) not in compared:
            curves[(id(group),)] = [Row(group, group, "other", count_of(group, count))]
    return [
        dataclasses.replace(row, curve=number)
        for number, members in enumerate(sorted(curves.values(), key=_curve_order))
        for row in sorted(members, key=lambda row: (row.group is not row.baseline, row.count))
    ]


def _curve_order(members: list[Row]) -> tuple[Any, ...]:
    last = members[-1].group.key
    rate = last["rate_mbit"]
    return (*(str(last[name]) for name in ("workload", "framework", "strategy")), rate is None, rate or 0.0)


def _curve(group: Group, baseline: Group, kind: Kind, count: Count) -> tuple[Any, ...]:
    """A key that the points of one curve have in common."""
    varying = {"hosts", "rank_batch", "global_batch"} | ({"ranks_per_host"} if count == "ranks" else set())
    batch = BATCH.get(kind)
    rest = tuple(value for name, value in group.key.items() if name not in varying)
    return (id(baseline), kind, group.key[batch] if batch else None, rest)


def _baselines(group: Group, groups: Sequence[Group], count: Count) -> dict[Kind, Group]:
    """The baseline for each kind of comparison that the runs allow; empty for a baseline."""
    candidates = [
        other
        for other in groups
        if count_of(other, count) < count_of(group, count)
        and same_rate(group, other)
        and not differing(group, other, MUST[count])
        and other.values("train_s")  # not only energy runs
    ]
    allowed = [batch_kinds(group, other) for other in candidates]
    best: dict[Kind, Group] = {}
    for kind in get_args(Kind):
        equal = [other for other, kinds in zip(candidates, allowed, strict=True) if kind in kinds]
        if equal:
            best[kind] = _best_match(group, equal, count)
    return best


def _best_match(group: Group, candidates: Sequence[Group], count: Count) -> Group:
    def merit(other: Group) -> tuple[Any, ...]:
        equal = tuple(other.key[name] == group.key[name] for name in (*MUST[count], *PREFERRED))
        fastest_s = min(other.values("train_s"), default=math.inf)
        return (*equal, other.key["fill"] or 0, other is group, -fastest_s)

    least = min(count_of(other, count) for other in candidates)
    return max((other for other in candidates if count_of(other, count) == least), key=merit)


def _row(group: Group, baseline: Group, kind: Kind, count: Count) -> Row:
    n = count_of(group, count)
    if baseline is group:
        one = Interval(1.0) if group.statistic("train_s") else None
        return Row(group, group, kind, n, one, one, one)
    done = {*group.values("epochs_done"), *baseline.values("epochs_done")}
    same = len(done) < 2  # --target may have ended some runs earlier
    speedup = ratio(baseline.statistic("train_s"), group.statistic("train_s")) if same else None
    end_to_end = ratio(baseline.statistic("end_to_end_s"), group.statistic("end_to_end_s")) if same else None
    throughput = ratio(group.statistic("samples_per_s"), baseline.statistic("samples_per_s"))
    gain, base_count = {"strong": speedup, "weak": throughput}.get(kind), count_of(baseline, count)
    efficiency = gain / (n / base_count) if gain and n and base_count else None
    return Row(group, baseline, kind, n, speedup, end_to_end, efficiency)
