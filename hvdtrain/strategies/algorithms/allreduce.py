"""Horovod's own ring all-reduce, as it works out of the box.

Horovod starts the reduction of a tensor as soon as backward has computed its gradient, and fuses small tensors into one
message. In a ring of p ranks every rank sends 2(p-1)/p of the payload: each of p parts travels around the ring once to
be summed and once more to be distributed.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009;
Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements, ring
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system.rates import ring_bytes


class AllReduce(Strategy):
    """Gradients are summed during backward by Horovod's optimizer (PyTorch) or tape (TensorFlow)."""

    capabilities = Capabilities(backend="horovod", in_backward=True)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        return ring(4 * elements(shapes), layout.ranks, exact=True)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("communication"):
            self._world.in_framework.wait()
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        return Exchanged.of(tail, ring_bytes(4 * self._size, self._world.size))
