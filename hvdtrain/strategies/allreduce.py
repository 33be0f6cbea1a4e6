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

import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.strategies.payload import Layout, Shape, elements, ring_bytes
from hvdtrain.strategies.reducer import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.timing import Clock
from hvdtrain.world import Carrier, World


class AllReduce:
    """Gradients summed by Horovod's own optimizer (PyTorch) or tape (TensorFlow) during backward; no state."""

    carrier: Carrier = "horovod"
    uses: tuple[str, ...] = ()
    in_backward = True
    local = False
    level = True
    common = None
    bound = None

    def __init__(self, world: World, shapes: Sequence[Shape], config: TrainConfig, reducer: Reducer | None) -> None:
        self._world = world
        self._sent = ring_bytes(4 * elements(shapes), world.size)

    @staticmethod
    def bytes_per_step(
        shapes: Sequence[Shape], layout: Layout, config: TrainConfig, reducer: type[Reducer] | None
    ) -> float:
        return ring_bytes(4 * elements(shapes), layout.ranks)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("communication"):
            self._world.wait()
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        return Exchanged.of(tail, self._sent)

    def settle(self, replica: Vectors, clock: Clock) -> Exchanged:
        return Exchanged()

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:
        pass

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {}
