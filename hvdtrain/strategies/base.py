"""The base class of strategies: how a training step exchanges gradients or weights between ranks."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from hvdtrain.comm.arrays import Array
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.world import Backend
from hvdtrain.config.constraints import Checked
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors

ReducerCost = Callable[[Sequence[Sequence[int]]], list[Cost]]
"""Cost of one all-reduce of each bucket by the strategy's reducer, given the buckets as indices of arrays. One cost if
the vector is not divided"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the rest of the program needs to know about a strategy."""

    backend: Backend = "tcp"
    """The backend that connects the ranks"""
    takes_reducer: bool = False
    """Whether a reducer may follow the plus"""
    in_backward: bool = False
    """Whether the backend's own step exchanges gradients during backward, as Horovod's optimizer does"""
    local_updates: bool = False
    """Whether ranks update their weights with their own gradients between exchanges.

    Gradients are then divided by the rank's own sample count, and each rank has its own momentum."""
    own_optimizer_state: bool = False
    """Whether optimizer states differ between ranks although the weights are equal"""
    elastic: bool = False
    """Whether the ranks can continue if a host is lost"""
    saves_anytime: bool = False
    """Whether a checkpoint can be made while the ranks are not in sync, from `common_weights`, `state` and each rank's
    own weights. Otherwise it waits"""
    reshard_refusal: str = ""
    """Why `reshard_state` is impossible for another number of ranks; empty if it is possible"""
    has_residual: bool = False
    """Whether gradients of one step are used in a later one"""


class Strategy(abc.ABC):
    """Exchanges gradients or weights in `step`. Its state is saved in checkpoints."""

    Settings: ClassVar[type[Any]] = Checked
    """Dataclass of the settings that follow the colon"""
    capabilities: Capabilities = Capabilities()
    """An instance may have others than its class, because of its settings"""

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        """`shapes`: shapes of the trainable arrays, in the model's order. `settings`: an instance of `Settings`.
        `reducer`: the reducer, if the strategy takes one."""
        self.settings = settings
        self._world, self._shapes = world, shapes
        self._reducer = cast(Reducer, reducer)  # only strategies with `takes_reducer` use it
        self.takes_tensors = reducer is not None and reducer.takes_tensors
        """Whether vectors may be PyTorch tensors on the replica's device (see `comm.arrays`). Otherwise they are NumPy
        arrays."""
        self._size = elements(shapes)  # numbers of the gradients; the vector's tail follows them

    averages = 0
    """How often all ranks have got equal weights, if `capabilities.local_updates`"""

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have the same weights now."""
        return True

    @property
    def common_weights(self) -> Array | None:
        """The weights from which all ranks have trained on their own since, as one float32 vector.

        None while the ranks are `in_sync`.
        """
        return None

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return what this rank loads after a resume with another number of ranks or on other hosts.

        `states`: the states of all earlier ranks.
        """
        return {}

    @classmethod
    @abc.abstractmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        """Return the cost of an exchange for each host."""

    @classmethod  # noqa: B027 (most accept every config)
    def check(cls, settings: Any, config: TrainConfig) -> None:
        """Raise Failure (78) for a config that the strategy cannot be combined with."""

    def buckets(self, *, late_tail: bool = False) -> Sequence[range]:
        """Return the buckets that the strategy takes during backward, as ranges of array indices.

        The order is that of the calls of `on_bucket_ready`. Without buckets it reads the whole vector in `step`. A
        replica calls this once, when it is made. `late_tail`: whether it writes the tail in `step` only. Collective.
        """
        return ()

    def on_bucket_ready(  # noqa: B027 (most have no buckets)
        self, bucket: int, vector: Array, ready: Callable[[], None] | None = None
    ) -> None:
        """Start the exchange of a bucket whose gradients backward has written into the vector.

        If `ready` is given, the gradients are complete for a thread that has called it. `step` follows. It exchanges
        the buckets that were not reported before.
        """

    @abc.abstractmethod
    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        """Exchange after backward and update the replica's weights.

        `lr`: the learning rate; in scripts, which have their own, what to multiply it by.
        Time spent waiting for other ranks goes to the clock's label "communication", the update to "compute".
        """

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        """Wait for exchanges under way and give all ranks the same weights, before an evaluation. Collective."""
        return Exchanged()

    def restart(self, replica: Vectors) -> None:  # noqa: B027 (only those with `local_updates`)
        """A script has given the replica other weights, with which this rank continues."""

    def state(self, *, newcomer: bool = False) -> dict[str, np.ndarray]:
        """Return what this rank needs to continue as if it had never been interrupted.

        `newcomer`: the part of it that another rank needs to take part from the next exchange on.
        """
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027 (most have no state)
        """Restore what `state` returned."""

    # --- the members of an elastic job change ----------------------------------------------------------------------

    def abandon(self) -> None:  # noqa: B027 (only elastic ones)
        """Wait until nothing is exchanged in the background. Undo what an interrupted step has changed.

        Called when a host is lost, possibly more than once.
        """

    def settle(self, replica: Vectors, counts: bool) -> Exchanged:
        """Keep or undo the exchanges that a lost host interrupted in the background.

        `counts`: whether the first one that failed counts. Returns the totals of those that are kept.
        """
        return Exchanged()

    def regroup(self, replica: Vectors, state: dict[str, np.ndarray] | None = None) -> None:
        """Prepare for exchanges with other members, which have all done the same number of steps. Collective.

        In a new rank, `state` is a member's `state(newcomer=True)`, and `replica` has the weights that all ranks share.
        """
        if state is not None:
            self.load(state)
