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

    def weights(self) -> np.ndarray:
        return concatenate([variable.read_value() for variable in self.variables])

    def set_weights(self, weights: np.ndarray) -> None:
        for variable, piece in zip(self.variables, self.split(weights), strict=True):
            variable.assign(piece)


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
