"""Unequal shares of a global batch (`--shares`), for ranks of unequal speed such as a GPU alongside a CPU.

With equal shares all ranks wait for the slowest in every step. Here each rank gets a share of every batch, either given
or measured. For a measurement all ranks compute at once before step 0, as in training, and a rank's share of the
samples becomes its share of the total speed. Computing n samples takes about a + b n, so the speed depends on n, and
the measurement is repeated with the shares just measured. Other work on a host looks like a slow rank, so speeds are
measured in short trials until the medians of odd and even trials agree. Ranks whose speeds differ by less than the
trials vary get equal shares.

During the run the times of the steps themselves count (`renewed`, `training.balance`). At the end of an epoch, and when
the members of an elastic job change, batches are divided again if the slowest rank then needs clearly less time.

Gradients are divided by the sample count of the whole step. So the mean is weighted by samples, and training equals one
process on the union of the batches, whatever the shares. BatchNorm is the usual exception: it normalises over the
samples of its rank.

cruz2021 gave a CPU 1/F of a GPU's batch, with F from two earlier runs. The result was slower than the GPU alone and
less accurate, because an unweighted mean gives a sample of the small batch F times the weight of one of the large
batch.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

MAX_MEASUREMENTS = 3
"""The first at equal shares, the others at the shares measured before"""
TRIAL_S = 0.5
"""Minimum length of a trial: under a CPU quota a host can run ahead for some milliseconds"""
MIN_TRIALS = 6
"""Trials in a measurement, unless it takes longer than MAX_S"""
MAX_S = 6.0
"""Length of a measurement after which it ends even if the trials do not agree"""
TOLERANCE = 0.02
"""Relative difference below which medians agree, and below which unequal batches are not worth it"""
GAIN = 0.15
"""Relative decrease of the slowest rank's time for which batches are divided again during a run"""
DIGITS = 4
"""Decimal places of a measured share, so that people can read it and pass it to --shares"""


