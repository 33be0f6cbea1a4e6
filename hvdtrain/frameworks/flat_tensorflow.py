"""Gradients, and weights, of TensorFlow variables as one float32 vector each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

ALIGNMENT = 64
"""TensorFlow aborts the process if a tensor's memory does not start at a multiple of this many bytes"""


class FlatVariables:
    """Converts between variables and vectors that contain their arrays in order."""

    def __init__(self, variables: Iterable[tf.Variable]) -> None:
        self.variables = list(variables)
        self._shapes = [tuple(variable.shape) for variable in self.variables]
        self.borders = [0, *itertools.accumulate(map(math.prod, self._shapes))]
        """The position of each variable in a vector, and the end of the last one"""
        self.size = self.borders[-1]

    def split(self, vector: np.ndarray) -> list[np.ndarray]:
        """Return views of a vector in the shapes of the variables."""
        pieces = itertools.pairwise(self.borders)
        return [vector[begin:end].reshape(shape) for (begin, end), shape in zip(pieces, self._shapes, strict=True)]

    def split_tensor(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """Return a vector's pieces in the shapes and types of the variables."""
        pieces = tf.split(vector[: self.size], [end - begin for begin, end in itertools.pairwise(self.borders)])
        return [
            tf.cast(tf.reshape(piece, shape), variable.dtype)
            for piece, shape, variable in zip(pieces, self._shapes, self.variables, strict=True)
        ]

    def span(self, arrays: range | None = None) -> slice:
        """Return the position of some variables, or of all, in a vector."""
        return slice(self.borders[arrays.start], self.borders[arrays.stop]) if arrays else slice(0, self.size)

    def weights(self, arrays: range | None = None) -> np.ndarray:
        some = range(len(self.variables)) if arrays is None else arrays
        return concatenate([self.variables[index].read_value() for index in some])

    def set_weights(self, weights: np.ndarray, arrays: range | None = None) -> None:
        for index in range(len(self.variables)) if arrays is None else arrays:
            begin, shape = self.borders[index] - self.span(arrays).start, self._shapes[index]
            self.variables[index].assign(weights[begin : begin + math.prod(shape)].reshape(shape))


def concatenate(tensors: Sequence[Any], out: np.ndarray | None = None) -> np.ndarray:
    """Copy arrays, or eager tensors without running an operation, into one float32 vector."""
    flat = [np.asarray(memoryview(tensor)).reshape(-1) for tensor in tensors]
    return np.concatenate(flat, out=out) if out is not None else np.concatenate(flat, dtype=np.float32)


def aligned(size: int) -> np.ndarray:
    """Return uninitialised memory for `size` float32 numbers that a tensor can share."""
    memory = np.empty(4 * size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + 4 * size].view(np.float32)


def shared_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a tensor that shares the array's memory if it is aligned, otherwise a copy."""
    if array.size == 0 or array.ctypes.data % ALIGNMENT:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
