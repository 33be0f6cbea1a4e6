"""Sums the gradients of all ranks with a reducer during every backward pass: `--strategy REDUCER`.

Backward computes the gradients of the last layers first. While it computes the others, a thread of each rank sums those
that are ready, in up to four buckets: the last quarter of the model's layers, then the quarter before it, and so on.
All ranks use the same order, and each bucket has its own reducer. After backward about a quarter of the exchange
remains to be waited for, if the exchange is not slower than backward.

Each bucket costs the latencies of one exchange. Backward and the thread share the processor, so on a rank with a single
core the time for encoding is not hidden.

Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU clusters", 2017
(wait-free backpropagation); Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.algorithms.synchronous import Synchronous, with_totals
from hvdtrain.strategies.base import ReducerCost
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

MAX_BUCKETS = 4
MIN_NUMBERS = 1 << 14
"""Models with fewer numbers have one bucket: sending them takes no longer than the extra latencies"""


class Overlapped(Synchronous):
    """Its state is the concatenation of the reducers' states, so it does not depend on the number of buckets."""

    _buckets: tuple[tuple[slice, Reducer], ...] = ()
    """Each bucket's slice of the vector and its reducer; empty if the whole vector is summed after backward"""
    _pending: Sequence[Future[int]] = ()
    """The sums of this step's buckets; each returns the payload bytes sent"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        ranges = buckets(shapes)
        if len(ranges) == 1:
            return super().cost(shapes, layout, settings, reducer_cost)
        costs = reducer_cost(ranges)
        phases = [
            dataclasses.replace(phase, ready_at=number / len(ranges))
            for number, cost in enumerate(costs, start=1)
            for phase in (with_totals(cost, layout) if number == 1 else cost).phases
        ]
        return Cost(phases=tuple(phases), exact=costs[0].exact)

    def buckets(self) -> list[range]:
        ranges = buckets(self._shapes)
        if len(ranges) == 1 or (self._world.hosts_count == 1 and not self._world.joining):
            return []
        borders = [0, *itertools.accumulate(math.prod(shape) for shape in self._shapes)]
        slices = [slice(borders[bucket.start], borders[bucket.stop]) for bucket in ranges]
        state = self.state()
        self._buckets = tuple(zip(slices, self._reducer.split(ranges), strict=True))
        self._held = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-exchange")
        self.load(state)
        return ranges

    def on_bucket_ready(self, bucket: int, vector: np.ndarray, ready: Callable[[], None] | None = None) -> None:
        if self.paused:
            return
        span, reducer = self._buckets[bucket]
        # The first bucket is at the end of the vector and includes the tail.
        piece, size = vector[span.start :] if bucket == 0 else vector[span], span.stop - span.start

        def exchange() -> int:
            if ready:
                ready()
            return self._reduced(reducer, piece, size)

        self._pending = [*self._pending, self._thread.submit(exchange)]

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector = replica.vector()
        if not self._buckets:
            return self._summed(replica, vector, lr, clock)
        with clock.span("communication"):
            sent = sum(future.result() for future in self._pending)
            self._commit()
        self._pending = ()
        with clock.span("compute"):
            replica.apply(lr)
        return Exchanged.of(vector[self._size :], sent)

    def abandon(self) -> None:
        wait(self._pending)
        self._pending = ()
        super().abandon()

    def _reducers(self) -> list[Reducer]:
        return [reducer for _, reducer in self._buckets] or super()._reducers()

    def state(self) -> dict[str, np.ndarray]:
        if not self._buckets:
            return super().state()
        states = [reducer.state() for _, reducer in reversed(self._buckets)]
        return {name: np.concatenate([state[name] for state in states]) for name in states[0]}

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        reducer = self._buckets[0][1] if self._buckets else self._reducer
        return reducer.reshard_state(states, first=self._world.rank == 0)

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Raises Failure (78) for the state of another model or of other settings."""
        if not self._buckets:
            super().load(state)
            return
        reducers = [reducer for _, reducer in reversed(self._buckets)]
        states = [reducer.state() for reducer in reducers]
        for name, array in state.items():
            ends = np.cumsum([part[name].size for part in states])
            if ends[-1] != array.size:
                raise Failure(
                    f"checkpoint: {name} of the strategy has {array.size} numbers, this run needs {ends[-1]}; hint: "
                    "resume with the settings and the model of the checkpoint",
                    exits.BAD_CONFIG,
                )
            for part, values in zip(states, np.split(array, ends[:-1]), strict=True):
                part[name] = values
        for reducer, part in zip(reducers, states, strict=True):
            reducer.load(part)


def buckets(shapes: Sequence[Shape]) -> list[range]:
    """Divide the arrays into buckets with about the same number of layers, the last arrays first."""
    layers = [index for index, shape in enumerate(shapes) if len(shape) > 1]
    count = min(MAX_BUCKETS, len(layers)) if sum(math.prod(shape) for shape in shapes) > MIN_NUMBERS else 1
    borders = [0, *(layers[len(layers) * bucket // count] for bucket in range(1, count)), len(shapes)]
    return [range(begin, end) for begin, end in itertools.pairwise(borders)][::-1]
