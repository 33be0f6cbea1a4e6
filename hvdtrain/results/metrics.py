"""Streams a rank's metrics file into sums: memory does not grow with the number of steps.

Of two records for the same step the later one counts. A run that was resumed, or begun again in the same folder, goes
back: what it had done beyond that step no longer counts. Such a file is read a second time, when it is known which
steps those are.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.records.metrics import Score
from hvdtrain.results import scores


@dataclasses.dataclass
class Sums:
    """Sums over the steps that count; sums of times leave warm-up out."""

    steps: int = 0
    timed: int = 0
    data_s: float | None = 0.0
    """None as soon as one step does not know; and so communication_s"""
    compute_s: float = 0.0
    communication_s: float | None = 0.0
    bytes_sent: int = 0
    timed_bytes_sent: int = 0

    def add(self, step: dict[str, Any]) -> None:
        self.steps += 1
        self.bytes_sent += step["bytes_sent"]
        if step["warmup"]:
            return
        self.timed += 1
        self.timed_bytes_sent += step["bytes_sent"]
        self.compute_s += step["compute_s"]
        self.data_s = _added(self.data_s, step["data_s"])
        self.communication_s = _added(self.communication_s, step["communication_s"])


def _added(sum_s: float | None, seconds: float | None) -> float | None:
    return None if sum_s is None or seconds is None else sum_s + seconds


class Restarts:
    """The lines at which a file goes back to an earlier step, and those steps, both ascending."""

    def __init__(self) -> None:
        self._lines: list[int] = []
        self._steps: list[int] = []
        self._expected = 0  # the step after the last

    def see(self, line: int, cls: type[records.Record], step: int) -> bool:
        """Takes a Step or Resumed record, in the file's order; whether the file goes back there."""
        back, self._expected = step < self._expected, step + (cls is records.Step)
        if back:
            while self._steps and self._steps[-1] >= step:
                self._steps.pop()
                self._lines.pop()
            self._lines.append(line)
            self._steps.append(step)
        return back

    def __bool__(self) -> bool:
        return bool(self._lines)

    def superseded(self, line: int, step: int) -> bool:
        """Whether a record of `step` (the first is 0) on that line was done again later."""
        later = bisect.bisect_right(self._lines, line)
        return later < len(self._steps) and step >= self._steps[later]


@dataclasses.dataclass
class Metrics:
    """What a rank's metrics file says."""

    sums: Sums
    restarts: Restarts
    last_start: int = 0
    """The step that the last process began with"""
    resumed: bool = False
    checkpoint_s: float = 0.0
    """Of every checkpoint that counts; the summary's sum lacks those that the run went on from"""
    starts: list[records.Resumed] = dataclasses.field(default_factory=list)
    """Every resume from a checkpoint"""
    summary: records.Summary | None = None


def read(path: Path, torn: Callable[[int], None], declared: Mapping[str, Score]) -> Metrics:
    """Reads it once, twice if it goes back; `declared` are the scores that its records may hold.

    Raises Failure (65, 74, 77) with file:line.
    """
    found = Metrics(Sums(), Restarts())
    for line, cls, value in records.read_values(path, torn):
        if cls in (records.Step, records.Resumed):
            found.summary = None
            if found.restarts.see(line, cls, value["step"]) or cls is records.Resumed:
                found.last_start, found.resumed = value["step"], True
            if cls is records.Step:
                found.sums.add(value)
            else:
                found.starts.append(records.make(cls, value))
        elif cls is records.Saved:
            found.checkpoint_s += value["checkpoint_s"]
        elif cls is records.Summary:
            found.summary = records.make(cls, value)
            for each in (found.summary.test_scores, *found.summary.validation_scores):
                scores.check(each, declared, f"{path}:{line}")
        elif cls is records.Epoch:
            for each in (value["train_scores"], value["validation_scores"]):
                scores.check(each, declared, f"{path}:{line}")
    if found.restarts:
        found.sums, found.checkpoint_s = Sums(), 0.0
        for line, cls, value in records.read_values(path):
            if cls is records.Step and not found.restarts.superseded(line, value["step"]):
                found.sums.add(value)
            elif cls is records.Saved and not found.restarts.superseded(line, value["step"] - 1):
                found.checkpoint_s += value["checkpoint_s"]
    return found


@dataclasses.dataclass(frozen=True)
class Timed:
    """An epoch, and the seconds from the loop's start to the end of its validation."""

    epoch: records.Epoch
    trained_s: float
    """Training alone"""
    elapsed_s: float
    """With validation, and the checkpoints before"""


def epochs(path: Path) -> list[Timed]:
    """The epochs that count, in order. Raises Failure."""
    restarts = Restarts()
    found: list[tuple[int, records.Epoch | records.Saved]] = []
    for line, cls, value in records.read_values(path):
        if cls in (records.Epoch, records.Saved):
            found.append((line, records.make(cls, value)))
        elif cls in (records.Step, records.Resumed):
            restarts.see(line, cls, value["step"])
    timed: list[Timed] = []
    trained_s = other_s = 0.0
    for line, each in found:
        if restarts.superseded(line, each.step - 1):
            continue
        if isinstance(each, records.Saved):
            other_s += each.checkpoint_s
        else:
            trained_s += each.train_s
            other_s += each.validation_s
            timed.append(Timed(each, trained_s, trained_s + other_s))
    return timed
