"""A rank's reports to the sentinel of its host: that it waits for other ranks, or that bytes move.

`stalls` evaluates them. A rank reports a wait only after a sixth of the stall limit, so an exchange without delays
costs one clock reading per sleep.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable

from hvdtrain.launch.stalls import PROGRESS, STACK, WAIT

REPORTS_PER_LIMIT = 6
LIMIT_S = 60.0
"""Default stall limit; 0 means no limit"""

limit_s = LIMIT_S
every_s: float | None = None
"""Seconds between two reports; None without a sentinel"""
_send: Callable[[bytes], None]
_next_s = 0.0


def start(send: Callable[[bytes], None], stall_limit_s: float) -> None:
    """Send reports through `send`, and write this process's stacks to stderr when the sentinel sends its signal."""
    global every_s, limit_s, _send
    limit_s, _send = stall_limit_s, send
    every_s = max(0.1, limit_s / REPORTS_PER_LIMIT) if limit_s else None
    if limit_s:
        faulthandler.register(STACK, file=2)


def report_wait(seconds: float) -> None:
    """This rank has waited for this long without receiving anything from other ranks."""
    if every_s is not None:
        _send(WAIT + str(seconds).encode())


def report_progress() -> None:
    """Bytes of an exchange have just been sent or received."""
    global _next_s
    if every_s is not None and (now := time.monotonic()) >= _next_s:
        _next_s = now + every_s
        _send(PROGRESS)
