"""Downpour SGD: each rank sends its gradients to parameter servers at once and does not wait for other ranks.

The parameters are divided into `servers` contiguous parts (default: one per host). A thread inside one rank holds each
part with its momentum. Every rank is a worker: after backward it sends each part's gradient to its server, which
updates at once and answers with the current part. That takes one round trip, with 4 bytes per parameter in each
direction. On h hosts with r ranks each, a host sends 2r(h-1)/h of the parameters per step. That is r times as much as
`hierarchical` sends.

    v = momentum v + share (g + weight_decay p);  p -= lr v

g is the mean over the worker's own batch, and share is its part of the samples of all ranks in a step. So the updates
of p workers move the weights as far as one step of the other strategies at the same --lr. In Downpour each update has
the full rate, as with --lr-scaling linear. With one worker this is plain SGD. Between a worker's pull and its push
other workers have pushed, so its gradient is late by that number of updates, about p-1 with p equal workers
(`staleness` in the step's record). Late updates act like more momentum (Mitliagkas et al., "Asynchrony begets
momentum", 2016), so --momentum may have to be lower.

All ranks wait for the slowest in the first step, before an evaluation or a checkpoint, and when asked to stop. Then
they take the same weights.

Dean et al., "Large scale distributed deep networks", 2012.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Phase, Shape, elements
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.strategies.studies.servers import NUMBERS, ServerCommunicator
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class AsyncPS(Strategy):
    """A worker and, in some ranks, a server. The weights are equal after all ranks have synchronised."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        servers: int = bounded(0, least=0, example=2)
        """Parts of the parameters, each served by one rank; 0: one per host.

        An update is scaled by its rank's share of a step's samples. With --lr-scaling linear each update has the full
        --lr, as in Downpour SGD."""

    capabilities = Capabilities(
        backend="servers",
        local_updates=True,
        has_residual=True,
        reshard_refusal="the momentum of each part is on the rank that serves it",
    )

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        super().__init__(world, shapes, config, settings, reducer)
        self._every, self._clip_norm = config.checkpoint_steps, config.clip_norm
        self._server: Server | None = None

        def serve(part: slice) -> Server:
            self._server = Server(part, config)
            return self._server

        self._servers.serve(settings.servers, elements(shapes), serve)
        self._weights = np.empty(elements(shapes), np.float32)
        self._steps, self._drifted = 0, 0
        self._tail, self._sent = np.zeros(1), 0

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        between = layout.hosts if layout.hosts > 1 else layout.ranks
        if between == 1:
            return Cost()
        # Every rank sends its gradients of a part to that part's server, and gets the part back.
        phase = Phase(bytes_per_peer=4 * elements(shapes) * layout.ranks / between**2, peers=between - 1, hops=1)
        return Cost(phases=(phase, phase), independent=True)

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if config.optimizer != "sgd":
            raise Failure(
                f"--optimizer {config.optimizer}: its servers only make plain SGD steps; hint: --optimizer sgd with "
                "an --lr for it, or another strategy",
                exits.BAD_CONFIG,
            )

        if config.ema:
            raise Failure(
                f"--ema {config.ema:g}: ranks have the same weights only at the end of an epoch, so there is nothing "
                "to average; hint: another strategy",
                exits.BAD_CONFIG,
            )

    @property
    def _servers(self) -> ServerCommunicator:
        return cast(ServerCommunicator, self._world)

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
        if self._clip_norm and (norm := float(np.linalg.norm(vector[: self._size]))) > self._clip_norm:
            vector[: self._size] *= np.float32(self._clip_norm / norm)
        numbers = np.array([lr, samples / all_samples, self._steps, tail[-1]], np.float64)
        with clock.span("communication"):
            answers = self._servers.ask(numbers, vector[: self._size], self._weights)
        with clock.span("compute"):
            replica.set_weights(self._weights)
        late = answers[:, 0]
        notes = {"staleness": float(late.mean()), "staleness_max": int(late.max())}
        due = bool(self._every and self._steps % self._every == 0) or self._steps == answers[0, 1]
        if due or self._world.size == 1:
            return self._synchronize(replica, clock, loss, notes)
        return Exchanged(loss=loss, sent_bytes=self._sent_now(), notes=notes)

    def synchronize(self, replica: Vectors, clock: Clock) -> Exchanged:
        return self._synchronize(replica, clock, 0.0, {}) if self._drifted else Exchanged()

    def _synchronize(self, replica: Vectors, clock: Clock, loss: float, notes: dict[str, float]) -> Exchanged:
        """Wait until all ranks have pushed, then give every rank the same weights."""
        with clock.span("communication"):
            tail = self._world.sum(self._tail, "async-ps.totals")
            if self._server:
                self._server.synchronized()
            if self._world.size > 1:
                self._servers.ask(np.zeros(NUMBERS), None, self._weights)
                self._world.gather("pulled")  # no rank pushes before all have pulled
        with clock.span("compute"):
            replica.set_weights(self._weights)
        self._tail, self._drifted = np.zeros(1), 0
        return dataclasses.replace(Exchanged.of(tail, self._sent_now()), loss=loss, notes=notes)

    def _sent_now(self) -> int:
        """Return the bytes that this rank and its server have sent since the last call."""
        before, self._sent = self._sent, self._servers.sent_bytes
        return self._sent - before

    def state(self, *, newcomer: bool = False) -> dict[str, np.ndarray]:
        """Checkpoints are made only when all ranks are in sync, so a server's weights equal the replica's."""
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
                f"checkpoint: no momentum of parameters {part.start} to {part.stop} for rank {self._world.rank}; hint: "
                "resume on the same number of hosts with the same number of ranks on each",
                exits.BAD_CONFIG,
            )
        self._server.velocity[:] = state["velocity"]

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return states[self._world.rank]


