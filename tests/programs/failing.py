"""The last of the ranks fails as told, while the others wait for it in a collective. Used by test_ranks.py."""

from __future__ import annotations

import sys

import numpy as np

from hvdtrain import world
from hvdtrain.exits import BAD_DATA, Failure


def main(stop: world.StopSignal) -> int:
    framework, how = sys.argv[1:]
    ranks = world.World(framework)
    ranks.gather("all are here")
    if ranks.rank == ranks.size - 1:
        if how == "raise":
            raise ZeroDivisionError("the cause")
        raise Failure("photo.jpg: truncated; remove it", BAD_DATA)
    while True:
        ranks.sum(np.ones(4), "waiting")


world.run(main, debug=False)
