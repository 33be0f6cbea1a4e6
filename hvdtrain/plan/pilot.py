"""A pilot: trains a model with two batch sizes, to see how many more samples the larger one needs for the same loss.

Statistics of gradients would take less time, but they say nothing of the optimizer: with Adam a captioner does not
reach at batch 64 the score of batch 16, with Muon it needs 1.2 times the epochs (docs/benchmarks/predictions.md).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.data import Batch
from hvdtrain.observe.timing import Clock
from hvdtrain.plan.profile import Probe
from hvdtrain.strategies.replicas import Exchanged

PILOT_S = 25.0
"""Time of the smaller batch; the larger one takes until it has the same loss, but at most twice as long"""
LARGER = 4
"""The larger batch, relative to the other one"""
WINDOWS, LEAST_WINDOWS = 12, 4
"""Parts of a branch whose mean losses are compared"""
LEARNED = 0.95
"""A model whose loss fell less has not begun to learn, and nothing can be said"""
ERROR = 1.25
"""The pilot's ratio of samples may be off by this factor: docs/benchmarks/predictions.md"""
LEAST_RATIO = 1.05
"""A larger batch is taken to need at least that many more samples at the lower end of the scale"""

Losses = Sequence[float]
"""The mean loss of each step"""
Train = Callable[[int, float, int, float], Losses]
"""(batch, seconds, steps, goal): trains a fresh model for some seconds, or until the mean loss of its last steps is at
most the goal"""


def train(
    replica: Any,
    probe: Probe,
    batches: Iterator[Batch],
    learning_rate: Callable[[int], float],
    seconds: float,
    steps: int,
    goal: float,
) -> Losses:
    """Train; see `Train`. `learning_rate`: by step."""
    ending, losses = time.perf_counter() + seconds, list[float]()
    while not losses or time.perf_counter() < ending:
        if losses and len(losses) % steps == 0 and np.mean(losses[-steps:]) <= goal:
            break
        probe.ready_s = []
        replica.backward(next(batches), 0.0, False)
        probe.step(replica, learning_rate(len(losses)), Clock())
        losses.append(Exchanged.of(replica.tail(), 0).loss)
    return losses


def noise_scale(train: Train, small: int, large: int) -> tuple[float, float | None] | None:
    """Return `Profile.noise_scale` that explains how many more samples the larger batch needs: least and most.

    The scale S of a ratio r of samples solves r = (1 + large / S) / (1 + small / S). None if the model does not learn
    enough within the time.
    """
    losses = train(small, PILOT_S, 1, -math.inf)
    width = large * max(1, round(small * len(losses) / WINDOWS / large))  # whole batches of both sizes
    one = _curve(losses, small, width)
    if len(one) < LEAST_WINDOWS or not one[-1][1] <= LEARNED * one[0][1] < math.inf:
        return None
    other = _curve(train(large, 2 * PILOT_S, width // large, one[-1][1]), large, width)
    ratios = [crossing(other, loss) / crossing(one, loss) for _, loss in one[-(len(one) // 3) :]]
    reached = other[-1][0] / one[-1][0] if other else 1.0
    least = min(reached if math.isinf(each) else each for each in ratios) / ERROR
    return _scale(max(LEAST_RATIO, *ratios) * ERROR, small, large), _scale(least, small, large) if least > 1 else None


def _curve(losses: Losses, batch: int, width: int) -> list[tuple[float, float]]:
    """Return the samples at the centre of each window of `width`, and the least mean loss of a window until then."""
    steps = width // batch
    means = [float(np.mean(losses[end - steps : end])) for end in range(steps, len(losses) + 1, steps)]
    return [((number + 0.5) * width, loss) for number, loss in enumerate(itertools.accumulate(means, min))]


def crossing(curve: Sequence[tuple[float, float]], loss: float) -> float:
    """Return the samples after which the curve has this loss, along straight lines; infinite if it never has."""
    before: tuple[float, float] | None = None
    for samples, value in curve:
        if value <= loss:
            if before is None:
                return samples
            return samples - (samples - before[0]) * (loss - value) / (before[1] - value)
        before = samples, value
    return math.inf


def _scale(ratio: float, small: int, large: int) -> float:
    """Return the noise scale of a ratio of samples above 1, at least 1."""
    return max(1.0, (large - ratio * small) / (ratio - 1)) if math.isfinite(ratio) else 1.0
