"""Every step sums the gradients of all ranks by a reducer, behind backward: what `--strategy REDUCER` means.

Backward makes the gradients of the last layers first. While it computes those of the layers before, a thread of each
rank sums what is there, by `synchronous.reduce`: first the gradients of the last quarter of the model's layers, then
those of the quarter before it, and so on, on all ranks in that order, each part by a reducer of its own. So when
backward is done about a quarter of the exchange is left to wait for, if it takes no longer than backward.

A step takes as many times the rounds as there are parts. Backward's thread and this one share the processor: what
coding costs is not hidden where a rank has one core.

Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU clusters", 2017
(wait-free backpropagation); Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.algorithms.synchronous import Synchronous, reduce
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

PARTS = 4
"""Of the model at most"""
LEAST = 1 << 14
"""Numbers that are not cut further: their bytes take no longer than the rounds"""


class Overlapped(Synchronous):
    """Its state is the parts' states, concatenated: the same arrays however many parts there are."""

    _flights: tuple[tuple[slice, Reducer], ...] = ()
    """Each part's place in the vector and its reducer; empty where the vector is summed whole, after backward"""
    _flying: Sequence[Future[int]] = ()
    """Of this step: the payload bytes of each part's sum, once it is done"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        assert round_ is not None
        return dataclasses.replace(round_, rounds=round_.rounds * len(cut(shapes)), behind="backward")

    def parts(self) -> list[range]:
        parts = cut(self._shapes)
        if len(parts) == 1 or self._world.hosts_count == 1:
            return []
        borders = [0, *itertools.accumulate(math.prod(shape) for shape in self._shapes)]
        places = [slice(borders[part.start], borders[part.stop]) for part in parts]
        state = self.state()
        self._flights = tuple(zip(places, self._reducer.cut(parts), strict=True))
        self._held = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-exchange")
        self.load(state)
        return parts

    def take(self, part: int, vector: np.ndarray, ready: Callable[[], None] | None = None) -> None:
        place, reducer = self._flights[part]
        size = place.stop - place.start
        piece = vector[place.start :] if part == 0 else vector[place]  # the first is the vector's last, with the tail

        def sum_() -> int:
            if ready:
                ready()
            return reduce(self._world, reducer, piece, size)

        self._flying = [*self._flying, self._thread.submit(sum_)]

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector = replica.vector()
        if not self._flights:
            return self._summed(replica, vector, lr, clock)
        with clock.span("communication"):
            sent = sum(each.result() for each in self._flying)
        self._flying = ()
        with clock.span("compute"):
            replica.apply(lr)
        return Exchanged.of(vector[self._size :], sent)

    def state(self) -> dict[str, np.ndarray]:
        if not self._flights:
            return super().state()
        states = [reducer.state() for _, reducer in reversed(self._flights)]
        return {name: np.concatenate([state[name] for state in states]) for name in states[0]}

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        reducer = self._flights[0][1] if self._flights else self._reducer
        return reducer.handed_on(states, first=self._world.rank == 0)

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Raises Failure (78) for the state of another model, or of other settings."""
        if not self._flights:
            super().load(state)
            return
        reducers = [reducer for _, reducer in reversed(self._flights)]
        states = [reducer.state() for reducer in reducers]
        for name, array in state.items():
            ends = np.cumsum([mine[name].size for mine in states])
            if ends[-1] != array.size:
                raise Failure(
                    f"checkpoint: the strategy's {name} has {array.size} numbers, this run's {ends[-1]}: resume with "
                    "the settings and the model that it was made with",
                    exits.BAD_CONFIG,
                )
            for mine, piece in zip(states, np.split(array, ends[:-1]), strict=True):
                mine[name] = piece
        for reducer, mine in zip(reducers, states, strict=True):
            reducer.load(mine)


def cut(shapes: Sequence[Shape]) -> list[range]:
    """The places of each part's arrays, the last arrays first."""
    layers = [place for place, shape in enumerate(shapes) if len(shape) > 1]
    many = min(PARTS, len(layers)) if sum(math.prod(shape) for shape in shapes) > LEAST else 1
    borders = [0, *(layers[len(layers) * part // many] for part in range(1, many)), len(shapes)]
    return [range(begin, end) for begin, end in itertools.pairwise(borders)][::-1]
