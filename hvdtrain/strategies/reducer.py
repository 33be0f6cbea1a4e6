"""What all reducers share: one vector of each host becomes the sum over hosts, or nearly."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives import Hosts
from hvdtrain.config import TrainConfig
from hvdtrain.strategies.payload import Shape


class Reducer(abc.ABC):
    """Runs in the first rank of each host; the ranks of a host are summed before it sees them."""

    uses: tuple[str, ...] = ()
    """Settings of the config that it goes by"""
    remembers = False
    """True: what a round leaves out goes into the next (error feedback); an infinite gradient would stay for ever"""

    def __init__(self, shapes: Sequence[Shape], config: TrainConfig) -> None:
        """`shapes`: of the arrays in the vector, one after the other."""
        self.shapes = [tuple(shape) for shape in shapes]

    @staticmethod
    @abc.abstractmethod
    def bytes_per_host(shapes: Sequence[Shape], hosts: int, config: TrainConfig) -> int:
        """Payload bytes that one of `hosts` hosts gives to the network in one round, once in its stride."""

    @abc.abstractmethod
    def between(self, values: np.ndarray, hosts: Hosts) -> None:
        """Replaces a flat float32 vector by its sum over hosts, or an approximation; the same bits on all hosts."""

    def state(self) -> dict[str, np.ndarray]:
        """What this host must have to continue as if never interrupted."""
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027 (most have no state)
        """Takes what `state` gave."""
