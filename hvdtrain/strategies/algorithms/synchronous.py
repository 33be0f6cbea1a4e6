"""Every step sums the gradients of all ranks by a reducer and then updates.

The ranks of a host add their gradients up in its first rank; that one exchanges with the first ranks of the other
hosts, as the reducer says; each then shares the sum with its host. The update is the same on all ranks, so the weights
stay the same without ever being sent. With a reducer that wants all gradients at once, such as topk, this is what
`--strategy REDUCER` means; `overlapped` sums by the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors


class Synchronous(Strategy):
    """Its state is the reducer's."""

    holds_reducer = True

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        assert round_ is not None
        return round_

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        return self._summed(replica, replica.vector(), lr, clock)

    def _summed(self, replica: Vectors, vector: np.ndarray, lr: float, clock: Clock) -> Exchanged:
        with clock.span("communication"):
            sent = reduce(self._world, self._reducer, vector, self._size)
        with clock.span("compute"):
            replica.apply(lr)
        return Exchanged.of(vector[self._size :], sent)

    def state(self) -> dict[str, np.ndarray]:
        return self._reducer.state()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._reducer.load(state)

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return self._reducer.handed_on(states, first=self._world.rank == 0)


def inner(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What of a strategy's state is its reducer's."""
    return {name.removeprefix("inner."): array for name, array in state.items() if name.startswith("inner.")}


def reduce(world: Communicator, reducer: Reducer, vector: np.ndarray, size: int) -> int:
    """Sums a vector over all ranks in place: its first `size` numbers as the reducer does, the tail behind them
    exactly. Returns the payload bytes sent."""
    before = world.sent_bytes
    world.local_reduce(vector)
    if leaders := world.leaders:
        if vector.size > size:
            leaders.all_reduce(vector[size:])
        reducer.sum(vector[:size], leaders)
    world.local_broadcast(vector)
    return world.sent_bytes - before
