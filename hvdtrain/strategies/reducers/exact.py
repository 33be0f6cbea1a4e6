"""The exact sum, sent over the network once per host instead of once per rank.

The ranks of a host add up their gradients in host memory. The leaders of the h hosts then sum in a ring: each part, 1/h
of the numbers, travels around the ring once to be summed and once more to be distributed. Each host sends 2(h-1)/h of
the payload, the minimum for an all-reduce (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). A ring over ranks
with two ranks per host sends up to twice as much over each link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.comm.arrays import Array, on_host
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, all_reduce, elements
from hvdtrain.strategies.reducers.base import Reducer


class Hierarchical(Reducer):
    """The exact sum."""

    takes_tensors = supports_buckets = True

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        return Cost(phases=all_reduce(elements(shapes), hosts), exact=True)

    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None:
        on_host(values, leaders.all_reduce)
