"""What the models in TensorFlow are made of."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.models.layers import Shapes

Scope = contextlib.AbstractContextManager[Any] | None
"""Of a tf.distribute strategy that is to hold a model's trained variables"""


def turned(array: np.ndarray) -> np.ndarray:
    """A convolution's kernel from PyTorch's (out, in, h, w) to TensorFlow's (h, w, in, out); others as they are."""
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array


def turned_back(array: np.ndarray) -> np.ndarray:
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array


def variable(name: str, shape: tuple[int, ...], *, trainable: bool = True) -> tf.Variable:
    """Zeros for an array of this neutral shape: a kernel (out, in, height, width) is (height, width, in, out) here."""
    if len(shape) == 4:
        outputs, inputs, height, width = shape
        shape = (height, width, inputs, outputs)
    return tf.Variable(tf.zeros(shape), trainable=trainable, name=name)


class Held(tf.Module):
    """A module that holds `weights`, variables of these neutral names and shapes (but see `variable`): zeros until they
    are assigned. They are float32; `compute_dtype` is the type of activations and of the weights at use. What models
    return, and their losses, are always float32."""

    def __init__(self, parameters: Shapes, compute_dtype: tf.DType, scope: Scope) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        with scope or contextlib.nullcontext():
            self.weights = {name: variable(name, shape) for name, shape in parameters.items()}

    def _array(self, name: str) -> tf.Tensor:
        return tf.cast(self.weights[name], self.compute_dtype)

    def _linear(self, layer: str, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self._array(f"{layer}.weight"), transpose_b=True) + self._array(f"{layer}.bias")


def padded(x: tf.Tensor, count: int) -> tf.Tensor:
    """`count` zeros on each of the four sides of images (N, H, W, channels).

    With a stride, "SAME" would pad even sizes on one side only. The explicit paddings of `conv2d` say the same as this
    function, but on CPUs they leave the fast kernels: a training step of ResNet-34 then takes 4 to 6 times as long.
    """
    return tf.pad(x, [[0, 0], [count, count], [count, count], [0, 0]]) if count else x


def convolved(x: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """Images (N, H, W, in) through a square kernel (side, side, in, out) of odd side, with side // 2 zeros around.

    Where a single pixel comes out, it is a product of matrices: on a CPU the gradients of a convolution take ten times
    as long there (docs/LOG.md).
    """
    (height, width), side, padding = x.shape[1:3], kernel.shape[0], kernel.shape[0] // 2
    single = height is not None and width is not None and max(height, width) <= stride
    if single and not tf.config.get_visible_devices("GPU"):
        met = [min(side - padding, count) for count in (height, width)]  # what meets more than padding
        kernel = kernel[padding : padding + met[0], padding : padding + met[1]]
        pixels = tf.reshape(x[:, : met[0], : met[1]], (-1, math.prod(kernel.shape[:3])))
        return tf.matmul(pixels, tf.reshape(kernel, (-1, kernel.shape[3])))[:, None, None]
    if side == 1:  # a strided one writes outside its memory in oneDNN if it has few channels: see layers_torch
        x, stride = x[:, ::stride, ::stride], 1
    if stride == 1:
        return tf.nn.conv2d(x, kernel, 1, "SAME")
    return tf.nn.conv2d(padded(x, padding), kernel, stride, "VALID")


def dropped(x: tf.Tensor, share: float, key: tf.Tensor | None) -> tf.Tensor:
    """x without a share of its values, and the others larger, so that the mean stays; x itself without a key (2,).
    Equal keys make equal masks, at any precision."""
    if key is None or not share:
        return x
    drawn = tf.random.stateless_uniform(tf.shape(x), key, alg="philox")
    return tf.where(drawn >= share, x / (1 - share), tf.zeros((), x.dtype))
