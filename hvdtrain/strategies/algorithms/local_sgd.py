"""Local SGD: ranks train on their own for some steps, then average the changes of their weights.

For `every` = H steps each rank updates its own weights with its own gradients and sends nothing. Then the ranks
exchange their weight changes since the last exchange by the reducer, weighted by the samples that each has seen, and
continue from the mean. Per step this sends 1/H of the reducer's bytes. H = 1 averages parameters after every batch;
with plain SGD that equals summing gradients. Each rank keeps its own momentum.

With `staleness` = S the exchange of a round runs during the next S steps. Each rank continues from its own weights;
then the mean change replaces its own change in them (Wang, Liang and Joshi, "Overlap local-SGD", 2020, with S = H;
Douillard et al., "Streaming DiLoCo", 2025, with smaller S). No rank waits if the exchange takes at most S steps.

With `parts` = P the model's layers are divided into P parts, which are averaged in turn, one every H/P steps (Streaming
DiLoCo). So the network works evenly, and S = 1 hides exchanges that would take P steps in one piece.

With `lr_scaling` local steps multiply the learning rate by the square root of the number of ranks, except SGD's. Adam
divides by the magnitude of its gradients. Noise makes those of a rank up to this factor larger than the ranks' mean
(Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022).

`outer_lr` and `outer_momentum` treat the mean change as a gradient and make Nesterov steps with it (DiLoCo: Douillard
et al., 2023). A reducer with error feedback adds its residual to the next change.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017; Stich, "Local SGD
converges fast and communicates little", 2019.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, empty, handover, moved, placed_like, to_host
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.algorithms.synchronous import Bucket, Synchronous, summed_cost
from hvdtrain.strategies.base import Capabilities, ReducerCost
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(eq=False)
class Part:
    """Arrays that are averaged together."""

    bucket: Bucket
    arrays: range | None
    """None: all"""
    due: int = 0
    """The step at whose end its change is sent"""
    steps: int = 0
    samples: int = 0
    all_samples: int = 0
    """Of the current round: steps, samples of this rank and of all ranks"""

    @property
    def size(self) -> int:
        return self.bucket.span.stop - self.bucket.span.start


class InFlight(NamedTuple):
    """A weight change that is being exchanged."""

    part: Part
    due: int
    """The step at whose end it is used"""
    own: Array
    """This rank's change of the part; empty without staleness, when nobody asks for it"""
    change: Array
    """This rank's weighted change, whether it has restarted, and totals; after the exchange, the sums over ranks"""
    sent_bytes: Future[int]
    steps: int = 0
    samples: int = 0
    """Steps and this rank's samples of the round"""
    tail: np.ndarray = np.zeros(1)
    """This rank's totals of the round"""
    before: dict[str, np.ndarray] = {}  # noqa: RUF012 (a default that nobody changes)
    """In an elastic job: the reducer's state before the exchange, as soon as it has begun"""
    void: bool = False
    """Whether the mean is not used, because this rank has got other weights since (see `LocalSGD.restart`)"""


