"""Ranks of unequal speed, a GPU beside a CPU, say: each takes as much of every step as it computes in the same time.

With even batches all ranks wait for the slowest in each step. Here a global batch is cut into unequal shares, given by
`shares` or found by measuring: before step 0 all ranks compute at once, as in training, and a rank's share of the
samples becomes its share of the speed. Time is about a + b n for n samples, so speed depends on n, and the measurement
is repeated at the shares just found. Other work on a host looks like a slow rank: speeds are taken in short tries until
the medians of every other try agree, and ranks that differ by less than the tries scatter get equal shares. Gradients
are divided by the sample count of the whole step and summed by the reducer, as in any other strategy: the
mean is weighted by samples, and training equals one process's on the union of the batches, whatever the shares.
(BatchNorm is the exception, as ever: it normalises over a rank's own.)

cruz2021 gave a CPU 1/F of a GPU's batch, with F from two earlier runs, and found the result slower than the GPU alone
and less accurate, because the plain mean lets a sample of the small batch weigh F times one of the large.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.strategies.algorithms.synchronous import Synchronous

ROUNDS = 3
"""Of measuring at most: at even shares, and twice at those found before"""
TRY_S = 0.5
"""Length of a try at least: a host's CPU quota lets it run ahead for some milliseconds"""
LEAST_TRIES = 6
"""In a round, unless LONGEST_S comes first"""
LONGEST_S = 6.0
"""Length of a round, from which on it ends whether the tries agree or not"""
TOLERANCE = 0.02
"""Of a share: medians closer than this agree, and a smaller difference between ranks is not worth unequal batches"""
DIGITS = 4
"""Of a measured share, so that people can read it, and give it to `shares`"""


class Hybrid(Synchronous):
    """The shares are the loader's: an exchange is the same whatever they are."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        shares: tuple[float, ...] = bounded((), above=0, example=(3.0, 1.0), may_change=True)
        """Of each rank in a global batch, relative to each other, in order of ranks; measured if not given"""

    divides = True

    def measured_shares(
        self, replica: Any, batch_of: Callable[[Sequence[float] | None], Any]
    ) -> tuple[tuple[float, ...], str]:
        found = measured_shares(self._world, replica, batch_of)
        return found.shares, str(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What tries tell."""

    shares: tuple[float, ...]
    """Of each rank, summing to 1; exactly equal for ranks whose shares, each give or take `noise`, meet"""
    noise: float
    """How far the tries scatter, as a part of a share; TOLERANCE at least"""
    agreed: bool
    """Whether the medians of every other try differ by TOLERANCE at most"""
    tries: int

    def __str__(self) -> str:
        told = f"measured in {self.tries} tries that scatter by {100 * self.noise:.0f} %"
        if len(set(self.shares)) == 1:
            told += ", so that no rank is surely faster: equal shares are taken"
        if not self.agreed:
            told += f"; one half of them is over {100 * TOLERANCE:.0f} % off the other: give shares= if this is wrong"
        return told


def shares_of(tries: Sequence[Sequence[float]]) -> Found:
    """From the speeds of all ranks in each of two tries or more: (tries, ranks), samples per second."""
    found = np.array(tries) / np.sum(tries, axis=1, keepdims=True)
    middle = np.median(found, axis=0)
    apart = np.abs(np.median(found[::2], axis=0) - np.median(found[1::2], axis=0)) / middle
    scatter = np.subtract(*np.quantile(found, [0.75, 0.25], axis=0)) / middle
    noise = max(TOLERANCE, float(apart.max()), float(scatter.max()))
    shares, fastest = middle.copy(), np.argsort(-middle)
    while fastest.size:
        # Each share is off by up to `noise`, and where one is too small others are too large.
        alike = fastest[(1 + noise) * middle[fastest] >= (1 - noise) * middle[fastest[0]]]
        shares[alike] = middle[alike].mean()
        fastest = fastest[alike.size :]
    shares /= shares.sum()
    rounded = tuple(max(10.0**-DIGITS, round(float(share), DIGITS)) for share in shares)
    return Found(shares=rounded, noise=noise, agreed=bool(apart.max() <= TOLERANCE), tries=len(tries))


def measured_shares(world: Communicator, replica: Any, batch_of: Callable[[Sequence[float] | None], Any]) -> Found:
    """The share of each rank, of which all ranks compute their parts in the same time. Collective.

    `replica`: a `frameworks.Replica`, afterwards what it was before: backward passes are all that is done, and only
    they depend on the batch. `batch_of(shares)` is a training batch of this rank's share, of even shares for None.
    """
    if world.size == 1:
        return Found(shares=(1.0,), noise=0.0, agreed=True, tries=0)
    kept = {name: array.copy() for name, array in replica.local_state().items()}
    _pass_s(replica, batch_of(None))  # compiles, and fills caches
    found, before = _round(world, replica, batch_of(None)), (1 / world.size,) * world.size
    for _ in range(ROUNDS - 1):
        if np.allclose(found.shares, before, rtol=found.noise):
            break
        before, found = found.shares, _round(world, replica, batch_of(found.shares))
    replica.load_local(kept)
    return found


def _round(world: Communicator, replica: Any, batch: Any) -> Found:
    """Tries until they agree or the time is up. What decides is gathered, so that all ranks decide alike."""
    length_s = max(TRY_S, *world.gather(_pass_s(replica, batch)))
    tries: list[list[float]] = []
    while True:
        tries.append(world.gather(_speed(replica, batch, length_s)))
        if len(tries) > 1:
            found = shares_of(tries)
            if (found.agreed and len(tries) >= LEAST_TRIES) or len(tries) * length_s >= LONGEST_S:
                return found


def _speed(replica: Any, batch: Any, length_s: float) -> float:
    """Samples per second of this rank over `length_s` while all others compute too."""
    began, passes, spent_s = time.perf_counter(), 0, 0.0
    while spent_s < length_s:
        _pass_s(replica, batch)
        passes, spent_s = passes + 1, time.perf_counter() - began
    return passes * batch.weight / spent_s


def _pass_s(replica: Any, batch: Any) -> float:
    """Seconds of one pass."""
    began = time.perf_counter()
    replica.backward(batch, 0.0, stop=False)
    replica.synchronize()
    return time.perf_counter() - began
