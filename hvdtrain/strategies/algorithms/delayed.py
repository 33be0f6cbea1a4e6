"""Exchanges the gradients of a step while the next steps compute, and updates with them when they are due.

Step t hands its gradients to a thread that sums them over ranks by the reducer behind the plus, and updates the weights
with the sum of step t - s, s being `staleness`: that sum is the same on all ranks and used by all in the same step, so
the weights stay the same without being sent. The first s steps update nothing. As long as an exchange takes no longer
than s computations, nobody waits for the network; what it costs is that each gradient was computed s updates earlier
(a constant delay: Zinkevich et al., "Slow learners are fast", 2009). With s = 0 it is the reducer alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.algorithms.synchronous import Synchronous, inner, reduce
from hvdtrain.strategies.cost import Cost, Layout, Shape, next_steps
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors


class Delayed(Synchronous):
    """Sums on their way live in `_flying`, the oldest first; `_told` says whether its totals were given out already."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        staleness: int = bounded(1, least=0, example=2)
        """Steps that compute while a sum is under way, and after which it is used"""

    remembers = True

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        super().__init__(world, shapes, config, settings, reducer)
        self._staleness = settings.staleness
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-exchange")
        self._flying: collections.deque[Future[tuple[np.ndarray, int]]] = collections.deque()
        self._told = 0
        self._spare: list[np.ndarray] = []

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        assert round_ is not None
        return dataclasses.replace(round_, behind=next_steps(settings.staleness))

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector = replica.vector()
        loss, samples = vector[self._size], vector[-2]
        own = self._spare.pop() if self._spare else np.empty_like(vector)
        np.copyto(own, vector)
        self._flying.append(self._thread.submit(self._sum, own))
        if len(self._flying) <= self._staleness:
            return Exchanged(loss=float(loss / samples))
        with clock.span("communication"):
            summed, sent = self._flying.popleft().result()
        with clock.span("compute"):
            np.copyto(vector, summed)
            replica.apply(lr)
        self._spare.append(summed)
        if self._told:
            self._told -= 1
            return Exchanged(loss=float(loss / samples))
        done = Exchanged.of(summed[self._size :], sent)
        return dataclasses.replace(done, loss=float(loss / samples)) if self._staleness else done

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        """Waits for all sums on their way and tells their totals; the gradients stay due in the steps to come."""
        with clock.span("communication"):
            landed = [sum_.result() for sum_ in self._flying]
        new = landed[self._told :]
        self._told = len(landed)
        if not new:
            return Exchanged()
        tail = np.stack([summed[self._size :] for summed, _ in new]).sum(axis=0, dtype=np.float64)
        return Exchanged.of(tail, sum(sent for _, sent in new))

    def _sum(self, vector: np.ndarray) -> tuple[np.ndarray, int]:
        return vector, reduce(self._world, self._reducer, vector, self._size)

    def state(self) -> dict[str, np.ndarray]:
        flying = [sum_.result() for sum_ in self._flying]
        state = {f"flying.{age}": summed.copy() for age, (summed, _) in enumerate(flying)}
        state["sent_bytes"] = np.array([sent for _, sent in flying], dtype=np.int64)
        state["told"] = np.array(self._told)
        return state | {f"inner.{name}": array for name, array in self._reducer.state().items()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._told = int(state["told"])
        self._flying.clear()
        for age, sent in enumerate(state["sent_bytes"]):
            landed: Future[tuple[np.ndarray, int]] = Future()
            summed = state[f"flying.{age}"].copy()
            summed[-1] = 0  # the request to stop that it carried has been obeyed
            landed.set_result((summed, int(sent)))
            self._flying.append(landed)
        self._reducer.load(inner(state))

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The sums on their way are the same on all ranks."""
        left = super().handed_on([inner(state) for state in states])
        return states[0] | {f"inner.{name}": array for name, array in left.items()}
