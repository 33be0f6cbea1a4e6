"""Finds the number of buckets whose steps are shortest, in the first steps of a run.

More buckets hide more of the exchange behind backward, but each costs the latencies and the fixed work of an exchange.
Which number is fastest depends on link, reducer, model and processor: docs/project/decisions.md has measurements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

ORDER = (1, 2, 4, 4, 2, 1)
"""Numbers of buckets in turn, there and back, so that a machine that slows down or speeds up favours none"""
WARMUP_STEPS, STEPS = 3, 4
"""Steps before the first number, and with each. The first of these is not timed"""
LEAST_GAIN = 0.01
"""More buckets have to be faster by this share"""


class Trial:
    """`step` counts the steps of the trial; with them another rank can take part."""

    def __init__(self, most: int) -> None:
        """`most`: the largest number of buckets."""
        self._order = [count for count in ORDER if count <= most]
        self.step = 0
        self._times: dict[int, list[float]] = {count: [] for count in self._order}
        self._ended_s: float | None = None
        """When the last step ended; None if it is unknown, or not to be compared with"""

    @property
    def count(self) -> int:
        """The number of buckets of this step."""
        return self._order[min(max(0, self.step - WARMUP_STEPS) // STEPS, len(self._order) - 1)]

    @property
    def is_last(self) -> bool:
        return self.step == WARMUP_STEPS + STEPS * len(self._order) - 1

    def next_step(self) -> None:
        """A step has ended."""
        now, count, is_first = time.perf_counter(), self.count, (self.step - WARMUP_STEPS) % STEPS == 0
        if self._ended_s is not None and self.step >= WARMUP_STEPS and not is_first:
            self._times[count].append(now - self._ended_s)
        self._ended_s, self.step = now, self.step + 1

    def medians(self) -> dict[str, float]:
        """The median seconds of a step by number of buckets, of those that this rank has timed."""
        return {str(count): statistics.median(times) for count, times in self._times.items() if times}


def fastest(ranks: Sequence[dict[str, float]]) -> int:
    """Return the number of buckets to use, given the `medians` of all ranks."""
    complete = [each for each in ranks if len(each) == max(map(len, ranks))]
    means = {int(count): statistics.mean(each[count] for each in complete) for count in complete[0]}
    if not means:
        return max(ORDER)
    return min(means, key=lambda count: means[count] * (1 + LEAST_GAIN * ORDER.index(count)))
