"""Check that all ranks hold the same weights: compare one checksum, and one per tensor only if it differs."""

from __future__ import annotations

import collections
import zlib

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.system.exits import Failure


def check(state: dict[str, np.ndarray], world: Communicator) -> None:
    """Compare the parameters in `state`, and their averages, over ranks. Collective.

    Raises Failure (1), which names ranks and tensors. CRC-32 detects accidents; it reads some GB/s of memory, and 12
    bytes per rank cross the network.
    """
    if world.size == 1:
        return
    weights = {name: array for name, array in state.items() if name.startswith(("parameter.", "average."))}
    sums = {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in weights.items()}
    if len(set(world.gather(zlib.crc32(repr(sums).encode())))) == 1:
        return
    of_ranks = world.gather(list(sums.values()))
    different = []
    for name, values in zip(sums, zip(*of_ranks, strict=True), strict=True):
        most, _ = collections.Counter(values).most_common(1)[0]
        different += [(rank, name) for rank, value in enumerate(values) if value != most]
    ranks = ", ".join(str(rank) for rank in sorted({rank for rank, _ in different}))
    tensors = list(dict.fromkeys(name.removeprefix("parameter.") for _, name in different))
    named = tensors[0] + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
    raise Failure(
        f"the weights of rank {ranks} differ from those of the other ranks in {named} of {len(sums)} tensors; hint: "
        "resume from the last checkpoint, and look for different versions, data or faulty memory on that host "
        "(--check-replicas 0 turns this check off)"
    )