class Server:
    """One part of the parameters, updated by SGD whenever gradients arrive: a `servers.Store`.

    The numbers of a request are the learning rate, the rank's share of the samples, the step (from 1), and whether the
    rank was asked to stop. Those of an answer are the updates by other ranks since the rank's last answer, and the step
    after which all ranks synchronise (0 if no rank was asked to stop).
    """

    def __init__(self, part: slice, config: TrainConfig) -> None:
        self.part, self._momentum, self._decay = part, config.momentum, config.weight_decay
        self._lock, self.begun = threading.Lock(), threading.Event()
        self.velocity, self._scratch = (np.zeros(part.stop - part.start, np.float32) for _ in range(2))
        self._weights = self._scratch
        self._updates = 0
        self._known: dict[int, int] = {}  # updates that each rank's last answer included
        self._steps: dict[int, int] = {}
        self._sync_after = 0

    def begin(self, weights: np.ndarray) -> None:
        self._weights = weights[self.part].copy()
        self.begun.set()

    def synchronized(self) -> None:
        self._sync_after = 0

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        self.begun.wait()
        with self._lock:
            late = self._updates - self._known.get(rank, 0)
            if gradients is not None:
                lr, share, step, stop = numbers
                self._update(np.float32(lr), np.float32(share), gradients)
                self._updates, self._steps[rank] = self._updates + 1, int(step)
                if stop and not self._sync_after:  # no rank is past that step, and all learn of it before
                    self._sync_after = max(self._steps.values()) + 1
            self._known[rank] = self._updates
            np.copyto(weights, self._weights)
            return np.array([late, self._sync_after, 0, 0], np.float64)

    def _update(self, lr: np.float32, share: np.float32, gradients: np.ndarray) -> None:
        if self._decay:
            gradients += np.multiply(self._weights, np.float32(self._decay), out=self._scratch)
        gradients *= share
        self.velocity *= np.float32(self._momentum)
        self.velocity += gradients
        self._weights -= np.multiply(self.velocity, lr, out=self._scratch)
