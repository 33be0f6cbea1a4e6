"""Sums the gradients of all ranks with a reducer in every step: `--strategy REDUCER`.

The ranks of a host add up their gradients in its leader. The leaders exchange the sums as the reducer defines, and each
distributes the result on its host. All ranks make the same update, so the weights stay equal without being sent.

Backward computes the gradients of the last layers first. While it computes the others, a thread of each rank sums those
that are ready, in up to four buckets: the last quarter of the model's layers, then the quarter before it, and so on.
All ranks use the same order, and each bucket has its own reducer. After backward about a quarter of the exchange
remains to be waited for, if the exchange is not slower than backward. A reducer that needs all gradients at once
has one bucket, and so has a replica that does not report its gradients.

The weights of a bucket are updated as soon as its sum has arrived, while the next one is exchanged, if the replica
`updates_parts`. In an elastic job all are updated at the end, because a lost host may cancel the step until then.

Each bucket costs the latencies of one exchange. Backward and the thread share the processor, so on a rank with a single
core the time for encoding is not hidden. So the first steps try one, two and four buckets (see `trial`). The grouping
changes the order in which some reducers round, so `--buckets` fixes it for runs that must have equal bits.

Zhang et al., "Poseidon: an efficient communication architecture for distributed deep learning on GPU clusters", 2017
(wait-free backpropagation); Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.arrays import Array, finish, use_own_stream
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.algorithms.trial import Trial, fastest
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Phase, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

MAX_BUCKETS = 4
TRIAL_ENDED = -1
"""Instead of the step of the trial in `state`"""
MIN_NUMBERS = 1 << 14
"""Models with fewer numbers have one bucket: sending them takes no longer than the extra latencies"""


class Bucket(NamedTuple):
    """A part of the vector, the reducer that sums it, and the arrays that it consists of."""

    span: slice
    reducer: Reducer
    arrays: range


class Synchronous(Strategy):
    """Its state is the concatenation of the reducers' states, and the number of buckets."""

    capabilities = Capabilities(takes_reducer=True, elastic=True)

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        super().__init__(world, shapes, config, settings, reducer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-exchange")
        """Exchanges while the replica computes"""
        self._buckets = [Bucket(slice(0, self._size), self._reducer, range(len(shapes)))]
        """In the order in which they are summed, the end of the vector first"""
        self._pending: list[Future[int]] = []
        """The sums of this step that began during backward; each returns the payload bytes sent"""
        self._fixed_count = config.buckets
        self._trial: Trial | None = None
        """Measures which number of buckets is fastest; None if it is known"""
        self._reported: list[range] = []
        """The buckets that the replica reports, as ranges of arrays; each of `_buckets` consists of one or more"""
        self._complete: list[int] = []
        """For each of `_buckets`, the reported bucket that completes it"""
        self._copies: list[Callable[[], None]] = []
        """Copies that the next of `_buckets` has to wait for"""
        self._late_tail = False
        """Whether the tail follows the last bucket. Otherwise it travels with the first one"""
        self._interrupted = False
        """Whether a sum of this step failed because a rank was lost"""
        self._undo: tuple[tuple[Reducer, dict[str, np.ndarray]], ...] = ()
        """In an elastic job: the reducers that have run in this step, each with its state before"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        return summed_cost(reducer_cost(buckets(shapes)), layout)

    def buckets(self, *, late_tail: bool = False) -> list[range]:
        ranges = buckets(self._shapes)
        several_hosts = self._world.hosts_count > 1 or self._world.joining
        if len(ranges) == 1 or not several_hosts or not self._reducer.supports_buckets:
            return []
        self._reported, self._late_tail = ranges, late_tail
        self._trial = None if self._fixed_count else Trial(len(ranges))
        arrays = self._arrays()
        self._divide(self._trial.count if self._trial else self._fixed_count)
        self._load_arrays(arrays)
        return ranges

    def _divide(self, count: int) -> None:
        """From now on sum `count` buckets, each of which consists of one or more of those that are reported.

        Their reducers are new.
        """
        reported = np.array_split(np.arange(len(self._reported)), min(count, len(self._reported)))
        ranges = [range(self._reported[numbers[-1]].start, self._reported[numbers[0]].stop) for numbers in reported]
        self._buckets = self._made(ranges)
        self._complete = [int(numbers[-1]) for numbers in reported]

    def _made(self, ranges: Sequence[range]) -> list[Bucket]:
        """Buckets of these arrays, with new reducers."""
        borders = [0, *itertools.accumulate(math.prod(shape) for shape in self._shapes)]
        spans = [slice(borders[bucket.start], borders[bucket.stop]) for bucket in ranges]
        return [Bucket(*each) for each in zip(spans, self._reducer.split(ranges), ranges, strict=True)]

    def on_bucket_ready(self, bucket: int, vector: Array, ready: Callable[[], None] | None = None) -> None:
        if ready:
            self._copies.append(ready)
        number = len(self._pending)
        # `step` follows the last one at once. It uses the thread only if it can update weights meanwhile.
        if bucket == self._complete[number] and number < len(self._buckets) - 1:
            self._begin(number, vector)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector = replica.vector()
        in_parts, sent = bool(self._pending) and replica.updates_parts and not self._world.elastic, 0
        if in_parts:
            self._begin(len(self._pending), vector)
        for number, bucket in enumerate(self._buckets):
            with clock.span("communication"):
                began = number < len(self._pending)
                sent += self._pending[number].result() if began else self._sum(number, vector, self._copies)
            if in_parts:
                with clock.span("compute"):
                    replica.apply(lr, bucket.arrays)
        with clock.span("communication"):
            if self._late_tail:
                sent += self._reduced(None, vector[self._size :], 0)
            ranks = self._world.gather(self._trial.medians()) if self._trial and self._trial.is_last else None
            self._commit()
        self._pending, self._copies = [], []
        with clock.span("compute"):
            if not in_parts:
                replica.apply(lr)
            if self._trial:
                self._go_on(self._trial, ranks)
        return Exchanged.of(vector[self._size :], sent)

    def _begin(self, number: int, vector: Array) -> None:
        """Sum a bucket in the background."""
        work = functools.partial(self._sum, number, vector, self._copies)
        self._pending.append(self._thread.submit(self._in_background, vector, work))
        self._copies = []

    @staticmethod
    def _in_background(vector: Array, work: Callable[[], int]) -> int:
        """Do work on a vector in the thread. When it ends, also by an error, the GPU has done its part."""
        use_own_stream(vector)
        try:
            return work()
        finally:
            finish(vector)

    def _go_on(self, trial: Trial, ranks: Sequence[dict[str, float]] | None) -> None:
        """Continue the trial, or end it if `ranks` are the results of all ranks."""
        trial.next_step()
        if ranks is not None:
            self._trial = None
        count = trial.count if ranks is None else fastest(ranks)
        if count != len(self._buckets):
            arrays = self._arrays()
            self._divide(count)
            self._load_arrays(arrays)

    def _sum(self, number: int, vector: Array, copies: Sequence[Callable[[], None]] = ()) -> int:
        """Sum a bucket over all ranks and return the payload bytes sent. The first one may include the tail."""
        for wait_for_copy in copies:
            wait_for_copy()
        span, reducer = self._buckets[number].span, self._buckets[number].reducer
        piece = vector[span] if number or self._late_tail else vector[span.start :]
        return self._reduced(reducer, piece, span.stop - span.start)

    def _reduced(self, reducer: Reducer | None, vector: Array, size: int) -> int:
        """`Communicator.reduce`, which `abandon` can undo. Raises PeerLost."""
        if self._interrupted or self._world.suspended:
            raise PeerLost("an earlier exchange was interrupted")
        if self._world.elastic and reducer is not None:
            self._undo = (*self._undo, (reducer, reducer.state()))
        try:
            return self._world.reduce(vector, size, reducer)
        except PeerLost:
            self._interrupted = True  # the others must not take the next bucket for this one
            self._world.lost()
            raise

    def _commit(self) -> None:
        """End the exchange of a step. Raises PeerLost or Aborted before anything was updated."""
        self._world.commit()
        self._undo = ()

    def abandon(self) -> None:
        wait(self._pending)
        self._pending, self._copies, self._interrupted = [], [], False
        for reducer, state in self._undo:
            reducer.load(state)
        self._undo = ()

    def regroup(self, replica: Vectors, state: dict[str, np.ndarray] | None = None) -> None:
        if state is not None:
            self.load(self.state() | state)
        for bucket in self._buckets:  # if a single host is left, its reducers add the residual to the next vector
            bucket.reducer.load(bucket.reducer.state())

    def state(self, *, newcomer: bool = False) -> dict[str, np.ndarray]:
        wait(self._pending)  # until no reducer is in use
        state = self._arrays()
        if newcomer:
            state.pop(self._reducer.residual_key, None)
        if self._reported:
            state["buckets"] = np.array([self._trial.step if self._trial else TRIAL_ENDED, len(self._buckets)])
        return state

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Raises Failure (78) for the state of another model or of other settings."""
        wait(self._pending)
        arrays = dict(state)
        step, count = arrays.pop("buckets", [TRIAL_ENDED, 0])
        if self._reported and count and not self._fixed_count:
            self._trial = None
            if step != TRIAL_ENDED:
                self._trial = Trial(len(self._reported))
                self._trial.step = int(step)
            self._divide(int(count))
        self._load_arrays(arrays)

    def _arrays(self) -> dict[str, np.ndarray]:
        """The reducers' state, which does not depend on the number of buckets."""
        states = [bucket.reducer.state() for bucket in reversed(self._buckets)]
        if len(states) == 1:
            return states[0]
        return {name: np.concatenate([state[name] for state in states]) for name in states[0]}

    def _load_arrays(self, state: dict[str, np.ndarray]) -> None:
        reducers = [bucket.reducer for bucket in reversed(self._buckets)]
        if len(reducers) == 1:
            reducers[0].load(state)
            return
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

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return self._reducer.reshard_state(states, first=self._world.rank == 0)


def summed_cost(costs: Sequence[Cost], layout: Layout) -> Cost:
    """The cost of a step whose buckets have these costs. The totals travel with the first one; their few bytes are not
    counted."""
    phases = [
        dataclasses.replace(phase, ready_at=number / len(costs))
        for number, cost in enumerate(costs, start=1)
        for phase in cost.phases
    ]
    if layout.hosts > 1:
        totals = Phase(bytes_per_peer=0, peers=layout.hosts - 1, hops=1, ready_at=1 / len(costs))
        phases = [totals, *phases]
    return Cost(phases=tuple(phases), exact=costs[0].exact)


def buckets(shapes: Sequence[Shape]) -> list[range]:
    """Divide the arrays into buckets with about the same number of layers, the last arrays first."""
    layers = [index for index, shape in enumerate(shapes) if len(shape) > 1]
    count = min(MAX_BUCKETS, len(layers)) if sum(math.prod(shape) for shape in shapes) > MIN_NUMBERS else 1
    borders = [0, *(layers[len(layers) * bucket // count] for bucket in range(1, count)), len(shapes)]
    return [range(begin, end) for begin, end in itertools.pairwise(borders)][::-1]
