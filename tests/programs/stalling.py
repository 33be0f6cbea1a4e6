"""Ranks of which the last keeps the others waiting, as told by test_faults.py.

    stalling.py WHAT [LIMIT_S]

WHAT the last rank does while the others wait for its sum: `sleep` for ever, or `compute` or `write` for eight limits.
`differ`: the ranks wait for each other in two different sums. `call`: `sleep`, before a call of `hvdtrain.torch`.
`send`: they sum 16 MB, and nobody is late. Rank 0 prints "done" at the end.
"""

from __future__ import annotations

import sys
import tempfile
import time

import numpy as np

from hvdtrain.comm import lifecycle, world


def compute(seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(10_000))


def write_files(seconds: float) -> None:
    """As to a slow disk: most of the time it only waits."""
    ends = time.monotonic() + seconds
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < ends:
            file.seek(0)
            file.write(bytes(1 << 21))
            time.sleep(0.2)


def main(stop: lifecycle.StopSignal) -> int:
    what, limit_s = sys.argv[1], float(sys.argv[2])
    ranks = world.connect("torch", backend="tcp", stall_limit_s=limit_s)
    ranks.sum(np.ones(4), "first")
    if ranks.rank == ranks.size - 1:
        {"sleep": time.sleep, "compute": compute, "write": write_files}.get(what, lambda _: None)(
            3600 if what == "sleep" else 8 * limit_s
        )
    other = world.connect("torch", backend="tcp", group=ranks.group) if what == "differ" else ranks
    late = other if ranks.rank else ranks
    late.sum(np.ones(4_000_000 if what == "send" else 4, np.float32), "second")
    if ranks.rank == 0:
        print("done")
    ranks.shutdown()
    return 0


def script() -> None:
    import torch

    import hvdtrain.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(4), name="first")
    if hvd.rank() == hvd.size() - 1:
        time.sleep(3600)
    hvd.allreduce(torch.ones(4), name="second")


if sys.argv[1] == "call":
    script()
else:
    lifecycle.run(main, debug=False)
