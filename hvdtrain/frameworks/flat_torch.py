"""Gradients, and weights, of PyTorch parameters as one vector each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch


class FlatGradients:
    """One float32 vector for the gradients of all parameters, followed by a tail of a few numbers.

    On a GPU the vector has a copy in pinned host memory, which `vector` and `piece` update. On a CPU `memory` is the
    vector itself.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], tail: int, device: torch.device) -> None:
        self.parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.borders = [0, *itertools.accumulate(self._sizes)]
        """The position of each gradient in the vector, and the end of the last one"""
        self.size = self.borders[-1]
        self._whole = torch.zeros(self.size + tail, dtype=torch.float32, device=device)
        on_cpu = device.type == "cpu"
        self._host = self._whole if on_cpu else torch.zeros_like(self._whole, device="cpu", pin_memory=True)
        self._host_is_newer = False
        self.memory: np.ndarray = self._host.numpy()
        """Gradients and tail in host memory"""
        self.gradients = self._whole[: self.size]
        self.tail = self._whole[self.size :]
        self.views = [view.data for view in self.split(self._whole)]
        """The gradient of each parameter, in its shape. `.data` gives each its own version counter"""

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Views of a vector in the shapes of the parameters."""
        pieces = vector[: self.size].split(self._sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def set_tail(self, tail: torch.Tensor) -> None:
        self.tail.copy_(tail)

    def vector(self, tail: torch.Tensor) -> np.ndarray:
        """Sets the tail and returns gradients and tail in host memory. Waits for the GPU."""
        self.set_tail(tail)
        if self._host is not self._whole:
            self._host.copy_(self._whole)
            self._host_is_newer = True
        return self.memory

    def piece(self, begin: int, end: int | None) -> Callable[[], None] | None:
        """Starts to copy the numbers from `begin` to `end` to host memory.

        Returns a function that waits for the copy, or None if the numbers are in host memory already.
        """
        if self._host is self._whole:
            return None
        self._host[begin:end].copy_(self._whole[begin:end], non_blocking=True)
        self._host_is_newer = True
        copied = torch.cuda.Event()
        copied.record()
        return copied.synchronize

    def take_gradients(self) -> None:
        """Copies the vector back to the GPU, if host memory has been updated since the last time."""
        if self._host_is_newer:
            self._whole.copy_(self._host, non_blocking=True)
            self._host_is_newer = False


class Flat(FlatGradients):
    """Also holds the weights as one vector. Parameters and their gradients become views, so exchanges copy nothing."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], tail: int, device: torch.device) -> None:
        super().__init__(parameters, tail, device)
        self.weights = torch.empty(self.size, dtype=torch.float32, device=device)
        for parameter, weight, gradient in zip(self.parameters, self.split(self.weights), self.views, strict=True):
            weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, gradient


class Average:
    """An exponential moving average of weights, which are one vector (`Flat.weights`) or the parameters themselves."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = [each.detach() for each in weights]
        self.arrays = [each.clone() for each in self._weights]

    def restart(self) -> None:
        """Sets the average to the weights."""
        torch._foreach_copy_(self.arrays, self._weights)

    def update(self, decay: float, weights: np.ndarray | None) -> None:
        """See `frameworks.Replica.average`; `weights` only if the weights are one vector."""
        given = [] if weights is None else [torch.from_numpy(weights).to(self.arrays[0].device)]
        torch._foreach_lerp_(self.arrays, given or self._weights, 1 - decay)

    def swap(self) -> None:
        """Exchanges the values of weights and average."""
        for weights, average in zip(self._weights, self.arrays, strict=True):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
