"""What a rank tells its host's sentinel about its exchanges: that it waits for other ranks, or that bytes move.

`stalls` judges. A rank tells nothing before a wait has lasted a sixth of the stall limit, so an exchange that goes well
costs one look at the clock for each time that it sleeps.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable

from hvdtrain.sentinel.stalls import MOVES, STACK, WAITS

SHARE = 6
"""Messages per stall limit"""

LIMIT_S = 60.0
"""The stall limit, unless another is asked for; 0: none"""

limit_s = LIMIT_S
every_s: float | None = None
"""Seconds between two messages; None if no sentinel listens"""
_tell: Callable[[bytes], None]
_next_s = 0.0


def begin(tell: Callable[[bytes], None], stall_limit_s: float) -> None:
    """From here on messages go to `tell`, and the sentinel's signal writes this process's stacks to stderr."""
    global every_s, limit_s, _tell
    limit_s, _tell = stall_limit_s, tell
    every_s = max(0.1, limit_s / SHARE) if limit_s else None
    if limit_s:
        faulthandler.register(STACK, file=2)


def waits(seconds: float) -> None:
    """This rank has waited for so long, in which nothing has come from other ranks."""
    if every_s is not None:
        _tell(WAITS + str(seconds).encode())


def moves() -> None:
    """Bytes of an exchange have just come or gone."""
    global _next_s
    if every_s is not None and (now := time.monotonic()) >= _next_s:
        _next_s = now + every_s
        _tell(MOVES)
