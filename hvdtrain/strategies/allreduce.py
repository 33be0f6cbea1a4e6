"""Ring-allreduce, as Horovod does it out of the box.

Every rank sends to its right neighbour and receives from its left. A tensor is cut into p parts, p the number of ranks.
In p-1 rounds each part travels round the ring and is summed on the way, in p-1 more rounds the sums travel round: each
rank sends 2(p-1)/p of the payload, whatever p is. Horovod starts a tensor's reduction as soon as backward has its
gradient, and fuses small tensors into one message.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.strategies.payload import Shape, elements, ring_bytes
from hvdtrain.world import World


class AllReduce:
    """Gradients summed by Horovod's own optimizer (PyTorch) or tape (TensorFlow) during backward; no state."""

    in_backward = True
    native = False

    def __init__(self, world: World, shapes: Sequence[Shape], config: TrainConfig) -> None:
        self._world = world
        self._sent = self.bytes_per_step(shapes, world.size, config)

    @staticmethod
    def bytes_per_step(shapes: Sequence[Shape], ranks: int, config: TrainConfig) -> int:
        return ring_bytes(4 * elements(shapes), ranks)

    def exchange(self, gradients: list[Any]) -> tuple[list[Any], int]:
        self._world.wait()
        return gradients, self._sent

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:
        pass
