"""A pilot: trains a model with two batch sizes, to see how many more samples the larger one needs for the same loss.

Statistics of gradients would need a tenth of the time, but they say nothing of the optimizer: with Adam a captioner
needs four times the epochs at batch 64 instead of 16, with Muon 1.2 times (docs/benchmarks/predictions.md).
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

Losses = Sequence[tuple[int, float]]
"""The samples of each step, and their mean loss"""


def branch(
    replica: Any,
    probe: Probe,
    batches: Iterator[Batch],
    size: int,
    learning_rate: Callable[[int], float],
    seconds: float,
    until: Losses = (),
) -> Losses:
    """Train for some seconds with batches of `size` samples, and return the losses. `learning_rate`: by step.

    It ends earlier when the mean loss of a window is as low as at the end of `until`.
    """
    ending, losses, last = time.perf_counter() + seconds, list[tuple[int, float]](), _width(until, size) // size
    goal = _curve(until, _width(until, size))[-1][1] if until else -math.inf
    while not losses or time.perf_counter() < ending:
        if len(losses) % last == 0 and losses and np.mean([loss for _, loss in losses[-last:]]) <= goal:
            break
        probe.ready_s = []
        replica.backward(next(batches), 0.0, False)
        probe.step(replica, learning_rate(len(losses)), Clock())
        losses.append((size, Exchanged.of(replica.tail(), 0).loss))
    return losses


def noise_scale(small: Losses, large: Losses) -> tuple[float, float | None]:
    """Return `Profile.noise_scale` that explains how many more samples the larger batch needs: least and most.

    The scale S of a ratio r of samples solves r = (1 + large / S) / (1 + small / S). (1, None), which means anything,
    if the model has not learned enough.
    """
    batches = small[0][0], large[0][0]
    width = _width(small, batches[1])
    one, other = _curve(small, width), _curve(large, width)
    if len(one) < LEAST_WINDOWS or len(other) < LEAST_WINDOWS or one[-1][1] > LEARNED * one[0][1]:
        return 1.0, None
    ratios = [crossing(other, loss) / samples for samples, loss in one[-len(one) // 3 :]]
    least = min(other[-1][0] / one[-1][0] if math.isinf(each) else each for each in ratios) / ERROR
    return _scale(max(ratios) * ERROR, *batches) or 1.0, _scale(least, *batches)


def _width(small: Losses, large: int) -> int:
    """Return the samples of a window: whole batches of both sizes."""
    return large * max(1, round(sum(count for count, _ in small) / WINDOWS / large))


def _curve(losses: Losses, width: float) -> list[tuple[float, float]]:
    """Return the samples at the centre of each whole window, and the least mean loss of a window until then."""
    ends = np.cumsum([count for count, _ in losses])
    windows = [
        list(each) for _, each in itertools.groupby(range(len(ends)), key=lambda step: (ends[step] - 1) // width)
    ]
    means = [float(np.mean([losses[step][1] for step in steps])) for steps in windows]
    centres = [float(ends[steps[0]] - losses[steps[0]][0] + ends[steps[-1]]) / 2 for steps in windows]
    whole = len(windows) if ends[-1] % width == 0 else len(windows) - 1
    return list(zip(centres[:whole], itertools.accumulate(means[:whole], min), strict=True))


def crossing(curve: Sequence[tuple[float, float]], loss: float) -> float:
    """Return the samples after which the curve has this loss, along straight lines; infinite if it never has."""
    before = curve[0]
    for samples, value in curve:
        if value <= loss:
            step = samples - before[0]
            return samples - step * (loss - value) / (before[1] - value) if step else samples
        before = samples, value
    return math.inf


def _scale(ratio: float, small: int, large: int) -> float | None:
    """Return the noise scale of a ratio of samples, at least 1. None if the larger batch needs no more samples."""
    if ratio <= 1:
        return None
    return max(1.0, (large - ratio * small) / (ratio - 1)) if math.isfinite(ratio) else 1.0
