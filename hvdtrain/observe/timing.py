"""Times each kind of work separately, on the device that does it.

As in MLPerf (and Cruz Varona, 2021), loading and initialisation are not part of the timed run. Training, validation,
test and checkpoints are timed separately. The first steps of a process are marked as warm-up, because they are slower.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain import records

WARMUP_STEPS = 3
"""Steps at the start of a process that count as warm-up and are left out of rates"""


class Clock:
    """Adds up seconds by label. A GPU works later than it is told to, so `now` marks a point in the device's work, and
    `seconds` waits until the device has reached the second of two marks."""

    def __init__(
        self, now: Callable[[], Any] = time.perf_counter, seconds: Callable[[Any, Any], float] = lambda a, b: b - a
    ) -> None:
        self._now, self._between = now, seconds
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.setdefault(label, []).append((begin, self._now()))

    def take(self, label: str) -> float:
        """Seconds under `label` since the last `take` of it."""
        return sum((self._between(*span) for span in self._spans.pop(label, ())), start=0.0)


@dataclasses.dataclass
class Spent:
    """Seconds of one rank's steps in this process, without warm-up."""

    data_s: float = 0.0
    """0 in a script, which does not report it"""
    compute_s: float = 0.0
    exchange_s: float | None = 0.0
    """None if the framework cannot separate exchange from computation"""

    def add(self, step: records.Step) -> None:
        if step.warmup:
            return
        self.data_s += step.data_s or 0.0
        self.compute_s += step.compute_s
        if self.exchange_s is None or step.communication_s is None:
            self.exchange_s = None
        else:
            self.exchange_s += step.communication_s


def step_shares(ranks: Sequence[Spent]) -> dict[str, float]:
    """Return `records.Summary.step_shares`; empty if a rank has no timed step or no exchange_s."""
    shares = []
    for rank in ranks:
        whole_s = rank.data_s + rank.compute_s + (rank.exchange_s or 0.0)
        if rank.exchange_s is None or not whole_s:
            return {}
        shares.append((rank.data_s / whole_s, rank.compute_s / whole_s, rank.exchange_s / whole_s))
    data, compute, exchange = (statistics.mean(each) for each in zip(*shares, strict=True))
    least = min(exchange for *_, exchange in shares)
    return {"data": data, "compute": compute, "exchange": exchange, "exchange_least": least}


def process_age_s() -> float:
    """Seconds since this process started (proc(5): field 22 of stat, clock ticks since boot)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
