"""Which rank has which stage of the model and which share of the data."""

from __future__ import annotations

import dataclasses
from typing import Literal

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Ranks by two axes: `replicas` along the data, `stages` along the model. Raises Failure (78) for ranks that do not
    make one."""

    ranks: int = 1
    stages: int = 1
    across: Literal["hosts", "ranks"] = "hosts"
    """hosts: a stage's ranks follow each other, so that a host has as few stages as can be, and activations cross the
    network; ranks: a pipeline's ranks do, so that a host has whole pipelines, and gradients cross it"""

    def __post_init__(self) -> None:
        if self.ranks % self.stages:
            raise Failure(
                f"--stages {self.stages} needs a number of ranks that it divides, and there are {self.ranks}: start "
                f"{self.stages} or a multiple (mpirun -np {self.stages})",
                exits.BAD_CONFIG,
            )

    @property
    def replicas(self) -> int:
        """Ranks that hold the same stage, each with its share of the data."""
        return self.ranks // self.stages

    def at(self, rank: int) -> tuple[int, int]:
        """A rank's place on the axes: (data, stage)."""
        if self.across == "hosts":
            stage, data = divmod(rank, self.replicas)
        else:
            data, stage = divmod(rank, self.stages)
        return data, stage

    def rank(self, data: int, stage: int) -> int:
        """Who is at that place."""
        return stage * self.replicas + data if self.across == "hosts" else data * self.stages + stage

    def holders(self, stage: int) -> list[int]:
        """The ranks of a stage, in order of their data."""
        return [self.rank(data, stage) for data in range(self.replicas)]
