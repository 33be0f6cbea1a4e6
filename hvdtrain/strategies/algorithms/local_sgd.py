"""Local SGD: ranks train on their own for some steps, then average the changes of their weights.

For `every` = H steps each rank updates its own weights with its own gradients and sends nothing. Then the ranks
exchange their weight changes since the last exchange by the reducer, weighted by the samples that each has seen, and
continue from the mean. Per step this sends 1/H of the reducer's bytes. H = 1 averages parameters after every batch;
with plain SGD that equals summing gradients. Each rank keeps its own momentum.

With `staleness` = S the exchange of a round runs during the next S steps. Each rank continues from its own weights;
then the mean change replaces its own change in them (Wang, Liang and Joshi, "Overlap local-SGD", 2020, with S = H;
Douillard et al., "Streaming DiLoCo", 2025, with smaller S). No rank waits if the exchange takes at most S steps.

`start` exchanges gradients in each of the first steps, when weights change fastest (post-local SGD: Lin et al., 2020).
`outer_lr` and `outer_momentum` treat the mean change as a gradient and make Nesterov steps with it (DiLoCo: Douillard
et al., 2023). A reducer with error feedback adds its residual to the next change. At the end of `start` it drops the
residual, because a gradient is not a change of weights. Adding it times -lr did not help.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017; Stich, "Local SGD
converges fast and communicates little", 2019.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, empty, handover, moved, placed_like, to_host
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.algorithms.synchronous import Synchronous, summed_cost
from hvdtrain.strategies.base import Capabilities, ReducerCost
from hvdtrain.strategies.cost import Cost, Layout, Shape
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class InFlight(NamedTuple):
    """A weight change that is being exchanged."""

    due: int
    """The step at whose end it is used"""
    own: Array
    """This rank's change; empty without staleness, when nobody asks for it"""
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
    """A rank's weights are `_anchor` plus its own changes.

    All ranks have the same bits in `_anchor`. Adding the changes that are being exchanged gives `_began`, and adding
    the change of the current round gives the weights. What a script writes to the weights is part of that change.
    """

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        every: int = bounded(8, least=1, example=6)
        """Steps between two exchanges"""
        start: int = bounded(0, least=0)
        """Steps at the beginning in which gradients are exchanged every time"""
        outer_lr: float = bounded(1.0, above=0, most=2)
        """Factor of the ranks' mean change; 1 without momentum is plain averaging"""
        outer_momentum: float = bounded(0.0, least=0, below=1)
        """Nesterov momentum of the mean changes; 0: none"""
        staleness: int = bounded(0, least=0, example=1)
        """Steps computed during an exchange, before its result is used"""

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
        if settings.staleness:  # otherwise a checkpoint waits for the end of the round, and has fewer arrays
            self.capabilities = dataclasses.replace(self.capabilities, saves_anytime=True)
        self._in_flight: collections.deque[InFlight] = collections.deque()
        self._steps = 0  # of the whole run
        self._restarted = False
        """Whether this rank's round began with weights that its script has loaded"""
        self._drifted, self._samples, self._all_samples = 0, 0, 0  # steps and samples of the current round
        self._tail = np.zeros(1)  # sum of the current round's tails
        self._began: Array = np.zeros(0, np.float32)
        self._anchor: Array = self._began
        self._velocity: Array = np.zeros(self._size if settings.outer_momentum else 0, np.float32)
        self._placed = False
        """Whether these arrays are where the replica has its weights"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        cost = summed_cost(reducer_cost([range(len(shapes))]), layout)
        phases = tuple(dataclasses.replace(phase, needed_at=1.0 + settings.staleness) for phase in cost.phases)
        return Cost(phases=phases, every=settings.every)

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
        if self._steps < self.settings.start:
            vector = replica.vector()
            vector[: self._size] *= samples / all_samples  # was a mean over this rank's samples
            exchanged = self._summed(replica, vector, lr, clock)
            self._steps, self.averages = self._steps + 1, self.averages + 1
            if self._steps == self.settings.start:
                self._reducer.drop_residual()  # a residual of gradients is not one of weight changes
            return exchanged
        self._steps += 1
        with clock.span("compute"):
            if not len(self._anchor):
                self._set_anchor(replica)
            self._place(replica)
            replica.apply(lr)
            tail = replica.tail()
            self._tail = self._tail + tail
        self._drifted, self._samples = self._drifted + 1, self._samples + samples
        self._all_samples += all_samples
        if self._drifted >= self.settings.every and not self._world.suspended:
            self._send(replica, clock)
        return self._receive(replica, clock, self._steps, float(tail[0] / samples))

    def _place(self, replica: Vectors) -> None:
        """Keep this object's arrays where the replica has its weights, after `load` or at the beginning."""
        if self._placed:
            return
        self._placed, like = True, replica.weights()
        aliased = self._began is self._anchor
        self._anchor, self._velocity = moved(self._anchor, like), moved(self._velocity, like)
        self._began = self._anchor if aliased else moved(self._began, like)
        self._in_flight = collections.deque(
            each._replace(own=moved(each.own, like), change=moved(each.change, like)) for each in self._in_flight
        )

    def _set_anchor(self, replica: Vectors) -> None:
        """A round begins, in which all ranks have the replica's weights."""
        self._place(replica)
        weights = replica.weights()
        self._anchor = self._began = array_namespace(weights).asarray(weights, copy=True)

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        self._place(replica)
        if self._drifted and not self._world.suspended:
            self._send(replica, clock)
        return self._receive(replica, clock, self._steps + self.settings.staleness, 0.0)

    def _send(self, replica: Vectors, clock: Clock) -> None:
        """End the round and start the exchange of its change."""
        with clock.span("compute"):
            weights, xp = replica.weights(), array_namespace(self._anchor)
            change = empty(self._size + 1 + self._tail.size, self._anchor)
            own = empty(self._size, self._anchor) if self.settings.staleness else change[: self._size]
            xp.subtract(weights, self._began, out=own)
            xp.multiply(own, self._samples / self._all_samples, out=change[: self._size])
            if self.settings.staleness:
                self._began = xp.asarray(weights, copy=True)
            else:
                own = own[:0]
            totals = np.array([self._restarted, *self._tail], np.float32)
            change[self._size :] = placed_like(totals, change)
            self._restarted = False
        before: dict[str, np.ndarray] = {}
        work = functools.partial(self._exchange, change, before, handover(change))
        sent = self._thread.submit(self._in_background, change, work)
        due = self._steps + self.settings.staleness
        self._in_flight.append(InFlight(due, own, change, sent, self._drifted, self._samples, self._tail, before))
        self._drifted = self._samples = self._all_samples = 0
        self._tail = np.zeros(1)

    def _exchange(self, change: Array, before: dict[str, np.ndarray], ready: Callable[[], None] | None) -> int:
        """Runs in the background. Returns the payload bytes sent."""
        if ready:
            ready()
        if not self._world.elastic:
            return self._world.reduce(change, self._size, self._reducer)
        if self._world.suspended:
            raise PeerLost("an earlier exchange was interrupted")
        before |= self._reducer.state() or {"none": np.zeros(0)}
        try:
            sent = self._world.reduce(change, self._size, self._reducer)
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
            restarts, *tail = to_host(flight.change[self._size :])
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
        self.averages += 1
        self._anchor += self._outer(flight.change[: self._size])
        began = self._anchor
        if self._in_flight:
            began = array_namespace(began).asarray(began, copy=True)
            for other in self._in_flight:
                if not other.void:
                    began += other.own
        if self._drifted:  # the weights are `_began` plus the change of the current round
            replica.set_weights(replica.weights() - self._began + began)
        else:
            replica.set_weights(began)
        self._began = began

    def restart(self, replica: Vectors) -> None:
        """The round continues from the script's weights, and no change from before counts.

        The steps until the next average do not change. That exchange tells whether all ranks have restarted.
        """
        if self._world.elastic or self._steps < self.settings.start:
            return
        self._start_over(replica)
        self._restarted = True

    def _start_over(self, replica: Vectors) -> None:
        """A round begins with the replica's weights, and no change from before counts."""
        wait([flight.sent_bytes for flight in self._in_flight])  # the reducer is idle
        self._in_flight = collections.deque(flight._replace(void=True) for flight in self._in_flight)
        self._set_anchor(replica)
        self._reducer.drop_residual()

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
        if not tails:
            return Exchanged(loss=loss)
        return dataclasses.replace(Exchanged.of(np.stack(tails).sum(axis=0, dtype=np.float64), sent), loss=loss)

    def abandon(self) -> None:
        super().abandon()
        wait([flight.sent_bytes for flight in self._in_flight])

    def settle(self, replica: Vectors, counts: bool) -> Exchanged:
        """The changes that were not exchanged become part of the current round."""
        self._place(replica)
        tails, undone, undo = [], list[InFlight](), dict[str, np.ndarray]()
        while self._in_flight:
            flight = self._in_flight.popleft()
            error = flight.sent_bytes.exception()
            if error is not None and not isinstance(error, PeerLost):
                raise error
            if error is None or (counts and not undone):
                counts &= error is None
                tails.append(to_host(flight.change[self._size + 1 :]))
                self._take(flight, replica)
            else:
                undone.append(flight)
                undo = undo or flight.before
        if undone:
            if undo and "none" not in undo:
                self._reducer.load(undo)
            self._began = self._anchor
            self._drifted += sum(flight.steps for flight in undone)
            self._samples += sum(flight.samples for flight in undone)
            self._tail = sum((flight.tail for flight in undone), start=self._tail)
        return self._arrived(tails, 0, 0.0)

    def regroup(self, replica: Vectors, state: dict[str, np.ndarray] | None = None) -> None:
        super().regroup(replica, state)
        if state is not None:
            self._set_anchor(replica)
        if self._drifted:  # the lost hosts' samples of this round are lost with their changes
            self._all_samples = sum(self._world.gather(self._samples))

    def _outer(self, mean: Array) -> Array:
        """Return the step that all ranks make for a mean change, which is used up."""
        if momentum := self.settings.outer_momentum:
            self._velocity *= momentum
            self._velocity += mean
            mean += self._velocity * momentum
        if self.settings.outer_lr != 1:
            mean *= self.settings.outer_lr
        return mean

    def state(self, *, newcomer: bool = False) -> dict[str, np.ndarray]:
        due = [  # waits until the reducer is idle
            (flight.due, flight.sent_bytes.result(), flight.void) for flight in self._in_flight
        ]
        inner = {f"inner.{name}": array for name, array in self._reducer.state().items()}
        state = {"steps": np.array(self._steps), "velocity": to_host(self._velocity).copy(), **inner}
        if newcomer:
            state.pop(f"inner.{self._reducer.residual_key}", None)
            round_ = np.array([self._drifted, 0, self._all_samples, False])
            return state | {"totals": np.zeros_like(self._tail), "round": round_}
        if self.in_sync:
            return state
        state["round"] = np.array([self._drifted, self._samples, self._all_samples, self._restarted])
        state |= {"began": to_host(self._began).copy(), "anchor": to_host(self._anchor).copy()}
        state["totals"] = self._tail.copy()
        state["in_flight"] = np.array(due, np.int64).reshape(-1, 3)
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
        self._reducer.load(reducer_state(state))
        self._in_flight.clear()
        self._drifted, self._samples, self._all_samples, restarted = (int(n) for n in state.get("round", (0, 0, 0, 0)))
        self._restarted = bool(restarted)
        self._tail = state.get("totals", np.zeros(1)).copy()
        self._tail[-1] = 0  # the requests have been handled
        if "began" in state:
            self._began, self._anchor = state["began"].copy(), state["anchor"].copy()
        else:
            self._began = self._anchor = np.zeros(0, np.float32)
        for age, (due, sent, void) in enumerate(state.get("in_flight", ())):
            arrived: Future[int] = Future()
            arrived.set_result(int(sent))
            change = state[f"change.{age}"].copy()
            change[-1] = 0
            self._in_flight.append(InFlight(int(due), state[f"own.{age}"].copy(), change, arrived, void=bool(void)))

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        first = self._world.rank == 0
        residual = self._reducer.reshard_state([reducer_state(state) for state in states], first)
        own = states[self._world.rank if len(states) == self._world.size else 0]
        return own | {f"inner.{name}": array for name, array in residual.items()}


def reducer_state(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the reducer's part of the state."""
    return {name.removeprefix("inner."): array for name, array in state.items() if name.startswith("inner.")}
