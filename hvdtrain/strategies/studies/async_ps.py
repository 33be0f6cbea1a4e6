"""Downpour SGD: each rank sends its gradients to parameter servers as soon as it has them, and waits for no other rank.

The parameters are cut into `servers` contiguous parts (default: one per host), each held with its momentum by a thread
inside one rank. Every rank is a worker. After backward it sends each part's gradient to its server, which updates at
once and answers with the part as it is now: one round trip, 4 bytes per parameter in each direction. On h hosts of r
ranks each, a host sends 2r(h-1)/h of the parameters per step, r times what `hierarchical` sends.

    v = momentum v + share (g + weight_decay p);  p -= lr v

g is the mean over the worker's own batch, share its part of the samples of a step of all ranks: p workers' updates move
the weights as far as one step of the other strategies at the same --lr. In Downpour each update has the full rate: that
is --lr-scaling linear. With one worker it is plain SGD. Between a worker's pull and its push others have pushed: the
gradient is so many updates late, about p-1 with p equal workers (`staleness` of a step's record). Late updates act like
more momentum (Mitliagkas et al., "Asynchrony begets momentum", 2016), so --momentum may have to be lower.

All wait for the slowest in the first step, before an evaluation or a checkpoint, and when asked to stop: then they take
the same weights. A rank that dies holding no part is left out, and with it the samples it would have learnt from, if
the launcher lets the others live: launch/mpirun.sh --survive.

Dean et al., "Large scale distributed deep networks", 2012.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.backends.servers import NUMBERS, ServerCommunicator
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.strategies.studies.server import Server
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class AsyncPS(Strategy):
    """A worker and, in some ranks, a server. The weights are the same where all have met."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        servers: int = bounded(0, least=0, example=2)
        """Parts that the parameters are cut into, each served by one rank; 0: one per host. An update counts by its
        rank's share of a step's samples; with --lr-scaling linear each has the full --lr, as in Downpour SGD"""

    backend = "servers"
    local = True
    remembers = True
    rung = 2
    bound = "the momentum of each part is with the rank that serves it"

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        super().__init__(world, shapes, config, settings, reducer)
        self._every = config.checkpoint_steps
        self._server: Server | None = None

        def serve(part: slice) -> Server:
            self._server = Server(part, config)
            return self._server

        if not self._servers.serve(settings.servers, elements(shapes), serve):
            world.may_die()
        self._weights = np.empty(elements(shapes), np.float32)
        self._steps, self._drifted = 0, 0
        self._tail, self._sent = np.zeros(1), 0

    @property
    def _servers(self) -> ServerCommunicator:
        return cast(ServerCommunicator, self._world)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        between = layout.hosts if layout.hosts > 1 else layout.ranks
        sent = 2 * 4 * elements(shapes) * (layout.ranks / between) * (between - 1) / between
        return Cost(sent_bytes=sent, rounds=2 * (between > 1), behind="other ranks' steps")

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if config.optimizer != "sgd":
            raise Failure(
                f"--optimizer {config.optimizer}: its servers make SGD steps; add --optimizer sgd and an --lr for it, "
                "or choose another strategy",
                exits.BAD_CONFIG,
            )

    @property
    def in_sync(self) -> bool:
        return self._drifted == 0

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        if self._server and not self._server.begun.is_set():
            self._server.begin(replica.weights())
        vector, (samples, all_samples) = replica.vector(), replica.share()
        tail, self._steps, self._drifted = vector[self._size :], self._steps + 1, self._drifted + 1
        self._tail = self._tail + tail
        loss = float(tail[0] / samples)
        numbers = np.array([lr, samples / all_samples, self._steps, tail[-1]], np.float64)
        with clock.span("communication"):
            answers = self._servers.ask(numbers, vector[: self._size], self._weights)
        with clock.span("compute"):
            replica.set_weights(self._weights)
        late = answers[:, 0]
        notes = {"staleness": float(late.mean()), "staleness_max": int(late.max())}
        due = bool(self._every and self._steps % self._every == 0) or self._steps == answers[0, 1]
        if due or self._world.size == 1:
            return self._meet(replica, clock, loss, notes)
        return Exchanged(loss=loss, sent_bytes=self._sent_now(), notes=notes)

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        return self._meet(replica, clock, 0.0, {}) if self._drifted else Exchanged()

    def _meet(self, replica: Vectors, clock: Clock, loss: float, notes: dict[str, float]) -> Exchanged:
        """When all have pushed, all take the same weights."""
        with clock.span("communication"):
            tail = self._world.sum(self._tail, "async-ps.totals")
            if self._server:
                self._server.met()
            if self._world.size > 1:
                self._servers.ask(np.zeros(NUMBERS), None, self._weights)
                self._world.gather("have them")  # nobody pushes before
        with clock.span("compute"):
            replica.set_weights(self._weights)
        self._tail, self._drifted = np.zeros(1), 0
        return dataclasses.replace(Exchanged.of(tail, self._sent_now()), loss=loss, notes=notes)

    def _sent_now(self) -> int:
        """By this rank, its server's answers included, since the last call."""
        before, self._sent = self._sent, self._servers.sent_bytes
        return self._sent - before

    def state(self) -> dict[str, np.ndarray]:
        """A checkpoint is made only when all ranks are in sync, so a server's weights are the replica's."""
        state = {"steps": np.array(self._steps)}
        if self._server:
            state |= {"part": np.array([self._server.part.start, self._server.part.stop])}
            state |= {"velocity": self._server.velocity}
        return state

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._steps = int(state["steps"])
        if not self._server:
            return
        part = self._server.part
        if state.get("part", np.empty(0)).tolist() != [part.start, part.stop]:
            raise Failure(
                f"the checkpoint does not have the momentum of parameters {part.start} to {part.stop} on rank "
                f"{self._world.rank}: start on as many hosts as it was made on, with as many ranks on each",
                exits.BAD_CONFIG,
            )
        self._server.velocity[:] = state["velocity"]

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return states[self._world.rank]
