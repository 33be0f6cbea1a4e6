"""How far a run is, and the sums that its records are made of: what a checkpoint keeps of the loop."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hvdtrain import records


@dataclasses.dataclass
class Position:
    """Steps done and sums so far. Seconds and bytes are rank 0's where they are recorded, samples are all ranks'."""

    step: int = 0
    """Steps done since the start of the run"""
    loss: float = 0.0
    """Sums over the current epoch and all ranks"""
    correct: float = 0.0
    samples: int = 0
    epoch_s: float = 0.0
    rated_samples: int = 0
    """Samples over all ranks, and seconds, of the current epoch's steps that are not warm-up"""
    rated_s: float = 0.0
    total_rated_samples: int = 0
    total_rated_s: float = 0.0
    total_data_s: float = 0.0
    train_s: float = 0.0
    validation_s: float = 0.0
    checkpoint_s: float = 0.0
    bytes_sent: int = 0
    validation_accuracy: list[float | None] = dataclasses.field(default_factory=list)
    validation_scores: list[dict[str, float]] = dataclasses.field(default_factory=list)
    merits: list[float | None] = dataclasses.field(default_factory=list)
    """Of each epoch: by the highest the best one is told"""
    best_step: int = 0

    def learn(self, totals: np.ndarray) -> None:
        """Sums over all ranks that have become known: loss, correct samples, samples (of one step, several or none)."""
        self.loss += float(totals[0])
        self.correct += float(totals[1])
        self.samples += int(totals[2])

    def add(self, step: records.Step, *, seconds: float, samples: int) -> None:
        """A step is done: how long it took in all, and the samples of all ranks."""
        self.step += 1
        self.epoch_s += seconds
        self.bytes_sent += step.bytes_sent
        if not step.warmup:
            self.rated_samples += samples
            self.rated_s += seconds
            self.total_rated_samples += samples
            self.total_rated_s += seconds
            self.total_data_s += step.data_s

    def reached(self, accuracy: float | None) -> bool:
        """Whether the last epoch's validation gave at least this accuracy."""
        last = self.validation_accuracy[-1] if self.validation_accuracy else None
        return accuracy is not None and last is not None and last >= accuracy

    def end_epoch(self, epoch: int, *, merit: float | None, **measured: Any) -> tuple[records.Epoch, bool]:
        """The epoch's record (`measured` are its fields that are not sums), and whether its merit is the highest."""
        record = records.Epoch(
            epoch=epoch,
            step=self.step,
            train_loss=self.loss / self.samples,
            train_accuracy=self.correct / self.samples,
            train_s=self.epoch_s,
            samples=self.samples,
            samples_per_s=self.rated_samples / self.rated_s if self.rated_s else None,
            **measured,
        )
        is_best = merit is not None and merit > max((m for m in self.merits if m is not None), default=-math.inf)
        if is_best:
            self.best_step = self.step
        self.merits.append(merit)
        self.train_s += record.train_s
        self.validation_s += record.validation_s
        self.validation_accuracy.append(record.validation_accuracy)
        if record.scores:
            self.validation_scores.append(record.scores)
        self.loss = self.correct = self.epoch_s = self.rated_s = 0.0
        self.samples = self.rated_samples = 0
        return record, is_best

    def summary(self, *, ranks: int, **measured: Any) -> records.Summary:
        """The run's summary; `measured` are its fields that are not sums."""
        rate = self.total_rated_samples / self.total_rated_s if self.total_rated_s else None
        return records.Summary(
            ranks=ranks,
            steps=self.step,
            validation_accuracy=self.validation_accuracy,
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
