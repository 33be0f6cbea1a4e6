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

from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements, ring, ring_bytes
from hvdtrain.strategies.replicas import Exchanged, Vectors


class AllReduce(Strategy):
    """Gradients summed by Horovod's own optimizer (PyTorch) or tape (TensorFlow) during backward; no state."""

    backend = "horovod"
    in_backward = True
    rung = -1

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        return ring(4 * elements(shapes), layout.ranks, exact=True)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("communication"):
            self._world.wait()
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        return Exchanged.of(tail, ring_bytes(4 * self._size, self._world.size))
