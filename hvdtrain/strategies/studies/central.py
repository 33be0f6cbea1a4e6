"""A synchronous parameter server: rank 0 holds the weights, sums all gradients, updates, and hands weights back.

In each step every rank sends its gradients to rank 0, which waits for all of them, adds them up in rank order, makes
the one update with the run's optimizer, and answers each with the new weights. So training is that of `allreduce`, up
to the order in which numbers are added, and only rank 0 has the optimizer's state. It loses by its link: of p ranks,
p - 1 send 4 bytes per parameter to one host, which sends as many back, where in an allreduce no host sends more than
twice the parameters, whatever p is. The ranks of a host do not add up first. martin2019 measured it as TensorFlow's
central storage, where one device keeps the variables of several GPUs.

Li et al., "Scaling distributed machine learning with the parameter server", 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.servers import NUMBERS, Star
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Central(Strategy):
    """Weights are the same on all ranks after each step. It keeps no state beside rank 0's optimizer."""

    carrier = "servers"
    own_optimizer = True
    bound = "the optimizer's state is with rank 0"
    rung = -1
    _centre: Centre | None = None
    _answer = np.empty(0, np.float32)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        """Of rank 0's host, which sends most."""
        elsewhere = layout.ranks - (layout.ranks / layout.hosts if layout.hosts > 1 else 1)
        return Cost(sent_bytes=4 * elements(shapes) * elsewhere, rounds=2 * (layout.ranks > 1))

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if config.precision == "fp16":
            told = "other ranks do not learn the loss scale of rank 0, which updates; take --precision bf16"
            raise Failure(f"--precision fp16: {told}", exits.BAD_CONFIG)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector = replica.vector()
        if not self._answer.size:
            self._begin(vector)
        with clock.span("communication"):
            if self._centre:
                for gradients in list(self._centre.gathered(vector).values())[1:]:
                    vector += gradients
            else:
                self._world.servers.ask(np.zeros(NUMBERS), vector, self._answer)
        with clock.span("compute"):
            if self._centre:
                replica.apply(lr)
                self._answer[: self._size] = replica.weights()
                self._answer[self._size :] = vector[self._size :]
                self._centre.tell(self._answer)
            else:
                replica.set_weights(self._answer[: self._size])
        return Exchanged.of(self._answer[self._size :], vector.nbytes * self._messages())

    def _messages(self) -> int:
        """That this rank sends to other hosts in a step; the threads of rank 0 may still be sending them."""
        return self._world.servers.elsewhere(range(1, self._world.size) if self._centre else [0])

    def _begin(self, vector: np.ndarray) -> None:
        """Collective."""
        self._answer = np.empty_like(vector)

        def serve(part: slice) -> Centre:
            self._centre = Centre(self._world.size)
            return self._centre

        self._world.servers.serve(1, vector.size, serve)


class Centre(Star):
    """A `collectives.servers.Store`: other ranks' gradients wait in it for rank 0, and they for its weights."""

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """In the thread of another rank."""
        assert gradients is not None
        np.copyto(weights, self.give(rank, gradients))
        return numbers
