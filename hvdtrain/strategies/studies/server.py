"""A parameter server for `async-ps`: one part of the parameters, updated by SGD whenever gradients arrive."""

from __future__ import annotations

import threading

import numpy as np

from hvdtrain.config.options import TrainConfig


class Server:
    """One part of the parameters, as a `servers.Store`.

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
