"""From runs to the table of `tools/bench_strategies.py`: figures of one run, lines, goals, and how they are printed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench_strategies_rows import (
    ALONE,
    DDP_HOOKS,
    HOROVODRUN,
    OTHERS,
    TWO_BY_TWO,
    UNCOMPRESSED,
)

from hvdtrain import strategies
from hvdtrain.collectives import powersgd
from hvdtrain.exits import Failure
from hvdtrain.results import accuracy, load, metrics, runs
from hvdtrain.results.folders import Problem

Line = dict[str, Any]
"""A line of the table as JSON; see `line`"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What one run showed. Times in seconds; per step: warm-up left out. None: not reached, or not measured."""

    steps_to_target: int | None
    crossed_steps: float | None
    """Where straight lines between the epochs' accuracies cross the target; no later than steps_to_target"""
    train_to_target_s: float | None
    accuracy: float | None
    step_s: float | None
    communication_s: float | None
    limit_s: float | None
    """What the wire needs for the strategy's payload of a step"""
    efficiency: float | None
    nic_bytes_per_step: float | None
    """Busiest host's NIC, sent or received, the whole run over its steps"""
    goodput_mbit: float | None


def seen(folder: Path, target: float) -> Seen:
    """Reads a complete run. Raises Failure (65, 74) for one that is not."""
    problems: list[Problem] = []
    row = runs.row(folder, problems)
    if row["state"] != "complete":
        raise Failure(f"{folder}: {row['state']}; {'; '.join(map(str, problems)) or 'did not end'}")
    there = accuracy.reached(str(folder), target)
    return Seen(
        steps_to_target=there.steps if there else None,
        crossed_steps=crossed(folder, target) if there else None,
        train_to_target_s=there.train_s if there else None,
        accuracy=row["test_accuracy"],
        step_s=row["step_s"],
        communication_s=row["communication_s"],
        limit_s=row["own_limit_s_per_step"],
        efficiency=row["wire_efficiency"],
        nic_bytes_per_step=row["wire_bytes_per_step"],
        goodput_mbit=row["goodput_mbit"],
    )


def crossed(folder: Path, target: float) -> float:
    """Steps at which lines between (0, 0) and the epochs' (steps, accuracy) cross a target that the run reached."""
    step, below = 0, 0.0
    for timed in metrics.epochs(load.metrics_file(str(folder))):
        epoch = timed.epoch
        accuracy_ = epoch.validation_scores.get("accuracy", 0.0)
        if accuracy_ >= target:
            return step + (epoch.step - step) * (target - below) / (accuracy_ - below)
        step, below = epoch.step, accuracy_
    raise ValueError(f"{folder} did not reach {target}")


def projected(timed: Seen, whole: Seen) -> Seen:
    """A run to the end at a rate where only steps were timed: learning of the one, seconds and bytes of the other."""
    seconds = None
    if whole.steps_to_target is not None and timed.step_s is not None:
        seconds = whole.steps_to_target * timed.step_s
    return dataclasses.replace(
        timed,
        steps_to_target=whole.steps_to_target,
        crossed_steps=whole.crossed_steps,
        train_to_target_s=seconds,
        accuracy=whole.accuracy,
    )


# --- lines ----------------------------------------------------------------------------------------------------------


def spread(values: Iterable[float | None], *, never: bool = False) -> Line | None:
    """Median, least and most of the values that are there; None without any.

    With `never` a None is a run that did not get there and counts as later than all: where half or more of the runs
    did not, the median is null.
    """
    every = list(values)
    there = sorted(value for value in every if value is not None)
    if not there:
        return None
    counted = there + [math.inf] * (len(every) - len(there)) if never else there
    middle = statistics.median(counted)
    return {
        "median": middle if math.isfinite(middle) else None,
        "min": there[0],
        "max": there[-1],
        "values": every if never else there,
    }


def median(found: Line | None) -> float | None:
    return None if found is None else found["median"]


def beside(strategy: str) -> bool:
    """Whether its exchange runs beside the computation."""
    return bool(strategies.parse(strategy).facts()["behind"])


