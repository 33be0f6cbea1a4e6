"""The base class of reducers: each host's vector is replaced by the sum over hosts, or by an approximation.

A lossy reducer keeps the residual, its error, and adds it to a later vector (error feedback). So the sum of all inputs
equals the sum of all outputs plus the current residuals. After a resume on other ranks the residuals of the earlier
ranks are added up.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hvdtrain.comm.arrays import Array, placed_like
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.config.constraints import Checked
from hvdtrain.strategies.cost import Cost, Shape
from hvdtrain.strategies.reducers import compiled


class Reducer(abc.ABC):
    """Runs in the leader of each host, after the ranks of the host have been summed."""

    Settings: ClassVar[type[Any]] = Checked
    """Dataclass of the settings that follow the colon"""
    residual_key: ClassVar[str] = ""
    """Name of the residual in `state`, in which NaN or infinity would persist; empty if there is none"""
    takes_tensors: ClassVar[bool] = False
    """Whether `all_reduce` also takes a PyTorch tensor on any device (see `comm.arrays`)"""
    supports_buckets: ClassVar[bool] = False
    """Whether the vector may be divided into buckets with a reducer each.

    Not possible if the reducer selects among all numbers. The arrays of its `state` must then be one-dimensional and in
    the vector's order."""

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        """`shapes`: shapes of the arrays in the vector, in order. `settings`: an instance of `Settings`; None: the
        defaults."""
        self.shapes = [tuple(shape) for shape in shapes]
        self.settings = settings or self.Settings()
        compiled.loops()  # compiles them now, not in a step
        self._residual_pending = False
        """Whether `load` may have restored a residual that a single host has to add to its next vector"""

    def split(self, buckets: Sequence[range]) -> list[Reducer]:
        """Return a new reducer for each bucket of arrays, if the reducer supports buckets."""
        return [type(self)([self.shapes[index] for index in bucket], self.settings) for bucket in buckets]

    @classmethod
    @abc.abstractmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        """Return the cost of one all-reduce for each of `hosts` hosts."""

    @classmethod
    def bucket_costs(
        cls, shapes: Sequence[Shape], buckets: Sequence[Sequence[int]], hosts: int, settings: Any
    ) -> list[Cost]:
        """Return the cost for each bucket, given as indices of arrays."""
        return [cls.cost([shapes[index] for index in bucket], hosts, settings) for bucket in buckets]

    @abc.abstractmethod
    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None:
        """Replace a flat float32 vector by its sum over two or more hosts, or by an approximation.

        All hosts get the same bits.
        """

    def add_residual(self, values: Array) -> None:
        """Do the work of `all_reduce` on a single host: add the residual from before a resume."""
        if self._residual_pending:
            values += placed_like(self.state()[self.residual_key], values)
            self.drop_residual()

    def drop_residual(self) -> None:
        """Set the residual to zero, because the next vectors are of another kind."""
        if self.residual_key:
            state = self.state()
            self.load(state | {self.residual_key: np.zeros_like(state[self.residual_key])})
            self._residual_pending = False

    def state(self) -> dict[str, np.ndarray]:
        """Return the arrays that this host needs to continue as if it had never been interrupted."""
        return {}

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]], first: bool) -> dict[str, np.ndarray]:
        """Return the state for a rank after a resume on other ranks; `states`: the states of all earlier ranks.

        The `first` rank gets the sum of their residuals, so that the sum over ranks does not change. All ranks get the
        rest of the earlier first rank's state.
        """
        state = dict(states[0])
        if self.residual_key:
            residuals = [each[self.residual_key] for each in states]
            state[self.residual_key] = np.sum(residuals, axis=0) if first else np.zeros_like(residuals[0])
        return state

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned."""
        self._residual_pending = bool(self.residual_key)