def given(config: TrainConfig, ranks: int) -> tuple[float, ...] | None:
    """Return the shares that --shares gives; None for equal shares and for shares that are to be measured.

    Raises Failure (78) if they are invalid or not one for each rank.
    """
    if config.shares is None or config.shares == "measured":
        return None
    try:
        shares = tuple(map(float, config.shares.split(":")))
    except ValueError:
        shares = ()
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise Failure(f"--shares {config.shares}: not a list of shares; hint: give measured or 3:1", exits.BAD_CONFIG)
    if len(shares) != ranks:
        raise Failure(
            f"--shares {config.shares}: {len(shares)} shares for {ranks} ranks; hint: give one for each rank",
            exits.BAD_CONFIG,
        )
    return shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The shares that follow from the speeds of all ranks in some trials."""

    shares: tuple[float, ...]
    """Share of each rank, with sum 1; exactly equal for ranks whose shares overlap within `noise`"""
    noise: float
    """Relative variation between trials; at least TOLERANCE"""
    agreed: bool
    """Whether the medians of odd and even trials differ by at most TOLERANCE"""
    trials: int

    def __str__(self) -> str:
        text = f"measured in {self.trials} trials that vary by {100 * self.noise:.0f} %"
        if len(set(self.shares)) == 1:
            text += "; no rank is clearly faster, so the shares are equal"
        if not self.agreed:
            text += f"; odd and even trials differ by more than {100 * TOLERANCE:.0f} %; hint: give --shares"
        return text


def shares_of(trials: Sequence[Sequence[float]]) -> Measurement:
    """Compute shares from two or more trials; `trials`: samples per second, of shape (trials, ranks)."""
    parts = np.array(trials) / np.sum(trials, axis=1, keepdims=True)
    median = np.median(parts, axis=0)
    difference = np.abs(np.median(parts[::2], axis=0) - np.median(parts[1::2], axis=0)) / median
    spread = np.subtract(*np.quantile(parts, [0.75, 0.25], axis=0)) / median
    noise = max(TOLERANCE, float(difference.max()), float(spread.max()))
    shares, fastest = median.copy(), np.argsort(-median)
    while fastest.size:
        # Each share is uncertain by up to `noise`, and if one is too small others are too large.
        alike = fastest[(1 + noise) * median[fastest] >= (1 - noise) * median[fastest[0]]]
        shares[alike] = median[alike].mean()
        fastest = fastest[alike.size :]
    agreed = bool(difference.max() <= TOLERANCE)
    return Measurement(shares=_rounded(shares), noise=noise, agreed=agreed, trials=len(trials))


def _rounded(parts: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    """Return shares in proportion to `parts`, with sum 1."""
    return tuple(max(10.0**-DIGITS, round(float(part), DIGITS)) for part in np.divide(parts, np.sum(parts)))


def renewed(measured: Sequence[float], kept: Sequence[float | None], pace: Sequence[float | None]) -> tuple[float, ...]:
    """Return the shares with which all ranks would compute for the same time, if the slowest rank gains GAIN by them.

    Otherwise the shares stay. `measured`: the share of each rank before step 0. `kept`: its present share, None before
    the first division. `pace`: its seconds per sample, None if it has not trained for long enough. What is None is in
    proportion to what was measured.
    """
    before = _completed(kept, measured)
    speed = _completed([each and 1 / each for each in pace], measured)
    if (1 - GAIN) * np.max(before / speed) / before.sum() >= 1 / speed.sum():
        return _rounded(speed)
    close = abs(before.sum() - 1) <= before.size * 10.0**-DIGITS
    return tuple(before.tolist()) if close else _rounded(before)


def _completed(values: Sequence[float | None], measured: Sequence[float]) -> np.ndarray:
    """Replace each None by a value in proportion to the measured shares."""
    known = [(value, share) for value, share in zip(values, measured, strict=True) if value]
    factor = sum(value for value, _ in known) / sum(share for _, share in known) if known else 1.0
    return np.array([value or factor * share for value, share in zip(values, measured, strict=True)])


def measure(world: Communicator, replica: Any, batch_of: Callable[[Sequence[float] | None], Any]) -> Measurement:
    """Measure the shares with which all ranks compute their part in the same time. Collective.

    Only backward passes run, without any exchange, so `replica` (a `frameworks.Replica`) does not change.
    `batch_of(shares)` returns a training batch of this rank's share, for None of an equal share.
    """
    if world.size == 1:
        return Measurement(shares=(1.0,), noise=0.0, agreed=True, trials=0)
    local_state = {name: array.copy() for name, array in replica.local_state().items()}
    replica.reports = False
    _backward_s(replica, batch_of(None))  # compiles, and fills caches
    measured, before = _measurement(world, replica, batch_of(None)), (1 / world.size,) * world.size
    for _ in range(MAX_MEASUREMENTS - 1):
        if np.allclose(measured.shares, before, rtol=measured.noise):
            break
        before, measured = measured.shares, _measurement(world, replica, batch_of(measured.shares))
    replica.reports = True
    replica.load_local(local_state)
    return measured


def _measurement(world: Communicator, replica: Any, batch: Any) -> Measurement:
    """Run trials until they agree or the time is up. Decisions use gathered values, so that all ranks agree."""
    length_s = max(TRIAL_S, *world.gather(_backward_s(replica, batch)))
    trials: list[list[float]] = []
    while True:
        trials.append(world.gather(_speed(replica, batch, length_s)))
        if len(trials) > 1:
            measured = shares_of(trials)
            if (measured.agreed and len(trials) >= MIN_TRIALS) or len(trials) * length_s >= MAX_S:
                return measured


def _speed(replica: Any, batch: Any, length_s: float) -> float:
    """Return the samples per second of this rank over `length_s`, while all other ranks compute too."""
    began, passes, spent_s = time.perf_counter(), 0, 0.0
    while spent_s < length_s:
        _backward_s(replica, batch)
        passes, spent_s = passes + 1, time.perf_counter() - began
    return passes * batch.weight / spent_s


def _backward_s(replica: Any, batch: Any) -> float:
    """Return the seconds of one backward pass."""
    began = time.perf_counter()
    replica.backward(batch, 0.0, stop=False)
    replica.synchronize()
    return time.perf_counter() - began