def line(name: str, strategy: str, rate: int, found: Sequence[Seen], *, is_projected: bool, hosts: int) -> Line:
    """One row at one rate from its runs, a seed each."""

    def share(each: Seen) -> float | None:
        return each.communication_s / each.step_s if each.communication_s is not None and each.step_s else None

    def sent(each: Seen) -> float | None:
        if each.nic_bytes_per_step is None or each.steps_to_target is None:
            return None
        return each.nic_bytes_per_step * each.steps_to_target

    def crossed_s(each: Seen) -> float | None:
        if each.train_to_target_s is None or not each.steps_to_target or each.crossed_steps is None:
            return None
        return each.train_to_target_s * each.crossed_steps / each.steps_to_target

    return {
        "strategy": name,
        "mode": "train",
        "projected": is_projected,
        "rate_mbit": rate / 1e6,
        "hosts": hosts,
        "n": len(found),
        "reached": sum(each.steps_to_target is not None for each in found),
        "time_to_target_s": spread((each.train_to_target_s for each in found), never=True),
        "speedup": None,
        "crossed_s": spread(map(crossed_s, found), never=True),
        "crossed_speedup": None,
        "steps_to_target": spread((each.steps_to_target for each in found), never=True),
        "bytes_per_host_to_target": spread(map(sent, found), never=True),
        "step_s": spread(each.step_s for each in found),
        "limit_s_per_step": median(spread(each.limit_s for each in found)),
        "wire_efficiency": spread(each.efficiency for each in found),
        "wire_is_lower_bound": beside(strategy),
        "exposed_share": spread(map(share, found)) if hosts > 1 else None,
        "accuracy": spread(each.accuracy for each in found),
    }


def with_speedups(lines: Sequence[Line], figure: str = "time_to_target_s") -> list[Line]:
    """Each line with median over the one host's, at the same rate and width."""
    alone = {(each["rate_mbit"], each.get("width")): each for each in lines if each["strategy"] == ALONE}

    def over(each: Line, figure: str) -> float | None:
        base = alone.get((each["rate_mbit"], each.get("width")))
        above, below = median(base[figure]) if base else None, median(each[figure])
        return above / below if above is not None and below else None

    return [each | {"speedup": over(each, figure), "crossed_speedup": over(each, "crossed_s")} for each in lines]


# --- goals ----------------------------------------------------------------------------------------------------------

WITHIN = 0.005
"""Of the uncompressed row's final accuracy"""


def best(lines: Sequence[Line], rate_mbit: float) -> Line | None:
    """Of our strategies the soonest at the target, those first that are as accurate in the end as uncompressed."""
    ours = [each for each in lines if each["rate_mbit"] == rate_mbit and each["strategy"] not in OTHERS]
    there = [each for each in ours if median(each["time_to_target_s"]) is not None]
    return min(
        there, key=lambda each: ((loss(lines, each) or 0.0) > WITHIN, median(each["time_to_target_s"])), default=None
    )


def loss(lines: Sequence[Line], each: Line) -> float | None:
    """How much lower its median final accuracy is than that of whole gradients at that rate."""
    for name in (UNCOMPRESSED, HOROVODRUN):
        whole = _named(lines, name, each["rate_mbit"])
        if whole is not None and whole["accuracy"] is not None and each["accuracy"] is not None:
            return float(whole["accuracy"]["median"] - each["accuracy"]["median"])
    return None


def _named(lines: Sequence[Line], name: str, rate_mbit: float) -> Line | None:
    found = (each for each in lines if each["strategy"] == name and each["rate_mbit"] == rate_mbit)
    return next(found, None)


def goals(lines: Sequence[Line], replayed: Sequence[Line]) -> list[Line]:
    """Each goal with what was found; `met` is null where it was not measured."""
    made: list[Line] = []

    def goal(
        what: str, value: float | None, least: float, *, stretch: bool = False, crossed: float | None = None
    ) -> None:
        met = None if value is None else bool(value >= least)
        made.append({"goal": what, "value": value, "crossed": crossed, "least": least, "met": met, "stretch": stretch})

    def sooner(names: Sequence[str], mine: Line | None) -> float | None:
        others = [median(each["time_to_target_s"]) for name in names if (each := _named(lines, name, 10.0))]
        times = [time for time in others if time is not None]
        own = median(mine["time_to_target_s"]) if mine else None
        return min(times) / own if times and own else None

    at = {rate: best(lines, rate) for rate in (10.0, 100.0, 1000.0)}
    for rate, least in ((10.0, 3.2), (100.0, 3.6), (1000.0, 3.6)):
        mine = at[rate]
        name = f" ({mine['strategy']})" if mine else ""
        found, between = (mine["speedup"], mine["crossed_speedup"]) if mine else (None, None)
        goal(f"best strategy{name} over 1 host at {rate:g} Mbit/s", found, least, crossed=between)
        if rate == 10.0:
            goal(f"the same, ideal {4:g}", found, 3.8, stretch=True)
    goal("best strategy sooner than plain horovodrun at 10 Mbit/s, times", sooner([HOROVODRUN], at[10.0]), 6.0)
    goal("best strategy sooner than DDP + powerSGD_hook's best rank at 10 Mbit/s", sooner(DDP_HOOKS, at[10.0]), 1.2)
    for rate, mine in at.items():
        lost = loss(lines, mine) if mine else None
        value = None if lost is None else -100 * lost
        goal(f"its final accuracy against uncompressed at {rate:g} Mbit/s, points", value, -100 * WITHIN)
    two = _named(replayed, TWO_BY_TWO, 100.0)
    goal(
        f"{TWO_BY_TWO}, share of its limit at 100 Mbit/s (replay)",
        median(two["wire_efficiency"]) if two else None,
        0.95,
    )
    return made


