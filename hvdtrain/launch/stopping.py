"""The signals that a launcher receives: when it asks the ranks for a checkpoint, and when it ends them."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from types import FrameType


class StopRequests:
    """The signals of this process, which SIGINT, SIGTERM and SIGUSR1 no longer end.

    SIGUSR1 may be Slurm's warning before SIGTERM, so SIGTERM after it still gives the full grace period.
    """

    def __init__(self, grace_s: float, limited: Sequence[signal.Signals]) -> None:
        """`limited`: the signals after which the ranks have `grace_s` left. A second SIGTERM or SIGINT ends them."""
        self._grace_s, self._limited = grace_s, limited
        self.received: list[signal.Signals] = []
        self.deadline = math.inf
        """When the ranks are ended without a checkpoint"""
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """Becomes readable when a signal arrives, including SIGCHLD"""
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *limited}:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = number != signal.SIGUSR1 and any(before != signal.SIGUSR1 for before in self.received)
        self.received.append(signal.Signals(number))
        if number in self._limited and self.deadline == math.inf:
            self.deadline = time.monotonic() + self._grace_s
        if again:
            self.deadline = 0.0
