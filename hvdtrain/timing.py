"""Separate clocks for separate work: labelled spans that end only when the device has finished.

MLPerf's rule (and cruz2021's): loading and initialisation are outside the timed run; training, validation, test and
checkpoints are timed apart, and the first steps of a process, slower while caches and kernels warm up, are marked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WARMUP_STEPS = 3
"""Steps at the start of a process that count as warm-up and stay out of rates."""


class Clock:
    """Adds up the seconds spent under each label. `sync` waits until the device has done all work given to it."""

    def __init__(self, sync: Callable[[], None] = lambda: None) -> None:
        self._sync = sync
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._sync()
        self._seconds[label] = self._seconds.get(label, 0.0) + time.perf_counter() - start

    def take(self, label: str) -> float:
        """Seconds under `label` since it was last taken."""
        return self._seconds.pop(label, 0.0)


def process_age_s() -> float:
    """Seconds since this process started (proc(5): field 22 of stat, in clock ticks since boot)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
