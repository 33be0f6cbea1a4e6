"""The progress of a run and the sums for its records: the part of a checkpoint that belongs to the loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from hvdtrain import records
from hvdtrain.records.metrics import Metric


@dataclasses.dataclass
class Position:
    """Steps and sums so far. Seconds and bytes are of one rank, samples of all ranks."""

    epoch: int = 0
    """Epochs done"""
    consumed: int = 0
    """Samples of the current epoch that all ranks together have trained on"""
    step: int = 0
    """Number of the next step, counted from the start of the run"""
    totals: list[float] = dataclasses.field(default_factory=list)
    """Sums of the current epoch over all ranks, as far as known: see `Exchanged.totals`"""
    epoch_s: float = 0.0
    rated_samples: int = 0
    """Samples over all ranks in the current epoch's steps after warm-up; `rated_s` has their seconds"""
    rated_s: float = 0.0
    total_rated_samples: int = 0
    total_rated_s: float = 0.0
    total_data_s: float = 0.0
    train_s: float = 0.0
    validation_s: float = 0.0
    checkpoint_s: float = 0.0
    bytes_sent: int = 0
    local_bytes_sent: int = 0
    validation_scores: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """Scores of each epoch; empty without a validation split"""
    best_step: int = 0
    """Steps done at the end of the epoch with the best primary metric"""
    averaged_step: int = 0
    """Steps done at the last update of the moving average of the weights (--ema)"""
    strategy: str = ""
    """The strategy that runs now, which --strategy auto may change"""

    @classmethod
    def loaded(cls, progress: Mapping[str, Any], step: int, *, epoch_samples: int) -> Self:
        """Return the position in a checkpoint of step `step`, for a run with `epoch_samples` samples in an epoch.

        Raises ValueError for a position that no run of this version can have reached.
        """
        if other := sorted(progress.keys() ^ vars(cls()).keys()):
            raise ValueError(
                f"its progress is from another version of hvdtrain ({', '.join(other)[:80]}); hint: use that version"
            )
        at = cls(**progress)
        for name, value in progress.items():
            kind = type(getattr(cls(), name))
            wrong = type(value) is not kind and (kind, type(value)) != (float, int)
            if wrong or (kind in (int, float) and not 0 <= value < math.inf):
                raise ValueError(f"its progress has {name} = {value!r:.80}")
        scores = [value for each in at.validation_scores for value in (each.values() if type(each) is dict else [each])]
        if not all(type(value) in (int, float) for value in [*at.totals, *scores]):
            raise ValueError("its progress has totals or validation_scores that are not numbers")
        if at.step != step:
            raise ValueError(f"its progress has step {at.step}, and the checkpoint step {step}")
        samples = at.epoch * epoch_samples + at.consumed
        possible = max(at.best_step, at.averaged_step) <= step <= samples and at.consumed <= epoch_samples
        if not possible or len(at.validation_scores) != at.epoch:
            raise ValueError(
                f"its progress contradicts itself: step {step} after {at.epoch} epochs of {epoch_samples} samples and "
                f"{at.consumed} samples, best step {at.best_step}, {len(at.validation_scores)} validations"
            )
        return at

    def learn(self, totals: np.ndarray) -> None:
        """Add totals over all ranks, of one step or of several."""
        self.totals = [a + b for a, b in zip(self.totals or [0.0] * len(totals), totals.tolist(), strict=True)]

    def add(self, step: records.Step, *, seconds: float, consumed: int) -> None:
        """Add a step that took `seconds`, after which `consumed` samples of the epoch are done."""
        self.step += 1
        samples, self.consumed = consumed - self.consumed, consumed
        self.epoch_s += seconds
        self.bytes_sent += step.bytes_sent
        self.local_bytes_sent += step.local_bytes_sent or 0
        if not step.warmup:
            self.rated_samples += samples
            self.rated_s += seconds
            self.total_rated_samples += samples
            self.total_rated_s += seconds
            self.total_data_s += step.data_s or 0.0

    def averaging_decay(self, decay: float) -> float:
        """Return the decay of the moving average for all steps since its last update, including the current one.

        `decay`: of one step. See `options.Optimization.ema`.
        """
        steps, self.averaged_step = self.step + 1 - self.averaged_step, self.step + 1
        return min(decay, (1 + self.step) / (10 + self.step)) ** steps

    def reached(self, target: tuple[str, float] | None, metric: Metric) -> bool:
        """Whether the last epoch's score is at least as good as the target."""
        if target is None or not self.validation_scores:
            return False
        name, least = target
        value = self.validation_scores[-1].get(name)
        return value is not None and not metric.scores[name].better(least, value)

    def end_epoch(
        self, epoch: int, metric: Metric, scores: dict[str, float], **measured: Any
    ) -> tuple[records.Epoch, bool]:
        """Return the epoch's record, and whether its primary metric is the best so far; of equal ones the last is.

        `scores`: of the evaluated split. `measured`: the record's fields that are not sums.
        """
        loss, train_scores = metric.means(np.array(self.totals))
        record = records.Epoch(
            epoch=epoch,
            step=self.step,
            train_loss=loss,
            train_scores=train_scores,
            validation_scores=scores,
            train_s=self.epoch_s,
            samples=int(self.totals[-1]),
            samples_per_s=self.rated_samples / self.rated_s if self.rated_s else None,
            **measured,
        )
        value = scores.get(metric.primary)
        before = [each[metric.primary] for each in self.validation_scores if metric.primary in each]
        better = metric.scores[metric.primary].better
        is_best = value is not None and not any(better(each, value) for each in before)
        if is_best:
            self.best_step = self.step
        self.train_s += record.train_s
        self.validation_s += record.validation_s
        self.validation_scores.append(scores)
        self.totals, self.epoch_s, self.rated_s, self.rated_samples = [], 0.0, 0.0, 0
        self.epoch, self.consumed = epoch + 1, 0
        return record, is_best

    def summary(self, *, ranks: int, **measured: Any) -> records.Summary:
        """Return the run's summary. `measured`: its fields that are not sums."""
        rate = self.total_rated_samples / self.total_rated_s if self.total_rated_s else None
        return records.Summary(
            ranks=ranks,
            steps=self.step,
            validation_scores=self.validation_scores,
            train_s=self.train_s,
            validation_s=self.validation_s,
            checkpoint_s=self.checkpoint_s,
            samples_per_s=rate,
            samples_per_s_per_rank=rate / ranks if rate else None,
            data_share=self.total_data_s / self.total_rated_s if self.total_rated_s else None,
            bytes_sent=self.bytes_sent,
            **measured,
        )
