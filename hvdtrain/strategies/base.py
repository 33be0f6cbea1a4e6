"""What all strategies share: the exchange of one training step, with the defaults of one that keeps no state."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.world import Backend
from hvdtrain.config.constraints import Checked
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors


class Strategy(abc.ABC):
    """One object, one verb: `step`. Its state lives in it and goes into the checkpoint."""

    Settings: ClassVar[type[Any]] = Checked
    """What may be set of it"""
    backend: ClassVar[Backend] = "tcp"
    """What connects the ranks"""
    holds_reducer: ClassVar[bool] = False
    """Whether a reducer sums its vectors over hosts"""
    in_backward: ClassVar[bool] = False
    """Whether the world's own step (Horovod's optimizer or tape, DistributedDataParallel,
    MultiWorkerMirroredStrategy) exchanges each gradient while backward still computes the others"""
    local: ClassVar[bool] = False
    """Whether each rank updates its weights by its own gradients for a while: its gradients are then divided by its own
    sample count, and its momentum is its own"""
    own_optimizer: ClassVar[bool] = False
    """Whether the optimizers' states differ between ranks though the weights do not"""
    remembers: ClassVar[bool] = False
    """Whether gradients of one step are used in a later one"""
    divides: ClassVar[bool] = False
    """Whether ranks take unequal shares of a step, those of its settings (`shares`) or `measured_shares`"""
    rung: ClassVar[int] = 0
    """How little it sends of what `table.RUNGS` advises: the number of its rung, -1: below all. One that holds a
    reducer stands on the reducer's, if that is higher"""

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        """`shapes`: of the trainable arrays, in the model's order; `settings`: of `Settings`; `reducer`: the one that
        it holds, if it holds one."""
        self.settings = settings
        self._world, self._shapes, self._held = world, shapes, reducer
        self.factored: Collection[int] = ()
        """Which arrays' gradients the replica is to give as factors (see `replicas.Factored`): set by `plan`"""
        self._size = elements(shapes)  # of the gradients: a vector's tail lies behind them

    @property
    def in_sync(self) -> bool:
        """Whether all ranks have the same weights now."""
        return True

    @property
    def shared_weights(self) -> np.ndarray | None:
        """While the ranks' weights differ: the weights that they all know, as one float32 vector. A checkpoint may be
        made of it, of `state` and of each rank's own weights. None while the ranks are `in_sync`, and for a strategy
        whose checkpoints have to wait until they are."""
        return None

    @property
    def bound(self) -> str | None:
        """Why its state belongs to the very ranks that made it; None: it can be handed on to another number."""
        return None

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """What this rank is to `load` after `states`, those of all ranks when they were another number (unless it is
        `bound`), or as many on other hosts."""
        return {}

    @property
    def _reducer(self) -> Reducer:
        assert self._held is not None, "holds_reducer"
        return self._held

    @classmethod
    @abc.abstractmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        """What a step costs each host; `round_`: what a sum by the reducer that it holds costs."""

    def plan(self, layout: Layout) -> None:  # noqa: B027 (most need not know)
        """Before the replica is made: who takes part, and what of the arrays the workload tells. Collective."""

    @classmethod  # noqa: B027 (most go with all)
    def check(cls, settings: Any, config: TrainConfig) -> None:
        """Raises Failure (78) for a config that it does not go with."""

    def measured_shares(
        self, replica: Any, batch_of: Callable[[Sequence[float] | None], Any]
    ) -> tuple[tuple[float, ...], str]:
        """The share of each rank in a step, and how it was found, in words. Collective, before step 0.

        `replica`: a `frameworks.Replica`, afterwards what it was before. `batch_of(shares)`: a training batch of this
        rank's share, of even shares for None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not divide a step into unequal shares")

    def parts(self) -> Sequence[range]:
        """The arrays, by place, whose gradients the strategy takes during backward: a range for each `take`, in the
        order of the calls. Empty: it reads the vector in `step` only. A replica calls this once, when it is made.
        Collective."""
        return ()

    def take(  # noqa: B027 (most have no parts)
        self, part: int, vector: np.ndarray, ready: Callable[[], None] | None = None
    ) -> None:
        """Starts the exchange of one of the `parts`, whose gradients backward has written into the vector, before the
        first part's also the tail. If `ready` is given, they are complete once it has returned. `step` follows."""

    @abc.abstractmethod
    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        """After backward: exchanges, and updates the replica's weights. What it waits for the others is spent under
        the clock's label "communication", the update under "compute".
        """

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        """Before an evaluation: waits for what is in flight and gives all ranks the same weights. Collective."""
        return Exchanged()

    def state(self) -> dict[str, np.ndarray]:
        """What this rank must have to continue as if never interrupted."""
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027 (most have no state)
        """Takes what `state` gave."""