# --- printed --------------------------------------------------------------------------------------------------------

NOTES = f"""\
to target: training seconds, evaluation outside, to the end of the first epoch with the target's test accuracy, nothing
interpolated; median [least .. most] over seeds, a run that never got there counting as later than all (-: half or more
of them). between epochs: the same to where straight lines between the epochs' accuracies cross the target, since one
test picture more or less can move the other by an epoch. * projected: at this rate only an epoch was run; its seconds
per step (warm-up left out) times the steps that the same seed took at a faster rate, since what a step learns does not
depend on the rate (of async-ps nearly).
per host: bytes of the busiest host's NIC, sent or received, headers, idle traffic and evaluations included, over the
steps of the run, times the steps to the target. limit: what the wire needs per step, at 0.936 of the rate, for what the
strategy gives it (warm-up left out). wire: limit / actual, actual being how long a step waits for its exchange, for the
slowest host too; where the exchange may run beside the computation it is a whole step, so wire is a lower bound (>).
exposed: share of a step that waits for the exchange. final: test accuracy at the end of the whole run.
DDP + powerSGD_hook sends whole gradients in its first {powersgd.START_STEP} steps (PyTorch needs 2, and advises a
tenth of a run's). mode train: real training; replay: computation slept as profiled, speed-up by time per step."""
HEADS = (
    "strategy",
    "mode",
    "to target, s",
    "speed-up",
    "steps",
    "step, s",
    "per host, MB",
    "limit, s",
    "wire",
    "exposed",
    "final",
)


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _spread(found: Line | None, scale: float = 1.0, *, wide: bool = False, digits: int = 3) -> str:
    if found is None:
        return "-"
    middle, least, most = (
        number(None if found[key] is None else found[key] * scale, digits) for key in ("median", "min", "max")
    )
    return f"{middle} [{least} .. {most}]" if wide and len(found["values"]) > 1 else middle


def cells(each: Line) -> list[str]:
    wire = _spread(each["wire_efficiency"])
    return [
        each["strategy"],
        f"{each['mode']}{'*' if each['projected'] else ''}",
        _spread(each["time_to_target_s"], wide=True),
        number(each["speedup"]),
        _spread(each["steps_to_target"]),
        _spread(each["step_s"]),
        _spread(each["bytes_per_host_to_target"], 1e-6),
        number(each["limit_s_per_step"]),
        f"> {wire}" if each["wire_is_lower_bound"] and wire != "-" else wire,
        _spread(each["exposed_share"]),
        _spread(each["accuracy"], wide=True, digits=4),
    ]


def show(document: Line) -> str:
    """The cell, the lines rate by rate, what their columns mean, and the goals."""
    cell = ", ".join(f"{name} {value}" for name, value in document["cell"].items())
    words = " ".join(document["flags"])
    parts = [f"{document['hosts']} hosts of {document['cpu_share']:g} core, to {document['target_accuracy']:g}: {cell}"]
    parts += [f"and {words}", ""] if words else [""]
    lines = document["rows"]
    for mode, width, rate in dict.fromkeys(map(_where, lines)):
        members = [each for each in lines if _where(each) == (mode, width, rate)]
        printed = [list(HEADS), *map(cells, members)]
        widths = [max(map(len, column)) for column in zip(*printed, strict=True)]
        parts.append(f"{rate:g} Mbit/s{f', {mode}, width {width:g}' if width is not None else ''}")
        for row in printed:
            sides = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
            parts.append("  ".join(sides).rstrip())
        parts.append("")
    parts += [NOTES, ""]
    verdicts = {True: "reached", False: "missed", None: "not measured"}
    for each in document["goals"]:
        verdict = verdicts[each["met"]] + (" (stretch)" if each["stretch"] else "")
        between = f" (between epochs: {number(each['crossed'])})" if each["crossed"] is not None else ""
        parts.append(f"{verdict}: {each['goal']}: {number(each['value'])}{between}, goal {each['least']:g} or more")
    return "\n".join(parts)


def _where(each: Line) -> tuple[str, float | None, float]:
    return each["mode"], each.get("width"), each["rate_mbit"]
