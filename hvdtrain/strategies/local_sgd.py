"""Ranks train by themselves for some steps, then average what became of their weights.

For --every H steps each rank updates its own weights by its own gradients and sends nothing. Then the ranks exchange
the change of their weights since the last exchange by the reducer of --inner, weighted by the samples each has seen,
and all go on from the mean: a step sends 1/H of what the reducer sends. H = 1 is parameter averaging per batch, and
with plain SGD the same as summing gradients. Momentum stays each rank's own.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", 2017; Stich, "Local SGD
converges fast and communicates little", 2019. --local-start exchanges gradients in each of the first steps, when
weights change fastest (post-local SGD: Lin et al., 2020). --outer-lr and --outer-momentum take the mean change for a
gradient and make Nesterov steps with it (DiLoCo: Douillard et al., 2023). An inner reducer that compresses adds what it
left out to the next change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.config import TrainConfig
from hvdtrain.strategies.payload import Layout, Shape
from hvdtrain.strategies.reducer import Reducer
from hvdtrain.strategies.replicas import TOTALS, Exchanged, Vectors
from hvdtrain.strategies.synchronous import reduce
from hvdtrain.timing import Clock
from hvdtrain.world import Carrier, World


class LocalSGD:
    """See `strategies.Strategy`."""

    carrier: Carrier = "streams"
    in_backward = False
    local = True

    def __init__(self, world: World, shapes: Sequence[Shape], config: TrainConfig, reducer: Reducer | None) -> None:
        assert reducer is not None
        self._world, self._reducer, self._every, self._start = world, reducer, config.every, config.local_start
        self._outer_lr, self._outer_momentum = config.outer_lr, config.outer_momentum
        self._steps = 0  # of the whole run
        self._drifted = 0  # since the last exchange
        self._samples, self._all_samples, self._totals = 0, 0, np.zeros(TOTALS)
        self._anchor: np.ndarray | None = None  # the weights after the last exchange
        self._velocity = np.zeros(0, np.float32)

    @staticmethod
    def bytes_per_step(
        shapes: Sequence[Shape], layout: Layout, config: TrainConfig, reducer: type[Reducer] | None
    ) -> float:
        assert reducer is not None
        return reducer.bytes_per_host(shapes, layout.hosts, config) / config.every

    @property
    def level(self) -> bool:
        return self._drifted == 0

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        vector, (samples, all_samples) = replica.vector(), replica.share()
        loss, self._steps = float(vector[-TOTALS] / samples), self._steps + 1
        if self._steps <= self._start:
            return self._together(replica, vector, samples / all_samples, lr, clock)
        with clock.span("compute"):
            if self._anchor is None or not self._drifted:
                self._anchor = replica.weights().copy()
            self._totals += vector[-TOTALS:]
            replica.apply(lr)
        self._drifted, self._samples = self._drifted + 1, self._samples + samples
        self._all_samples += all_samples
        if self._drifted < self._every:
            return Exchanged(loss=loss)
        return self._average(replica, clock, loss)

    def settle(self, replica: Vectors, clock: Clock) -> Exchanged:
        return self._average(replica, clock, 0.0) if self._drifted else Exchanged()

    def _together(self, replica: Vectors, vector: np.ndarray, share: float, lr: float, clock: Clock) -> Exchanged:
        """A step of summed gradients."""
        with clock.span("communication"):
            vector[:-TOTALS] *= np.float32(share)
            sent = reduce(self._world, self._reducer, vector)
        with clock.span("compute"):
            replica.apply(lr)
        totals = vector[-TOTALS:].astype(np.float64)
        return Exchanged(totals=totals, loss=totals[0] / totals[2], sent_bytes=sent)

    def _average(self, replica: Vectors, clock: Clock, loss: float) -> Exchanged:
        """Makes the weights of all ranks the mean of theirs, or an outer step towards it."""
        assert self._anchor is not None
        with clock.span("compute"):
            change = np.empty(self._anchor.size + TOTALS, np.float32)
            np.subtract(replica.weights(), self._anchor, out=change[:-TOTALS])
            change[:-TOTALS] *= np.float32(self._samples / self._all_samples)
            change[-TOTALS:] = self._totals
        with clock.span("communication"):
            sent = reduce(self._world, self._reducer, change)
        with clock.span("compute"):
            mean = change[:-TOTALS]
            if self._outer_momentum:
                if not self._velocity.size:
                    self._velocity = np.zeros_like(mean)
                self._velocity *= np.float32(self._outer_momentum)
                self._velocity += mean
                mean += np.float32(self._outer_momentum) * self._velocity
            self._anchor += np.float32(self._outer_lr) * mean
            replica.set_weights(self._anchor)
        self._drifted = self._samples = self._all_samples = 0
        self._totals[:] = 0
        return Exchanged(totals=change[-TOTALS:].astype(np.float64), loss=loss, sent_bytes=sent)

    def state(self) -> dict[str, np.ndarray]:
        """Only asked for when level, so the anchor is the weights."""
        inner = {f"inner.{name}": array for name, array in self._reducer.state().items()}
        return {"steps": np.array(self._steps), "velocity": self._velocity, **inner}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._steps, self._velocity = int(state["steps"]), state["velocity"].copy()
        self._reducer.load({name.removeprefix("inner."): a for name, a in state.items() if name.startswith("inner.")})
