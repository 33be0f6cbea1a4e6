"""Gradients, and weights, of PyTorch parameters as one vector each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import torch

from hvdtrain.comm import arrays
from hvdtrain.comm.arrays import Array
from hvdtrain.strategies import Strategy


class FlatGradients:
    """One float32 vector for the gradients of all parameters, followed by a tail of a few numbers.

    If the strategy takes no tensors, a vector on a GPU has a copy in pinned host memory, which `vector` and `piece`
    update.
    """

    memory: Array
    """Gradients and tail, for the strategy"""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], tail: int, device: torch.device) -> None:
        self.parameters = list(parameters)
        self._sizes = [parameter.numel() for parameter in self.parameters]
        self.borders = [0, *itertools.accumulate(self._sizes)]
        """The position of each gradient in the vector, and the end of the last one"""
        self.size = self.borders[-1]
        self._whole = torch.zeros(self.size + tail, dtype=torch.float32, device=device)
        self._copy: torch.Tensor | None = None
        self._copy_is_newer = False
        self.use(None)
        self.gradients = self._whole[: self.size]
        self.tail = self._whole[self.size :]
        self.views = [view.data for view in self.split(self._whole)]
        """The gradient of each parameter, in its shape. `.data` gives each its own version counter"""

    def use(self, strategy: Strategy | None) -> None:
        """Exchange by another strategy."""
        self._copy, tensors = None, strategy is not None and strategy.takes_tensors
        if self._whole.device.type == "cpu":
            self.memory = (
                self._whole if tensors and os.environ.get("HVDTRAIN_ARRAYS") == "torch" else self._whole.numpy()
            )
        elif tensors:
            self.memory = self._whole
        else:
            self._copy = torch.zeros_like(self._whole, device="cpu", pin_memory=True)
            self.memory = self._copy.numpy()

    def as_given(self, weights: torch.Tensor) -> Array:
        """Weights in the form that the strategy takes. This may be their own memory."""
        return arrays.to_host(weights) if arrays.is_numpy(self.memory) else weights

    def split(self, vector: torch.Tensor, arrays: range | None = None) -> list[torch.Tensor]:
        """Views of a vector in the shapes of the parameters, or of a part of it, which begins with these arrays."""
        some = slice(arrays.start, arrays.stop) if arrays else slice(None)
        pieces = vector[: sum(self._sizes[some])].split(self._sizes[some])
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters[some], strict=True)]

    def span(self, arrays: range | None = None) -> slice:
        """The position of some arrays, or of all, in the vector."""
        return slice(self.borders[arrays.start], self.borders[arrays.stop]) if arrays else slice(0, self.size)

    def set_tail(self, tail: torch.Tensor) -> None:
        self.tail.copy_(tail)

    def vector(self, tail: torch.Tensor) -> Array:
        """Sets the tail and returns gradients and tail, for the strategy."""
        self.set_tail(tail)
        if self._copy is not None:
            self._copy.copy_(self._whole)  # waits for the GPU
            self._copy_is_newer = True
        return self.memory

    def piece(self, begin: int, end: int | None) -> Callable[[], None] | None:
        """The strategy may read the numbers from `begin` to `end` once the returned function returns.

        None if it may read them at once.
        """
        if self._copy is None:
            return arrays.handover(self._whole)
        self._copy[begin:end].copy_(self._whole[begin:end], non_blocking=True)
        self._copy_is_newer = True
        copied = torch.cuda.Event()
        copied.record()
        return copied.synchronize

    def take_gradients(self) -> None:
        """Copies the vector back to the GPU, if the copy has been updated since the last time."""
        if self._copy is not None and self._copy_is_newer:
            self._whole.copy_(self._copy, non_blocking=True)
            self._copy_is_newer = False


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

    def update(self, decay: float, weights: Array | None) -> None:
        """See `frameworks.Replica.average`; `weights` only if the weights are one vector."""
        given = [] if weights is None else [torch.as_tensor(weights, device=self.arrays[0].device)]
        torch._foreach_lerp_(self.arrays, given or self._weights, 1 - decay)

    def swap(self) -> None:
        """Exchanges the values of weights and average."""
        for weights, average in zip(self._weights, self.arrays, strict=True):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
