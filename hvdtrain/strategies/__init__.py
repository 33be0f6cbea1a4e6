"""How gradients become their mean over the samples of all ranks: the protocol, and the one table of strategies.

A new strategy is one file and one line in STRATEGIES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain import exits
from hvdtrain.config import TrainConfig
from hvdtrain.exits import Failure
from hvdtrain.strategies.allreduce import AllReduce
from hvdtrain.strategies.native import Native
from hvdtrain.strategies.payload import Shape
from hvdtrain.world import World


class Strategy(Protocol):
    """One object, one verb. Its state lives in it and goes into the checkpoint."""

    in_backward: bool
    """True: the world's own step (Horovod's optimizer or tape, DistributedDataParallel, MultiWorkerMirroredStrategy)
    exchanges each gradient while backward still computes the others"""
    native: bool
    """True: the framework's own collectives connect the ranks, and no Horovod runs"""

    def __init__(self, world: World, shapes: Sequence[Shape], config: TrainConfig) -> None:
        """`shapes`: of one rank's gradients, in the model's order."""

    @staticmethod
    def bytes_per_step(shapes: Sequence[Shape], ranks: int, config: TrainConfig) -> int:
        """Payload bytes that each of `ranks` ranks sends in one step, once the strategy is in its stride."""
        ...

    def exchange(self, gradients: list[Any]) -> tuple[list[Any], int]:
        """Takes this rank's gradients, each divided by the sample count of all ranks' step, and returns their sums over
        ranks (the mean over all samples, however uneven the shares) and the payload bytes that this rank sent.
        """
        ...

    def state(self) -> dict[str, np.ndarray]:
        """What this rank must have to continue as if never interrupted."""
        ...

    def load(self, state: dict[str, np.ndarray]) -> None: ...


STRATEGIES: dict[str, type[Strategy]] = {
    "allreduce": AllReduce,
    "native": Native,
}


def strategy_class(name: str) -> type[Strategy]:
    """Raises Failure (78) for an unknown name."""
    if name not in STRATEGIES:
        raise Failure(f"--strategy {name}: unknown; known: {', '.join(STRATEGIES)}", exits.BAD_CONFIG)
    return STRATEGIES[name]
