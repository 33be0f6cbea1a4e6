"""A pilot: trains a model for some seconds to estimate what larger batches cost."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvdtrain.data import Batch
from hvdtrain.observe.timing import Clock
from hvdtrain.plan.profile import WARM_UP_STEPS, Probe
from hvdtrain.strategies.cost import elements

PILOT_S = 10.0
PILOT_GROUPS, GROUP_BATCHES = 8, 3
"""Groups of batches whose mean gradients are compared after the pilot"""
MOST_COMPARED = 1 << 25
"""Numbers of a gradient that are compared, evenly spaced: at most 1 GB for all groups"""
T_QUANTILE = 2.36
"""95 %, for the degrees of freedom of the groups"""


def noise_scale(
    replica: Any,
    probe: Probe,
    batches: Iterator[Batch],
    batch_size: int,
    learning_rate: Callable[[int], float],
    budget_s: float,
) -> tuple[float, float | None]:
    """Train for half of the time, and return `Profile.noise_scale` of the weights that result.

    The gradient noise scale is the trace of the covariance of one sample's gradient / the squared norm of the mean
    gradient (McCandlish et al., 2018, arXiv:1812.06162). Products of the gradients of different batches estimate the
    norm without bias, and the jackknife gives its 95 % interval.
    """

    def backward() -> None:
        probe.ready_s = []
        replica.backward(next(batches), 0.0, False)
        replica.synchronize()

    ending = time.perf_counter() + budget_s / 2
    step = 0
    while step < WARM_UP_STEPS or time.perf_counter() < ending:
        backward()
        probe.step(replica, learning_rate(step), Clock())
        step += 1
    size = elements(probe.shapes)
    spacing = -(-size // MOST_COMPARED)
    groups = np.zeros((PILOT_GROUPS, -(-size // spacing)), np.float32)
    squares = list[float]()
    for number in range(PILOT_GROUPS * GROUP_BATCHES):
        backward()
        gradient = replica.vector()[:size:spacing]
        squares.append(float(gradient @ gradient))
        groups[number // GROUP_BATCHES] += gradient / GROUP_BATCHES
    products = groups @ groups.T
    norm, *without = (_mean_product(products, gone) for gone in [[], *range(PILOT_GROUPS)])
    spread = statistics.pvariance(without) * (PILOT_GROUPS - 1)
    error = T_QUANTILE * math.sqrt(spread)
    trace = batch_size * max(0.0, statistics.mean(squares) - norm)
    least = trace / max(norm + error, 1e-30)
    return max(1.0, least), max(1.0, trace / (norm - error)) if norm > error else None


def _mean_product(products: np.ndarray, gone: Any) -> float:
    """Return the mean product of different groups, without the rows and columns of those that are gone."""
    left = np.delete(np.delete(products, gone, 0), gone, 1)
    count = len(left)
    return float((left.sum() - np.trace(left)) / (count * (count - 1)))
