"""Speed-up and efficiency: how much faster n hosts (or ranks) train than the baseline does.

    speed-up          T_base / T_n
    strong efficiency T_base n_base / (T_n n)                at an equal global batch
    weak efficiency   (rate_n / n) / (rate_base / n_base)    at an equal batch per rank, rate in samples/s

T is the training phase, or the end-to-end time, of the same epochs over the same training set. The baseline of a group
is the group with the fewest hosts that is like it in all that `alike` asks for; it is a one-host group if there is one
(a single host has no rate, so it is the baseline of every rate), else one of the same rate. Of several, one with the
same strategy, settings and launcher is taken, and of those one beside which the other hosts were busy too, and then the
one with the fastest run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from hvdtrain.results import alike
from hvdtrain.results.alike import Chosen, Kind
from hvdtrain.results.groups import Group
from hvdtrain.results.statistics import Interval, Statistic, ratio
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

Count = Literal["hosts", "ranks"]
MUST: dict[Count, tuple[str, ...]] = {"hosts": alike.PER_HOST, "ranks": alike.SAME}
"""What a group and its baseline always have in common, by what is counted"""
PREFERRED = ("strategy", "ranks_per_host", "settings", "collectives", "launcher")
"""What they should have in common, most important first"""
MOST_EFFICIENCY = 1.1
"""Above it something else than the added hosts has made the difference, or the baseline was held up"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A group against one baseline; a baseline itself opens each of its curves."""

    group: Group
    baseline: Group
    kind: Kind
    count: float
    speedup: Interval | None
    speedup_end_to_end: Interval | None
    efficiency: Interval | None
    curve: int = 0

    @property
    def train_s(self) -> Statistic | None:
        return self.group.statistic("train_s")

    @property
    def suspect(self) -> bool:
        """Whether the efficiency is more than sharing the work can give."""
        return self.efficiency is not None and self.efficiency.mean > MOST_EFFICIENCY


def count_of(group: Group, count: Count) -> float:
    """Hosts or ranks; 0 if not known."""
    return float(group.facts[count] or 0)


def what_varies(found: Sequence[Group]) -> Count:
    """Hosts, unless all runs have the same number of hosts and differ in ranks."""
    same_hosts = len({group.key["hosts"] for group in found}) == 1
    return "ranks" if same_hosts and len({group.key["ranks_per_host"] for group in found}) > 1 else "hosts"


def rows(found: Sequence[Group], count: Count = "hosts", chosen: Chosen | None = None) -> list[Row]:
    """All groups as curves, each from its baseline upwards; a group without one is a curve by itself.

    `chosen` says which groups may be baselines; None: the rule above. Raises Failure (2) if none is chosen.
    """
    pool = [group for group in found if chosen is None or chosen.test(group)]
    if not pool and found:
        raise Failure("--baseline chooses none of the groups; see `hvdtrain results table`", exits.USAGE)
    curves: dict[tuple[Any, ...], list[Row]] = {}
    compared: set[int] = set()
    for group in found:
        for kind, baseline in _baselines(group, pool, count, chosen).items():
            members = curves.setdefault(_curve(group, baseline, kind, count), [])
            if not members:
                members.append(_row(baseline, baseline, kind, count))
            members.append(_row(group, baseline, kind, count))
            compared |= {id(group), id(baseline)}
    for group in found:
        if id(group) not in compared:
            curves[(id(group),)] = [Row(group, group, "other", count_of(group, count), None, None, None)]
    ordered = sorted(curves.values(), key=_place)
    return [
        dataclasses.replace(row, curve=number)
        for number, members in enumerate(ordered)
        for row in sorted(members, key=lambda row: (row.group is not row.baseline, row.count))
    ]


def _place(members: list[Row]) -> tuple[Any, ...]:
    last = members[-1].group.key
    rate = last["rate_mbit"]
    return (*(str(last[name]) for name in ("workload", "framework", "strategy")), rate is None, rate or 0.0)


