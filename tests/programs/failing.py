"""The last of the ranks ends as told, while the others wait for it in a collective.

    failing.py torch|tensorflow STRATEGY raise|failure|FILE

FILE is written just before the rank is killed. Used by test_ranks.py and test_native.py.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import exchange
import numpy as np

from hvdtrain.comm import lifecycle
from hvdtrain.system.exits import BAD_DATA, Failure


def main(stop: lifecycle.StopSignal) -> int:
    framework, strategy, how = sys.argv[1:]
    ranks, _ = exchange.joined(exchange.config_of(framework, "{}", strategy=strategy))
    ranks.gather("all are here")
    ranks.gather("and nobody is still reading what was said")
    if ranks.rank == ranks.size - 1:
        if how == "raise":
            raise ZeroDivisionError("the cause, not Horovod")
        if how == "failure":
            raise Failure("photo.jpg: truncated; remove it", BAD_DATA)
        Path(how).write_text("now")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        ranks.sum(np.ones(4), "waiting")


lifecycle.run(main, debug=False)
