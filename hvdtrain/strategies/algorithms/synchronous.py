"""Sums the gradients of all ranks with a reducer after every backward pass.

The ranks of a host add up their gradients in its leader. The leaders exchange the sums as the reducer defines, and each
distributes the result on its host. All ranks make the same update, so the weights stay equal without being sent. This
is how `--strategy REDUCER` runs if the reducer needs all gradients at once, as topk does; otherwise see `overlapped`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Phase, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors


class Synchronous(Strategy):
    """Its state is the reducer's."""

    capabilities = Capabilities(takes_reducer=True, elastic=True)
    _undo: tuple[tuple[Reducer, dict[str, np.ndarray]], ...] = ()
    """In an elastic job: the reducers that have run in this step, each with its state before"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        (cost,) = reducer_cost([range(len(shapes))])
        return with_totals(cost, layout)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        return self._summed(replica, replica.vector(), lr, clock)

    def _summed(self, replica: Vectors, vector: np.ndarray, lr: float, clock: Clock) -> Exchanged:
        with clock.span("communication"):
            sent = self._reduced(self._reducer, vector, self._size)
            self._commit()
        with clock.span("compute"):
            replica.apply(lr)
        return Exchanged.of(vector[self._size :], sent)

    def _reduced(self, reducer: Reducer, vector: np.ndarray, size: int) -> int:
        """`reduce`, which `abandon` can undo. Raises PeerLost."""
        if not self._world.elastic:
            return reduce(self._world, reducer, vector, size)
        if self._world.suspended:
            raise PeerLost("an earlier exchange was interrupted")
        self._undo = (*self._undo, (reducer, reducer.state()))
        try:
            return reduce(self._world, reducer, vector, size)
        except PeerLost:
            self._world.lost()  # the other members must not take the next bucket for this one
            raise

    def _commit(self) -> None:
        """End the exchange of a step. Raises PeerLost or Aborted before anything was updated."""
        self._world.commit()
        self._undo = ()

    def abandon(self) -> None:
        for reducer, state in self._undo:
            reducer.load(state)
        self._undo = ()

    def regroup(self) -> None:
        for reducer in self._reducers():
            reducer.load(reducer.state())  # if a single host is left, it adds the residual to its next vector

    def _reducers(self) -> list[Reducer]:
        return [self._reducer]

    def newcomer_state(self) -> dict[str, np.ndarray]:
        residual = self._reducers()[0].residual_key
        return {name: array for name, array in self.state().items() if name != residual}

    def welcome(self, replica: Vectors, state: dict[str, np.ndarray]) -> None:
        self.load(self.state() | state)

    def state(self) -> dict[str, np.ndarray]:
        return self._reducer.state()

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._reducer.load(state)

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return self._reducer.reshard_state(states, first=self._world.rank == 0)


def with_totals(cost: Cost, layout: Layout) -> Cost:
    """Add the exchange of the step's totals, whose few bytes are not counted."""
    if layout.hosts == 1:
        return cost
    totals = Phase(bytes_per_peer=0, peers=layout.hosts - 1, hops=1)
    return dataclasses.replace(cost, phases=(totals, *cost.phases))


def reducer_state(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the reducer's part of a strategy's state."""
    return {name.removeprefix("inner."): array for name, array in state.items() if name.startswith("inner.")}


def reduce(world: Communicator, reducer: Reducer, vector: np.ndarray, size: int) -> int:
    """Sum a vector over all ranks in place and return the payload bytes sent.

    The reducer sums the first `size` numbers. The tail after them is summed exactly.
    """
    before = world.sent_bytes
    world.local_reduce(vector)
    if leaders := world.leaders:
        if vector.size > size:
            leaders.all_reduce(vector[size:])
        if leaders.count > 1:
            reducer.all_reduce(vector[:size], leaders)
        else:
            reducer.add_residual(vector[:size])
    world.local_broadcast(vector)
    return world.sent_bytes - before