def _curve(group: Group, baseline: Group, kind: Kind, count: Count) -> tuple[Any, ...]:
    """What the points of one curve have in common, as a key."""
    apart = {"hosts", "rank_batch", "global_batch"} | ({"ranks_per_host"} if count == "ranks" else set())
    batch = alike.BATCH.get(kind)
    rest = tuple(value for name, value in group.key.items() if name not in apart)
    return (id(baseline), kind, group.key[batch] if batch else None, rest)


def _baselines(group: Group, pool: Sequence[Group], count: Count, chosen: Chosen | None) -> dict[Kind, Group]:
    """The baseline for each kind of comparison that the runs allow; nothing for a baseline itself."""
    if chosen and group in pool:
        return {}
    freed = chosen.names if chosen else frozenset()
    names = [name for name in MUST[count] if name not in freed]
    mine = [group.key[name] for name in names]
    candidates = [
        other
        for other in pool
        if (chosen or count_of(other, count) < count_of(group, count))
        and ("rate_mbit" in freed or same_rate(group, other))
        and ([other.key[name] for name in names] == mine or not alike.differing(group, other, names))
        and other.values("train_s")  # not of energy runs alone
    ]
    found: dict[Kind, Group] = {}
    allowed = [alike.batch_kinds(group, other) for other in candidates]
    for kind in get_args(Kind):
        equal = [other for other, kinds in zip(candidates, allowed, strict=True) if kind in kinds]
        if equal:
            found[kind] = _best(group, equal, count)
    if candidates and not found and freed & set(alike.BATCH.values()):
        found["other"] = _best(group, candidates, count)
    return found


def same_rate(group: Group, other: Group) -> bool:
    """Whether `other` has the group's rate, or is on one host, which uses no link."""
    return other.key["hosts"] == 1 or other.key["rate_mbit"] == group.key["rate_mbit"]


def _best(group: Group, candidates: Sequence[Group], count: Count) -> Group:
    def merit(other: Group) -> tuple[Any, ...]:
        equal = tuple(other.key[name] == group.key[name] for name in (*MUST[count], *PREFERRED))
        return (*equal, other.key["fill"] or 0, other is group)

    least = min(count_of(other, count) for other in candidates)
    merits = [(merit(other), other) for other in candidates if count_of(other, count) == least]
    best = max(each for each, _ in merits)
    found = [other for each, other in merits if each == best]
    return min(found, key=lambda other: min(other.values("train_s"), default=math.inf))


def many(n: float, count: Count) -> str:
    """In words: 1 host, 2 hosts."""
    return f"{n:g} {count[:-1] if n == 1 else count}"


def rate_words(mbit: float | None) -> str:
    """`10 Mbit/s`; without a limit, None or NaN, `no throttle`."""
    return "no throttle" if mbit is None or math.isnan(mbit) else f"{mbit:g} Mbit/s"


def _row(group: Group, baseline: Group, kind: Kind, count: Count) -> Row:
    n = count_of(group, count)
    if baseline is group:
        one = Interval(1.0, None, None) if group.statistic("train_s") else None
        return Row(group, group, kind, n, one, one, one)
    done = {*group.values("epochs_done"), *baseline.values("epochs_done")}
    same = len(done) < 2  # --target may have ended some of the runs sooner
    speedup = ratio(baseline.statistic("train_s"), group.statistic("train_s")) if same else None
    end_to_end = ratio(baseline.statistic("end_to_end_s"), group.statistic("end_to_end_s")) if same else None
    throughput = ratio(group.statistic("samples_per_s"), baseline.statistic("samples_per_s"))
    relative = n / count_of(baseline, count) if count_of(baseline, count) else None
    gained = {"strong": speedup, "weak": throughput}.get(kind)
    return Row(group, baseline, kind, n, speedup, end_to_end, _divided(gained, relative))


def _divided(interval: Interval | None, by: float | None) -> Interval | None:
    if interval is None or not by:
        return None
    low, high = (None if bound is None else bound / by for bound in (interval.low, interval.high))
    return Interval(interval.mean / by, low, high)
