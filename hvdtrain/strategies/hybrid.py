"""Ranks of unequal speed, a GPU beside a CPU, say: each takes as much of every step as it computes in the same time.

With even batches all ranks wait for the slowest in each step. Here a global batch is cut into unequal shares, given by
--shares or found by measuring: before step 0 all ranks compute at once, as in training, and a rank's share of the
samples becomes its share of the speed. Time is about a + b n for n samples, so speed depends on n, and the measurement
is repeated at the shares just found. Gradients are divided by the sample count of the whole step and summed by the
reducer of --inner as in any other strategy: the mean is weighted by samples, and training equals one process's on the
union of the batches, whatever the shares. (BatchNorm is the exception, as ever: it normalises over a rank's own.)

cruz2021 gave a CPU 1/F of a GPU's batch, with F from two earlier runs, and found the result slower than the GPU alone
and less accurate, because the plain mean lets a sample of the small batch weigh F times one of the large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.strategies.synchronous import Synchronous
from hvdtrain.world import World

ROUNDS = 3
"""Of measuring: at even shares, and twice at those found before"""
PASSES = 3
"""Of the slowest rank in a round"""
LEAST_S = 1.0
"""Length of a round at least: a host's CPU quota lets it run ahead for some milliseconds"""
DIGITS = 4
"""Of a measured share, so that people can read it, and give it to --shares"""


class Hybrid(Synchronous):
    """See `strategies.Strategy`. The shares are the loader's: an exchange is the same whatever they are."""

    uses: tuple[str, ...] = ("inner", "shares")


class Measurable(Protocol):
    """What is needed of a replica (see `frameworks.Replica`)."""

    def backward(self, batch: Any, lr: float, stop: bool) -> None: ...

    def synchronize(self) -> None: ...

    def local_state(self) -> dict[str, np.ndarray]: ...

    def load_local(self, state: dict[str, np.ndarray]) -> None: ...


def measured_shares(
    world: World, replica: Measurable, batch_of: Callable[[Sequence[float] | None], Any]
) -> tuple[float, ...]:
    """The share of each rank, summing to 1, of which all ranks compute their parts in the same time. Collective.

    `batch_of(shares)` is a training batch of this rank's share, of even shares for None. Backward passes are all that
    is done, and only they depend on the batch; the replica is afterwards what it was before.
    """
    if world.size == 1:
        return (1.0,)
    kept = {name: array.copy() for name, array in replica.local_state().items()}
    shares: tuple[float, ...] | None = None
    _pass_s(replica, batch_of(None))  # compiles, and fills caches
    for _ in range(ROUNDS):
        speeds = world.gather(_speed(world, replica, batch_of(shares)))
        shares = tuple(max(10.0**-DIGITS, round(speed / sum(speeds), DIGITS)) for speed in speeds)
    replica.load_local(kept)
    assert shares is not None
    return shares


def _speed(world: World, replica: Measurable, batch: Any) -> float:
    """Samples per second of this rank while all others compute too."""
    least_s = max(LEAST_S, PASSES * max(world.gather(_pass_s(replica, batch))))
    began, passes, spent_s = time.perf_counter(), 0, 0.0
    while spent_s < least_s:
        _pass_s(replica, batch)
        passes, spent_s = passes + 1, time.perf_counter() - began
    return passes * batch.weight / spent_s


def _pass_s(replica: Measurable, batch: Any) -> float:
    """Seconds of one pass."""
    began = time.perf_counter()
    replica.backward(batch, 0.0, stop=False)
    replica.synchronize()
    return time.perf_counter() - began
