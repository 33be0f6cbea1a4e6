"""`hvdtrain results strategies`: which strategy reaches a target first at each rate, and at what cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import RUNS, Column, label
from hvdtrain.results.comparability import PER_HOST, classes, differing, why_no_single_host
from hvdtrain.results.groups import Group
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scaling import MOST_EFFICIENCY
from hvdtrain.results.statistics import Interval, Statistic, ratio, summary
from hvdtrain.results.tables.accuracy import to_target
from hvdtrain.results.tables.columns import (
    SPREAD_NOTE,
    N,
    group_notes,
    key_cells,
    key_columns,
    score_columns,
    varying,
)
from hvdtrain.results.tables.model import Table, number
from hvdtrain.results.tables.scaling import SINGLE, faster_or_slower, rate_words

ALIKE = (*PER_HOST, "global_batch")
"""Must be equal within a section and in its single host"""
TUNED = ("global_batch", "epochs")
"""May differ with --best, which uses the best of each side"""
NOTES = (
    "time to target: seconds of training until the end of the first epoch whose primary metric reaches the target; "
    "interpolated: until a straight line from the epoch before crosses it. Means are over the runs that reached the "
    "target, so they flatter a strategy with failures",
    "speed-up: T / T_n compared with one host of the same work, global batch and processor, with its 95 % interval "
    "(Welch, on logarithms)",
    "network to target: bytes of the busiest NIC until the target, including headers and other traffic",
    "final: test score at the end of the run",
    "fp32 all-reduce / compute: time of a full-precision all-reduce at 0.936 of the rate / a step's computation",
)
BEST_NOTE = (
    "--best: each line, also the single host, uses the settings with the shortest interpolated time to target (if "
    "possible, settings whose seeds all reached it); speed-up compares interpolated times"
)
DETAILS = (
    Column("interpolated_s", "time to target, interpolated", "s"),
    Column("bytes_to_target", "network to target", "MB", 1e-6),
    RUNS["communication_share"],
    Column("steps_to_target", "steps to target"),
    RUNS["network_efficiency"],
    RUNS["strategy_limit_s_per_step"],
    Column("allreduce_ratio", "fp32 all-reduce / compute", "x"),
)
Measured = dict[int, dict[str, Any]]
"""id of a group -> its cells"""


def table(loaded: Loaded, target: float = 0.95, best: bool = False) -> Table:
    """A section for each rate: the single host, then every strategy, fastest to the target first.

    `target` is a value of the primary metric. `best` keeps one line for each strategy, with the batch and settings that
    reached it first, compared with the single host at its best.
    """
    same = tuple(name for name in ALIKE if not best or name not in TUNED)
    final, percent = score_columns(loaded.runs), scores.target(loaded.runs, target)
    experiments = [group for group in groups.by(groups.usable(loaded.runs)) if group.key["hosts"]]
    measured = {id(group): _measure(loaded, group, target, final) for group in experiments}
    settings = key_columns(experiments, varying(experiments), skip=("strategy", "rate_mbit"))
    several = [group for group in experiments if group.key["hosts"] != 1]
    experiments = _fastest(experiments, measured, same) if best else experiments
    single = [group for group in experiments if group.key["hosts"] == 1]
    rows: list[dict[str, Any]] = []
    readings: dict[str, str] = {}
    for title, members in _sections([group for group in experiments if group.key["hosts"] != 1], same):
        bases = [group for group in single if not members or any(not differing(group, each, same) for each in members)]
        cells = [
            key_cells(group, [one.key for one in settings])
            | {"rate": title, "speedup": _speedup(group, single, measured, same, best)}
            | {name: group.key[name] for name in ("strategy", "hosts", "rate_mbit")}
            | measured[id(group)]
            for group in [*bases, *members]
        ]
        ordered = sorted(cells[len(bases) :], key=lambda row: (time_to_target(row), row["strategy"]))
        rows += [*cells[: len(bases)], *ordered]
        alike = (group for group in several if members and not differing(members[0], group, same))
        tried = sum(group.key["rate_mbit"] == members[0].key["rate_mbit"] for group in alike)
        readings[title] = reading(ordered, percent, tried)
        if members and single and not bases:
            why = why_no_single_host(members[0], single, same)
            readings[title] += "" if any(why in text for text in readings.values()) else f" {why}"
    columns = [
        Column("strategy", "strategy", prose=True),
        N,
        Column("reached", f"reached {percent}"),
        Column("train_to_target_s", "time to target", "s", of=Statistic),
        Column("speedup", "speed-up", of=Interval),
        *(dataclasses.replace(one, label=one.label.replace("test", "final", 1)) for one in final),
        *(dataclasses.replace(one, role="detail", spread=False, of=Statistic) for one in DETAILS),
        *settings,
    ]
    notes = [SPREAD_NOTE, *([BEST_NOTE] if best else []), *NOTES, *group_notes(loaded.runs, experiments)]
    title = f"Strategies: time to {percent}{', each at its best' if best else ''}"
    return Table("strategies", title, columns, rows, notes, "rate", readings)


def _fastest(experiments: Sequence[Group], measured: Measured, same: Sequence[str]) -> list[Group]:
    """For each strategy and rate, the fastest to the target of the groups that agree in `same`."""

    def lateness(group: Group) -> tuple[bool, float]:
        time, timed = measured[id(group)]["interpolated_s"], len(group.values("train_s"))
        return (time is None or time.n < timed, math.inf if time is None else time.mean)

    rows: dict[Any, list[Group]] = {}
    for group in experiments:
        key = tuple(group.key[name] for name in ("hosts", "rate_mbit", "strategy", "launcher", "fill"))
        rows.setdefault(key, []).append(group)
    return [min(members, key=lateness) for row in rows.values() for members in classes(row, same)]


def _sections(several: Sequence[Group], same: Sequence[str]) -> list[tuple[str, list[Group]]]:
    """(title, groups on several hosts) by rate, and by other settings that forbid a comparison; at least one."""
    rates = sorted({group.key["rate_mbit"] for group in several}, key=lambda rate: (rate is None, rate or 0))
    sections = []
    for rate in rates or [None]:
        sets = classes([group for group in several if group.key["rate_mbit"] == rate], same)
        first = [members[0] for members in sets]
        names = [name for name in same if any(differing(first[0], other, (name,)) for other in first[1:])]
        for members in sets or [[]]:
            cells = key_cells(members[0], names) if members else {}
            words = [f"{label(name)} {value}" for name, value in cells.items()]
            sections.append((", ".join([rate_words(rate), *words]), members))
    return sections


def reading(ordered: Sequence[dict[str, Any]], target: str, tried: int) -> str:
    """The conclusion from the rows of one rate, whose first is the fastest of so many settings."""
    if not ordered or ordered[0]["train_to_target_s"] is None:
        return f"No run over several hosts reached {target}."
    best, time = ordered[0], ordered[0]["train_to_target_s"]
    words = f"Fastest: {best['strategy']}, {number(time.mean)} s"
    if tried > 1:
        words += f" (of {tried} settings, chosen by the same runs, which flatters it)"
    if best["speedup"] is not None:
        clear = faster_or_slower(best["speedup"])
        words += f", {number(best['speedup'].mean)} x as fast as one host" + " (unclear)" * (clear == "unclear")
        if best["speedup"].mean > MOST_EFFICIENCY * best["hosts"]:
            words += f" (suspect: more than {best['hosts']:g} hosts can explain; see `hvdtrain results scaling`)"
    return f"{words}. {SINGLE}" if time.n < 2 else f"{words}."


def time_to_target(row: dict[str, Any]) -> float:
    """Seconds to the target; infinite if it was not reached."""
    time = row["train_to_target_s"]
    return math.inf if time is None else float(time.mean)


def _speedup(
    group: Group, single: Sequence[Group], measured: Measured, same: Sequence[str], best: bool
) -> Interval | None:
    """The speed-up over the single host with the most similar settings; None without a comparable single host."""
    bases = sorted(
        (base for base in single if not differing(base, group, same)),
        key=lambda base: tuple(base.key[name] != group.key[name] for name in ("settings", "strategy", "launcher")),
    )
    if not bases:
        return None
    time = "interpolated_s" if best else "train_to_target_s"
    if bases[0] is group:
        return Interval(1.0) if measured[id(group)][time] else None
    return ratio(measured[id(bases[0])][time], measured[id(group)][time])


def _measure(loaded: Loaded, group: Group, target: float, final: Sequence[Column]) -> dict[str, Any]:
    """The group's cells."""
    pairs = zip(*(group.column(name, timing=True) for name in ("limit_s_per_step", "compute_s")), strict=True)
    own = ("strategy_limit_s_per_step", "network_efficiency", "communication_share", *(one.key for one in final))
    figures = to_target(loaded, group, target) | {name: group.statistic(name) for name in own}
    ratios = (limit_s / compute_s for limit_s, compute_s in pairs if not groups.is_missing(limit_s) and compute_s)
    return {"n": group.n, "allreduce_ratio": summary(ratios)} | figures
