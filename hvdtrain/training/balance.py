"""Shares of a batch that follow the speed of the ranks during a run (`--shares measured`)."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.strategies import shares as unequal_shares

MOST, LEAST = 20, 5
"""Steps whose median is the pace of a rank, at most and at least"""


class Balance:
    """One rank's share of a batch, and its pace: the seconds that it computes for a sample.

    After a new division the pace of the old one counts until enough steps are known, because a rank that is slow must
    not get a large share when the members change twice in a short time.
    """

    def __init__(self, measured: Sequence[float]) -> None:
        """`measured`: the share of each rank before step 0, by the launcher's numbers."""
        self._measured = measured
        self._share: float | None = None
        """None before the first division"""
        self._pace: float | None = None
        self._recent: collections.deque[float] = collections.deque(maxlen=MOST)

    def add(self, step: records.Step) -> None:
        """Add a step of this rank."""
        if step.samples and not step.warmup:
            self._recent.append(step.compute_s / step.samples)

    def shares(self, ranks: Communicator) -> tuple[float, ...]:
        """Divide again, and return the share of each present rank, equal on all ranks. Collective."""
        if len(self._recent) >= LEAST:
            self._pace = statistics.median(self._recent)
        known = ranks.gather([ranks.number, self._share, self._pace])
        usual = statistics.mean(self._measured)  # of a rank that was not there before step 0
        measured = [self._measured[number] if number < len(self._measured) else usual for number, *_ in known]
        shares = unequal_shares.renewed(measured, [kept for _, kept, _ in known], [pace for *_, pace in known])
        if shares[ranks.rank] != self._share:
            self._share = shares[ranks.rank]
            self._recent.clear()
        return shares
