"""`hvdtrain results strategies`: which strategy gets to a target accuracy soonest, at each rate, and at what cost."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hvdtrain.results import alike, groups, missing, scores
from hvdtrain.results.accuracy import reached
from hvdtrain.results.folders import Problem
from hvdtrain.results.groups import Group
from hvdtrain.results.load import Loaded
from hvdtrain.results.scaling import MOST_EFFICIENCY, rate_words
from hvdtrain.results.statistics import Interval, Statistic, ratio, summary
from hvdtrain.results.table import Column, Table, number
from hvdtrain.results.tables import SPREAD_NOTE, apart, common, key_cells, key_column, left_out

ALIKE = (*alike.PER_HOST, "global_batch")
"""What all groups of a section, and the one host that they are compared with, have in common"""
TUNED = ("global_batch", "epochs")
"""Of these, what may be chosen for each side by itself, as settings such as lr may, where the best are compared"""
NOTES = (
    "to target: seconds of training (evaluation and checkpoints outside) until the end of the first epoch whose "
    "primary metric (accuracy ...), on the split evaluated after each epoch, is as good as the target; between epochs: "
    "until a straight line from the epoch before crosses it, since one picture more or less may be an epoch. Times, "
    "steps and bytes are means over the runs that got there: where some did not, they flatter the strategy",
    "speed-up: T / T_n over one host of the same model, data, epochs, global batch, precision, cores and threads, with "
    "its 95 % interval (Welch, on logarithms)",
    "per host: bytes of the busiest host's NIC, the larger of sent and received, of the whole run (headers, idle "
    "traffic and evaluations too), times the share of its steps that the target took",
    "limit: seconds that the wire needs, at 0.936 of the rate, for what the strategy gives it per step (rank 0's "
    "payload, warm-up left out); wire: limit / time of the exchange, waiting for the slowest host included. An "
    "exchange that runs behind backward, later steps or other ranks' takes a step at most: there wire is a lower bound",
    "exposed: share of a step that rank 0 waits for the exchange; final: the test split's score at the end of the run",
    "plain wire: how many times as long as a step's computation an allreduce in full precision would need the wire, at "
    "0.936 of the rate: how hard this model, batch and rate are for any exchange",
)
BEST_NOTE = (
    "each at its best: of the batches, learning rates and other settings that were run, each line has those that got "
    "there soonest (between epochs; only where every seed did, if there is such a group), and so has the one host; "
    "speed-up is of the times between epochs here"
)
FIGURE_COLUMNS = (
    Column("train_to_target_s", "to target", "s"),
    Column("speedup", "speed-up"),
    Column("crossed_s", "between epochs", "s", spread=False),
    Column("steps_to_target", "steps", spread=False),
    Column("bytes_to_target", "per host", "MB", 1e-6, spread=False),
    Column("own_limit_s_per_step", "limit", "ms", 1e3, spread=False),
    Column("wire_efficiency", "wire", "%", 100, spread=False),
    Column("communication_share", "exposed", "%", 100, spread=False),
    Column("plain_wire_ratio", "plain wire", "x", spread=False),
)
SPARE = (
    *("plain_wire_ratio", "own_limit_s_per_step", "wire_efficiency", "steps_to_target", "n", "communication_share"),
    *("bytes_to_target", "crossed_s"),
)


def strategies(loaded: Loaded, target: float = 0.95, best: bool = False) -> Table:
    """A section for each rate: one host first, then every strategy, the soonest at the target first.

    `target`: of the primary metric, a fraction of 1 where that is a share. `best`: one line for each strategy, with the
    batch and the settings of its own that got there soonest, against one host at its best.
    """
    same = tuple(name for name in ALIKE if not best or name not in TUNED)
    final, percent = scores.figures(loaded.runs), scores.target(loaded.runs, target)
    found = [group for group in groups.by(groups.usable(loaded.runs)) if group.key["hosts"]]
    measured = {id(group): _measured(group, target, final, loaded.problems) for group in found}
    shown = [name for name in apart(found) if name not in ("strategy", "rate_mbit", "launcher")]
    found = _soonest(found, measured, same) if best else found
    alone = [group for group in found if group.key["hosts"] == 1]
    rates = sorted({group.key["rate_mbit"] for group in found if group not in alone}, key=lambda r: (r is None, r or 0))
    rows: list[dict[str, Any]] = []
    readings: dict[str, str] = {}
    for title, members in _sections([group for group in found if group not in alone], rates, same):
        bases = [
            group for group in alone if not members or any(not alike.differing(group, each, same) for each in members)
        ]
        names = _names([*bases, *members])
        cells = [
            key_cells(group, shown)
            | {"rate": title, "strategy": names[id(group)], "speedup": _speedup(group, alone, measured, same, best)}
            | {name: group.key[name] for name in ("hosts", "rate_mbit")}
            | measured[id(group)]
            for group in [*bases, *members]
        ]
        ordered = sorted(cells[len(bases) :], key=lambda row: (soonness(row), row["strategy"]))
        rows += [*cells[: len(bases)], *ordered]
        readings[title] = reading(ordered, percent)
        if members and alone and not bases:
            readings[title] += f" {missing.alone(members[0], alone, same)}"
    columns = [Column("strategy", "strategy"), *(key_column(name) for name in shown), Column("n", "n")]
    columns += [Column("reached", f"reached {percent}"), *FIGURE_COLUMNS]
    columns += [dataclasses.replace(one, label=one.label.replace("test", "final", 1)) for one in final]
    notes = [SPREAD_NOTE, *([BEST_NOTE] if best else []), *NOTES]
    notes += [*common(found, [*shown, "strategy", "rate_mbit", "launcher"]), *left_out(loaded.runs)]
    spare = (*SPARE, *(one.key for one in final))
    title = f"Strategies: to {percent}{', each at its best' if best else ''}"
    return Table("strategies", title, columns, rows, notes, "rate", readings, spare)


def _soonest(found: Sequence[Group], measured: dict[int, dict[str, Any]], same: Sequence[str]) -> list[Group]:
    """Of each strategy at each rate, among groups that are alike in `same`, the one that is soonest at the target."""

    def lateness(group: Group) -> tuple[bool, float]:
        time, timed = measured[id(group)]["crossed_s"], len(group.values("train_s"))
        return (time is None or time.n < timed, math.inf if time is None else time.mean)

    rows: dict[Any, list[Group]] = {}
    for group in found:
        key = tuple(group.key[name] for name in ("hosts", "rate_mbit", "strategy", "launcher", "fill"))
        rows.setdefault(key, []).append(group)
    return [min(members, key=lateness) for row in rows.values() for members in alike.classes(row, same)]


def _sections(
    several: Sequence[Group], rates: Sequence[float | None], same: Sequence[str]
) -> list[tuple[str, list[Group]]]:
    """(title, groups on several hosts) by rate, and by whatever else makes them unlike; one without groups if none."""
    found = []
    for rate in rates or [None]:
        sets = alike.classes([group for group in several if group.key["rate_mbit"] == rate], same)
        first = [members[0] for members in sets]
        names = [name for name in same if any(alike.differing(first[0], other, (name,)) for other in first[1:])]
        for members in sets or [[]]:
            cells = key_cells(members[0], names) if members else {}
            told = [f"{key_column(name).label} {value}" for name, value in cells.items()]
            found.append((", ".join([rate_words(rate), *told]), members))
    return found


def reading(ordered: Sequence[dict[str, Any]], target: str) -> str:
    """What the rows of one rate say in words, the first of `ordered` being the soonest."""
    if not ordered or ordered[0]["train_to_target_s"] is None:
        return f"No run over several hosts reached {target}."
    best = ordered[0]
    said = f"Soonest: {best['strategy']}, {number(best['train_to_target_s'].mean)} s"
    if best["speedup"] is not None:
        said += f", {number(best['speedup'].mean)} x as soon as one host"
        if best["speedup"].mean > MOST_EFFICIENCY * best["hosts"]:
            said += f" (suspect: more than {best['hosts']} hosts can share; see `hvdtrain results scaling`)"
    return f"{said}."


def soonness(row: dict[str, Any]) -> float:
    """Seconds to the target, infinite where it was not reached."""
    time = row["train_to_target_s"]
    return math.inf if time is None else float(time.mean)


def _names(found: Sequence[Group]) -> dict[int, str]:
    """The strategies' names, with the launcher behind those that there are several of."""
    twice = {name for name, times in Counter(_plain(group) for group in found).items() if times > 1}
    return {
        id(group): f"{group.key['strategy']} ({group.key['launcher']})"
        if group.key["launcher"] and _plain(group) in twice
        else str(group.key["strategy"])
        for group in found
    }


