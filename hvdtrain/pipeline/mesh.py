"""Which rank has which stage of the model and which share of the data."""

from __future__ import annotations

import dataclasses

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks on two axes, `replicas` and `stages`. Raises Failure (78) if the ranks cannot be divided like that.

    The ranks of a stage have consecutive numbers, so hosts have few stages and activations cross the network.
    """

    ranks: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        if self.ranks % self.stages:
            raise Failure(
                f"--stages {self.stages}: the number of ranks, {self.ranks}, is not a multiple of it; hint: start "
                f"{self.stages} ranks or a multiple (mpirun -np {self.stages})",
                exits.BAD_CONFIG,
            )

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same stage, each with its share of the data."""
        return self.ranks // self.stages

    def at(self, rank: int) -> tuple[int, int]:
        """Return the coordinates of a rank: (replica, stage)."""
        stage, replica = divmod(rank, self.replicas)
        return replica, stage

    def rank(self, replica: int, stage: int) -> int:
        """Return the rank at these coordinates."""
        return stage * self.replicas + replica

    def holders(self, stage: int) -> list[int]:
        """Return the ranks of a stage, in order of replicas."""
        return [self.rank(replica, stage) for replica in range(self.replicas)]
