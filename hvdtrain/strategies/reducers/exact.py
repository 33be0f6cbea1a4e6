"""All gradients, exactly, over the network once per host and not once per rank.

The ranks of a host add up their gradients in host memory. Then the first ranks of the h hosts sum in a ring: in h-1
rounds each part (1/h of the numbers) goes round and grows, in h-1 more the sums go round. So each host sends 2(h-1)/h
of the payload, the least that any allreduce can (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). A ring over
ranks sends the same per rank where neighbours in the ring are on different hosts; with two ranks per host that is up to
twice as much on each wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, elements, ring_bytes
from hvdtrain.strategies.reducers.base import Reducer


class Hierarchical(Reducer):
    """The exact sum."""

    divisible = True

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        return Cost(sent_bytes=ring_bytes(4 * elements(shapes), hosts), rounds=2 * (hosts - 1), exact=True)

    def sum_between_hosts(self, values: np.ndarray, hosts: LeaderGroup) -> None:
        hosts.all_reduce(values)
