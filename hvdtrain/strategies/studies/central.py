"""A synchronous parameter server: rank 0 holds the weights, sums all gradients, updates, and returns the weights.

In every step each rank sends its gradients to rank 0. Rank 0 waits for all of them, adds them up in rank order, updates
with the run's optimizer, and sends the new weights to each rank. Training equals training with `allreduce`, up to the
order of additions, and only rank 0 has the optimizer's state. Rank 0's link is the bottleneck: p - 1 ranks send 4 bytes
per parameter to it, and it sends as many to each. In an all-reduce no host sends more than twice the parameters,
whatever p is. The ranks of a host do not add up first. martin2019 measured this as TensorFlow's central storage, where
one device keeps the variables of several GPUs.

Li et al., "Scaling distributed machine learning with the parameter server", 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Phase, Shape, elements
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.strategies.studies.servers import NUMBERS, ServerCommunicator, Star
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Central(Strategy):
    """The weights are equal on all ranks after each step. Its only state is rank 0's optimizer."""

    capabilities = Capabilities(
        backend="servers", own_optimizer_state=True, reshard_refusal="the optimizer's state is on rank 0"
    )
    _centre: Centre | None = None
    _answer = np.empty(0, np.float32)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        """The bytes that rank 0's host sends, which sends most."""
        if layout.ranks == 1:
            return Cost()
        others = layout.ranks - (layout.ranks / layout.hosts if layout.hosts > 1 else 1)
        peers = max(1, layout.hosts - 1)
        nbytes = 4 * elements(shapes) * others / peers
        gather = Phase(bytes_per_peer=0, peers=peers, hops=1, received_per_peer=nbytes)
        answer = Phase(bytes_per_peer=nbytes, peers=peers, hops=1, received_per_peer=0)
        return Cost(phases=(gather, answer))

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if config.precision == "fp16":
            raise Failure(
                "--precision fp16: only rank 0, which updates, knows its loss scale; hint: --precision bf16",
                exits.BAD_CONFIG,
            )

    @property
    def _servers(self) -> ServerCommunicator:
        return cast(ServerCommunicator, self._world)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector = replica.vector()
        if not self._answer.size:
            self._begin(vector)
        with clock.span("communication"):
            if self._centre:
                for gradients in self._centre.gathered(vector)[1:]:
                    vector += gradients
            else:
                self._servers.ask(np.zeros(NUMBERS), vector, self._answer)
        with clock.span("compute"):
            if self._centre:
                replica.apply(lr)
                self._answer[: self._size] = replica.weights()
                self._answer[self._size :] = vector[self._size :]
                self._centre.answer_all(self._answer)
            else:
                replica.set_weights(self._answer[: self._size])
        return Exchanged.of(self._answer[self._size :], vector.nbytes * self._messages())

    def _messages(self) -> int:
        """Return how many messages this rank sends to other hosts in a step; rank 0's threads may still be sending."""
        return self._servers.count_remote(range(1, self._world.size) if self._centre else [0])

    def _begin(self, vector: np.ndarray) -> None:
        """Make rank 0 the server of all parameters. Collective."""
        self._answer = np.empty_like(vector)

        def serve(part: slice) -> Centre:
            self._centre = Centre(self._world.size)
            return self._centre

        self._servers.serve(1, vector.size, serve)


class Centre(Star):
    """A `servers.Store` in which gradients wait for rank 0, and the other ranks for its weights."""

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """Called in the thread of another rank."""
        assert gradients is not None
        np.copyto(weights, self.give(rank, gradients))
        return numbers