class LocalSGD(Synchronous):
    """A rank's weights are `_anchor`, of which all ranks have the same bits, plus its own changes.

    These are the changes that are being exchanged, and that of the current round. What a script writes to the weights
    is part of the latter.
    """

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        every: int = bounded(8, least=1, example=6)
        """Steps between two exchanges"""
        outer_lr: float = bounded(1.0, above=0, most=2)
        """Factor of the ranks' mean change; 1 without momentum is plain averaging"""
        outer_momentum: float = bounded(0.0, least=0, below=1)
        """Nesterov momentum of the mean changes; 0: none"""
        staleness: int = bounded(0, least=0, example=1)
        """Steps computed during an exchange, before its result is used"""
        parts: int = bounded(1, least=1, example=2)
        """Parts of the model that are averaged in turn, each every `every` steps"""
        lr_scaling: Literal["none", "sqrt"] = dataclasses.field(default="none", metadata={"example": "sqrt"})
        """sqrt: multiplies the learning rate of local steps by the square root of the number of ranks, except SGD's"""

    capabilities = Capabilities(
        takes_reducer=True,
        local_updates=True,
        has_residual=True,
        elastic=True,
        reshard_refusal="each rank has its own weights and momentum",
    )

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        super().__init__(world, shapes, config, settings, reducer)
        if settings.staleness or settings.parts > 1:  # otherwise a checkpoint waits for the round's end, and is smaller
            self.capabilities = dataclasses.replace(self.capabilities, saves_anytime=True)
        if len(ranges := parts(shapes, settings.parts)) > 1:
            if not self._reducer.supports_buckets:
                raise Failure(
                    f"parts={settings.parts} needs a reducer that sums them one by one; hint: int2 or int8",
                    exits.BAD_CONFIG,
                )
            self._buckets = self._made(ranges)
        self._parts = [Part(each, each.arrays if len(ranges) > 1 else None) for each in self._buckets]
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._scales = settings.lr_scaling == "sqrt" and config.optimizer != "sgd"
        self._steps = 0  # of the whole run
        self._restarted = False
        """Whether this rank's round began with weights that its script has loaded"""
        self._tail = np.zeros(1)  # sum of the tails since the last exchange
        self._anchor: Array = np.zeros(0, np.float32)
        self._velocity: Array = np.zeros(self._size if settings.outer_momentum else 0, np.float32)
        self._placed = False
        """Whether these arrays are where the replica has its weights"""
        self._begin_round()

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        costs = reducer_cost(parts(shapes, settings.parts))
        longest, between = max(costs, key=lambda cost: cost.sent_bytes), max(1, settings.every // settings.parts)
        scale = sum(cost.sent_bytes for cost in costs) * between / settings.every / (longest.sent_bytes or 1.0)
        phases = [  # of a mean part
            dataclasses.replace(
                phase,
                bytes_per_peer=phase.bytes_per_peer * scale,
                numbers=phase.numbers * scale,
                needed_at=1.0 + settings.staleness,
            )
            for phase in summed_cost([longest], layout).phases
        ]
        return Cost(phases=tuple(phases), every=between, share=between / settings.every)

    def _begin_round(self) -> None:
        """All ranks have the same weights. Spread the exchanges of the parts over the next round."""
        for number, part in enumerate(self._parts, start=1):
            part.due = self._steps + self.settings.every * number // len(self._parts)
            part.steps = part.samples = part.all_samples = 0

    @property
    def _drifted(self) -> bool:
        return any(part.steps for part in self._parts)

    @property
    def in_sync(self) -> bool:
        return not self._drifted and not self._in_flight

    @property
    def common_weights(self) -> Array | None:
        return None if self.in_sync else self._anchor

    def buckets(self, *, late_tail: bool = False) -> list[range]:
        return []

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        samples, all_samples = replica.share()
        self._steps += 1
        with clock.span("compute"):
            if not len(self._anchor):
                self._set_anchor(replica)
            self._place(replica)
            replica.apply(lr * math.sqrt(self._world.size) if self._scales else lr)
            tail = replica.tail()
            self._tail = self._tail + tail
        for part in self._parts:
            part.steps, part.samples = part.steps + 1, part.samples + samples
            part.all_samples += all_samples
            if part.due <= self._steps and not self._world.suspended:
                self._send(part, replica, clock)
        return self._receive(replica, clock, self._steps, float(tail[0] / samples))

    def _place(self, replica: Vectors) -> None:
        """Keep this object's arrays where the replica has its weights, after `load` or at the beginning."""
        if self._placed:
            return
        self._placed, like = True, replica.weights()
        self._anchor, self._velocity = moved(self._anchor, like), moved(self._velocity, like)
        self._in_flight = collections.deque(
            each._replace(own=moved(each.own, like), change=moved(each.change, like)) for each in self._in_flight
        )

    def _set_anchor(self, replica: Vectors) -> None:
        """A round begins, in which all ranks have the replica's weights."""
        self._place(replica)
        self._anchor = array_namespace(weights := replica.weights()).asarray(weights, copy=True)

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        self._place(replica)
        for part in self._parts if not self._world.suspended else ():
            if part.steps:
                self._send(part, replica, clock)
        exchanged = self._receive(replica, clock, self._steps + self.settings.staleness, 0.0)
        if self.in_sync:
            self._begin_round()
        return exchanged

    def _send(self, part: Part, replica: Vectors, clock: Clock) -> None:
        """End a part's round and start the exchange of its change."""
        size, span = part.size, part.bucket.span
        with clock.span("compute"):
            xp = array_namespace(self._anchor)
            change = empty(size + 1 + self._tail.size, self._anchor)
            own = empty(size, self._anchor) if self.settings.staleness else change[:size]
            xp.subtract(replica.weights(part.arrays), self._anchor[span], out=own)
            for flight in self._of(part):
                own -= flight.own
            xp.multiply(own, part.samples / part.all_samples, out=change[:size])
            if not self.settings.staleness:
                own = own[:0]
            totals = np.array([self._restarted, *self._tail], np.float32)
            change[size:] = placed_like(totals, change)
            self._restarted = False
        before: dict[str, np.ndarray] = {}
        work = functools.partial(self._exchange, part, change, before, handover(change))
        sent = self._thread.submit(self._in_background, change, work)
        due = self._steps + self.settings.staleness
        self._in_flight.append(InFlight(part, due, own, change, sent, part.steps, part.samples, self._tail, before))
        part.due = self._steps + self.settings.every
        part.steps = part.samples = part.all_samples = 0
        self._tail = np.zeros_like(self._tail)

    def _exchange(
        self, part: Part, change: Array, before: dict[str, np.ndarray], ready: Callable[[], None] | None
    ) -> int:
        """Runs in the background. Returns the payload bytes sent."""
        if ready:
            ready()
        if not self._world.elastic:
            return self._world.reduce(change, part.size, part.bucket.reducer)
        if self._world.suspended:
            raise PeerLost("an earlier exchange was interrupted")
        before |= part.bucket.reducer.state() or {"none": np.zeros(0)}
        try:
            sent = self._world.reduce(change, part.size, part.bucket.reducer)
            self._world.confirm()
        except PeerLost:
            self._world.lost()
            raise
        return sent

    def _receive(self, replica: Vectors, clock: Clock, step: int, loss: float) -> Exchanged:
        """Wait for the changes due by this step; their means replace this rank's own changes."""
        tails, sent = [], 0
        while self._in_flight and self._in_flight[0].due <= step and not self._world.suspended:
            flight = self._in_flight[0]
            with clock.span("communication"):
                try:
                    sent += flight.sent_bytes.result()
                except PeerLost:
                    if not self._world.elastic:
                        raise
                    break  # `settle` decides
            self._in_flight.popleft()
            restarts, *tail = to_host(flight.change[flight.part.size :])
            tails.append(np.array(tail))
            with clock.span("communication"):
                agree = not restarts or self._starts_agree(replica, restarts)
            if agree:
                with clock.span("compute"):
                    self._take(flight, replica)
        return self._arrived(tails, sent, loss)

    def _take(self, flight: InFlight, replica: Vectors) -> None:
        """Replace this rank's own change by the mean."""
        if flight.void:
            return
        part, change = flight.part, flight.change[: flight.part.size]
        self.averages += part is self._parts[-1]
        anchor, step = self._anchor[part.bucket.span], self._outer(change, part.bucket.span)
        anchor += step
        if not part.steps and not self._of(part):  # the same bits on all ranks
            replica.set_weights(anchor, part.arrays)
            return
        step -= flight.own
        step += replica.weights(part.arrays)
        replica.set_weights(step, part.arrays)

    def _of(self, part: Part) -> list[InFlight]:
        """The changes of a part that are being exchanged."""
        return [flight for flight in self._in_flight if flight.part is part and not flight.void]

    def restart(self, replica: Vectors) -> None:
        """The round continues from the script's weights, and no change from before counts.

        The steps until the next average do not change. That exchange tells whether all ranks have restarted.
        """
        if self._world.elastic:
            return
        self._start_over(replica)
        self._restarted = True

    def _start_over(self, replica: Vectors) -> None:
        """A round begins with the replica's weights, and no change from before counts."""
        wait([flight.sent_bytes for flight in self._in_flight])  # the reducer is idle
        self._in_flight = collections.deque(flight._replace(void=True) for flight in self._in_flight)
        self._set_anchor(replica)
        for bucket in self._buckets:
            bucket.reducer.drop_residual()

    def _starts_agree(self, replica: Vectors, restarts: float) -> bool:
        """Whether all ranks have restarted with the same weights, so that their changes can be averaged. Collective.

        Otherwise the ranks' weights are averaged exactly.
        """
        wait([flight.sent_bytes for flight in self._in_flight])
        if restarts == self._world.size and len(set(self._world.gather(zlib.crc32(to_host(self._anchor).data)))) == 1:
            return True
        mean = to_host(replica.weights()) / np.float32(self._world.size)
        self._world.reduce(mean)
        replica.set_weights(placed_like(mean, self._anchor))
        self._start_over(replica)
        self._velocity[...] = 0
        self.averages += 1
        return False

    def _arrived(self, tails: Sequence[np.ndarray], sent: int, loss: float) -> Exchanged:
        if not any(map(np.any, tails)):  # of several parts that are sent in the same step, the first has the totals
            return Exchanged(loss=loss, sent_bytes=sent)
        return dataclasses.replace(Exchanged.of(np.stack(tails).sum(axis=0, dtype=np.float64), sent), loss=loss)

    def abandon(self) -> None:
        super().abandon()
        wait([flight.sent_bytes for flight in self._in_flight])

    def settle(self, replica: Vectors, counts: bool) -> Exchanged:
        """The changes that were not exchanged become part of the current round."""
        self._place(replica)
        tails, undone = [], list[InFlight]()
        while self._in_flight:
            flight = self._in_flight.popleft()
            error = flight.sent_bytes.exception()
            if error is not None and not isinstance(error, PeerLost):
                raise error
            if error is None or (counts and not undone):
                counts &= error is None
                tails.append(to_host(flight.change[flight.part.size + 1 :]))
                self._take(flight, replica)
            else:
                undone.append(flight)
        for flight in reversed(undone):  # the oldest last, which has the oldest state of the part's reducer
            part = flight.part
            if flight.before and "none" not in flight.before:
                part.bucket.reducer.load(flight.before)
            part.steps, part.samples, part.due = part.steps + flight.steps, part.samples + flight.samples, self._steps
            self._tail = self._tail + flight.tail
        return self._arrived(tails, 0, 0.0)

    def regroup(self, replica: Vectors, state: dict[str, np.ndarray] | None = None) -> None:
        super().regroup(replica, state)
        if state is not None:
            self._set_anchor(replica)
        if self._drifted:  # the lost hosts' samples of this round are lost with their changes
            rows = self._world.gather([part.samples for part in self._parts])
            for part, samples in zip(self._parts, zip(*rows, strict=True), strict=True):
                part.all_samples = sum(samples)

    def _outer(self, mean: Array, span: slice) -> Array:
        """Return the step that all ranks make for a part's mean change, which is used up."""
        if momentum := self.settings.outer_momentum:
            velocity = self._velocity[span]
            velocity *= momentum
            velocity += mean
            mean += velocity * momentum
        if self.settings.outer_lr != 1:
            mean *= self.settings.outer_lr
        return mean

    def state(self, *, newcomer: bool = False) -> dict[str, np.ndarray]:
        due = [  # waits until the reducers are idle
            (flight.due, flight.sent_bytes.result(), flight.void, self._parts.index(flight.part))
            for flight in self._in_flight
        ]
        inner = {f"inner.{name}": array for name, array in self._arrays().items()}
        rounds = [(part.steps, part.samples, part.all_samples, part.due - self._steps) for part in self._parts]
        state = {"steps": np.array(self._steps), "velocity": to_host(self._velocity).copy(), **inner}
        if newcomer:
            state.pop(f"inner.{self._reducer.residual_key}", None)
            return state | {"totals": np.zeros_like(self._tail), "rounds": np.array(rounds) * [1, 0, 1, 1]}
        if self.in_sync:
            return state
        state |= {"rounds": np.array(rounds), "restarted": np.array(self._restarted)}
        state |= {"anchor": to_host(self._anchor).copy(), "totals": self._tail.copy()}
        state["in_flight"] = np.array(due, np.int64).reshape(-1, 4)
        for age, flight in enumerate(self._in_flight):
            own, change = to_host(flight.own), to_host(flight.change)
            state |= {f"own.{age}": own.copy(), f"change.{age}": change.copy()}
        return state

    def load(self, state: dict[str, np.ndarray]) -> None:
        if state["velocity"].size != len(self._velocity):
            there = "with" if state["velocity"].size else "without"
            raise Failure(
                f"checkpoint: it was made {there} outer_momentum; hint: resume with the same settings", exits.BAD_CONFIG
            )
        self._steps, self._velocity, self._placed = int(state["steps"]), state["velocity"].copy(), False
        self._load_arrays(reducer_state(state))
        self._in_flight.clear()
        self._begin_round()
        for part, numbers in zip(self._parts, state.get("rounds", ()), strict=False):
            part.steps, part.samples, part.all_samples, left = map(int, numbers)
            part.due = self._steps + left
        self._restarted = bool(state.get("restarted", False))
        self._tail = state.get("totals", np.zeros(1)).copy()
        self._tail[-1] = 0  # the requests have been handled
        self._anchor = state["anchor"].copy() if "anchor" in state else np.zeros(0, np.float32)
        for age, (due, sent, void, part) in enumerate(state.get("in_flight", ())):
            arrived: Future[int] = Future()
            arrived.set_result(int(sent))
            own, change = state[f"own.{age}"].copy(), state[f"change.{age}"].copy()
            change[-1] = 0
            self._in_flight.append(InFlight(self._parts[part], int(due), own, change, arrived, void=bool(void)))

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        first = self._world.rank == 0
        residual = self._reducer.reshard_state([reducer_state(state) for state in states], first)
        own = states[self._world.rank if len(states) == self._world.size else 0]
        return own | {f"inner.{name}": array for name, array in residual.items()}


def parts(shapes: Sequence[Shape], count: int) -> list[range]:
    """Divide the arrays into up to `count` parts with about as many numbers, the last arrays first."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    borders = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count) + 1
    return [range(*each) for each in itertools.pairwise(sorted({0, len(shapes), *borders.tolist()}))][::-1]


def reducer_state(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the reducer's part of the state."""
    return {name.removeprefix("inner."): array for name, array in state.items() if name.startswith("inner.")}
