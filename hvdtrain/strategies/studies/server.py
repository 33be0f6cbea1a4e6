"""One part of the parameters, updated by SGD the moment gradients for it arrive: what `async-ps` is made of."""

from __future__ import annotations

import threading

import numpy as np

from hvdtrain.config.options import TrainConfig


class Server:
    """One part of the parameters; a `comm.backends.servers.Store`.

    A question's numbers: learning rate, share, step (from 1), whether its rank was asked to stop. An answer's: updates
    by others since that rank's last answer, and the step after which all meet, 0 if nobody was asked to stop.
    """

    def __init__(self, part: slice, config: TrainConfig) -> None:
        self.part, self._momentum, self._decay = part, config.momentum, config.weight_decay
        self._lock, self.begun = threading.Lock(), threading.Event()
        self.velocity, self._scratch = (np.zeros(part.stop - part.start, np.float32) for _ in range(2))
        self._weights = self._scratch
        self._updates = 0
        self._known: dict[int, int] = {}  # updates in each rank's last answer
        self._steps: dict[int, int] = {}
        self._meet_after = 0

    def begin(self, weights: np.ndarray) -> None:
        self._weights = weights[self.part].copy()
        self.begun.set()

    def met(self) -> None:
        self._meet_after = 0

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        self.begun.wait()
        with self._lock:
            late = self._updates - self._known.get(rank, 0)
            if gradients is not None:
                lr, share, step, stop = numbers
                self._update(np.float32(lr), np.float32(share), gradients)
                self._updates, self._steps[rank] = self._updates + 1, int(step)
                if stop and not self._meet_after:  # nobody is past that step, and all hear of it by then
                    self._meet_after = max(self._steps.values()) + 1
            self._known[rank] = self._updates
            np.copyto(weights, self._weights)
            return np.array([late, self._meet_after, 0, 0], np.float64)

    def _update(self, lr: np.float32, share: np.float32, gradients: np.ndarray) -> None:
        if self._decay:
            gradients += np.multiply(self._weights, np.float32(self._decay), out=self._scratch)
        gradients *= share
        self.velocity *= np.float32(self._momentum)
        self.velocity += gradients
        self._weights -= np.multiply(self.velocity, lr, out=self._scratch)