def _plain(group: Group) -> tuple[Any, ...]:
    return tuple(group.key[name] for name in group.key if name not in ("launcher", "settings"))


def _speedup(
    group: Group, alone: Sequence[Group], measured: dict[int, dict[str, Any]], same: Sequence[str], best: bool
) -> Any:
    """The speed-up over one host (of the same settings if there is such a run); None without a run on one host."""
    bases = sorted(
        (base for base in alone if not alike.differing(base, group, same)),
        key=lambda base: tuple(base.key[name] != group.key[name] for name in ("settings", "strategy", "launcher")),
    )
    if not bases:
        return None
    time = "crossed_s" if best else "train_to_target_s"
    if bases[0] is group:
        return Interval(1.0, None, None) if measured[id(group)][time] else None
    return ratio(measured[id(bases[0])][time], measured[id(group)][time])


def _measured(group: Group, target: float, final: Sequence[Column], problems: list[Problem]) -> dict[str, Any]:
    """The group's figures; energy runs give no times."""
    times, crossed, steps, sent = [], [], [], []
    several, count = (group.key["hosts"] or 1) > 1, 0
    columns = ("run_dir", "primary_metric", "kind", "wire_bytes_per_step")
    for run_dir, score, kind, wire_bytes in zip(*(group.column(name) for name in columns), strict=True):
        there = reached(run_dir, score, target, problems)
        if there is None:
            continue
        count += 1
        steps.append(float(there.steps))
        if kind == "timing":
            times.append(there.train_s)
            crossed.append(there.crossed_s)
        if several and not groups.is_missing(wire_bytes):
            sent.append(wire_bytes * there.steps)
    figures: dict[str, Statistic | None] = {
        "train_to_target_s": summary(times),
        "crossed_s": summary(crossed),
        "steps_to_target": summary(steps),
        "bytes_to_target": summary(sent),
    }
    own = ("own_limit_s_per_step", "wire_efficiency", "communication_share", *(one.key for one in final))
    figures |= {name: group.statistic(name) for name in own}
    pairs = zip(*(group.column(name, timing=True) for name in ("limit_s_per_step", "compute_s")), strict=True)
    figures["plain_wire_ratio"] = summary(
        limit_s / compute_s for limit_s, compute_s in pairs if not groups.is_missing(limit_s) and compute_s
    )
    return {"n": group.n, "reached": f"{count} of {group.n}", **figures}
