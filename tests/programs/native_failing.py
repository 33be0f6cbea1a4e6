"""The last of the ranks ends as told, while the others wait for it in a native collective. Used by test_native.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from hvdtrain import world


def main(stop: world.StopSignal) -> int:
    """`raise`, or a file to write just before being killed."""
    framework, how = sys.argv[1:]
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    prepare("cpu", 0, 1)
    ranks = world.World(framework, carrier="native")
    ranks.gather("all are here")
    ranks.gather("and nobody is still reading what was said")
    if ranks.rank == ranks.size - 1:
        if how == "raise":
            raise ZeroDivisionError("the cause")
        Path(how).write_text("now")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        ranks.sum(np.ones(4), "waiting")


world.run(main, debug=False)
