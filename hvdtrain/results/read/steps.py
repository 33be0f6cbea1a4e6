"""Adds up a rank's metrics file in a memory that does not depend on the number of steps.

Of two records of the same step, the later one counts. A run that was resumed, or started again in the same folder,
repeats steps: the earlier records of these steps do not count. Such a file is read a second time, once the repeated
steps are known.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdtrain import records
from hvdtrain.records.metrics import Score
from hvdtrain.results import scores

MOST_BLOCKS = 32


@dataclasses.dataclass
class Sums:
    """Sums over the steps that count. Sums of times exclude warm-up steps."""

    steps: int = 0
    timed: int = 0
    data_s: float | None = 0.0
    """None if any step has none, like communication_s"""
    compute_s: float = 0.0
    communication_s: float | None = 0.0
    bytes_sent: int = 0
    timed_bytes_sent: int = 0
    blocks: list[float] = dataclasses.field(default_factory=list)
    """Mean seconds of a step in equal parts of the run, fewer than MOST_BLOCKS"""
    block_steps: int = 1
    begun_s: float = 0.0

    def add(self, step: records.Step) -> None:
        self.steps += 1
        self.bytes_sent += step.bytes_sent
        if step.warmup:
            return
        self.timed += 1
        self.timed_bytes_sent += step.bytes_sent
        self.compute_s += step.compute_s
        self.data_s = _add(self.data_s, step.data_s)
        self.communication_s = _add(self.communication_s, step.communication_s)
        self.begun_s += (step.data_s or 0.0) + step.compute_s + (step.communication_s or 0.0)
        if self.timed % self.block_steps == 0:
            self.blocks, self.begun_s = [*self.blocks, self.begun_s / self.block_steps], 0.0
        if len(self.blocks) == MOST_BLOCKS:
            self.blocks = [sum(pair) / 2 for pair in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
            self.block_steps *= 2


def _add(sum_s: float | None, seconds: float | None) -> float | None:
    return None if sum_s is None or seconds is None else sum_s + seconds


class Restarts:
    """The lines at which a file returns to an earlier step, and these steps, both in ascending order."""

    def __init__(self) -> None:
        self._lines: list[int] = []
        self._steps: list[int] = []
        self._expected = 0  # the step after the last one

    def add(self, line: int, record: records.Step | records.Resumed) -> bool:
        """Call it with each Step and Resumed record in order. Returns whether the file returns to an earlier step."""
        step = record.step
        restarted, self._expected = step < self._expected, step + isinstance(record, records.Step)
        if restarted:
            while self._steps and self._steps[-1] >= step:
                self._steps.pop()
                self._lines.pop()
            self._lines.append(line)
            self._steps.append(step)
        return restarted

    def __bool__(self) -> bool:
        return bool(self._lines)

    def superseded(self, line: int, step: int) -> bool:
        """Whether the record of `step` (from 0) on that line was replaced later."""
        later = bisect.bisect_right(self._lines, line)
        return later < len(self._steps) and step >= self._steps[later]


@dataclasses.dataclass
class RankMetrics:
    """The content of a rank's metrics file."""

    sums: Sums
    restarts: Restarts
    last_start: int = 0
    """First step of the last process"""
    resumed: bool = False
    checkpoint_s: float = 0.0
    """Time of every checkpoint that counts. The summary's sum excludes those that a run was resumed from"""
    starts: list[records.Resumed] = dataclasses.field(default_factory=list)
    """Every resume from a checkpoint"""
    views: list[records.View] = dataclasses.field(default_factory=list)
    """The members of an elastic run after each loss"""
    choices: list[records.Chosen] = dataclasses.field(default_factory=list)
    """Choices that count"""
    divisions: list[tuple[int, list[float]]] = dataclasses.field(default_factory=list)
    """Divisions of the batches during the run, each with its first step"""
    epochs: list[TimedEpoch] = dataclasses.field(default_factory=list)
    """The epochs that count, in order"""
    summary: records.Summary | None = None


@dataclasses.dataclass(frozen=True)
class TimedEpoch:
    epoch: records.Epoch
    trained_s: float
    """Seconds of training until the end of the epoch"""
    elapsed_s: float
    """Seconds until the end of its validation, including earlier validations and checkpoints"""


def read(path: Path, incomplete: Callable[[int], None], declared: Mapping[str, Score]) -> RankMetrics:
    """Reads the file, twice if steps were repeated. `declared` are the scores that its records may contain.

    Raises Failure (65, 74, 77) with file:line.
    """
    metrics = RankMetrics(Sums(), Restarts())
    passed = list[tuple[int, records.Epoch | records.Saved | records.Chosen | records.View]]()
    for line, record in records.read_lines(path, incomplete):
        match record:
            case records.Step() | records.Resumed():
                metrics.summary = None
                restarted = metrics.restarts.add(line, record)
                if isinstance(record, records.Step):
                    metrics.sums.add(record)
                else:
                    metrics.starts.append(record)
                if restarted or isinstance(record, records.Resumed):
                    metrics.last_start, metrics.resumed = record.step, True
            case records.View():
                metrics.views.append(record)
                passed.append((line, record))
            case records.Saved() | records.Chosen():
                passed.append((line, record))
            case records.Summary():
                metrics.summary = record
                for by_name in (record.test_scores, *record.validation_scores):
                    scores.check(by_name, declared, f"{path}:{line}")
            case records.Epoch():
                for by_name in (record.train_scores, record.validation_scores):
                    scores.check(by_name, declared, f"{path}:{line}")
                passed.append((line, record))
    trained_s = validation_s = 0.0
    for line, each in passed:
        if metrics.restarts.superseded(line, each.step - 1):
            continue
        if isinstance(each, records.Epoch | records.View) and each.shares:
            metrics.divisions.append((each.step, each.shares))
        if isinstance(each, records.Chosen):
            metrics.choices.append(each)
        elif isinstance(each, records.Saved):
            metrics.checkpoint_s += each.checkpoint_s
        elif isinstance(each, records.Epoch):
            trained_s += each.train_s
            validation_s += each.validation_s
            elapsed_s = trained_s + validation_s + metrics.checkpoint_s
            metrics.epochs.append(TimedEpoch(each, trained_s, elapsed_s))
    if metrics.restarts:
        metrics.sums = Sums()
        for line, record in records.read_lines(path):
            if isinstance(record, records.Step) and not metrics.restarts.superseded(line, record.step):
                metrics.sums.add(record)
    return metrics
