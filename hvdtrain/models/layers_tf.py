"""Building blocks of the models in TensorFlow."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.models.layers import Shapes

Scope = contextlib.AbstractContextManager[Any] | None
"""Scope of a tf.distribute strategy for a model's trained variables"""


def to_tensorflow(array: np.ndarray) -> np.ndarray:
    """Transposes a convolution kernel from PyTorch's (out, in, h, w) to TensorFlow's (h, w, in, out); others are
    unchanged."""
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array


def to_pytorch(array: np.ndarray) -> np.ndarray:
    """The inverse of `to_tensorflow`."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array


def variable(name: str, shape: tuple[int, ...], *, trainable: bool = True) -> tf.Variable:
    """A variable of zeros for an array of this PyTorch shape; a kernel (out, in, h, w) becomes (h, w, in, out)."""
    if len(shape) == 4:
        outputs, inputs, height, width = shape
        shape = (height, width, inputs, outputs)
    return tf.Variable(tf.zeros(shape), trainable=trainable, name=name)


class Held(tf.Module):
    """A module with variables `weights` of these names and PyTorch shapes (see `variable`), initially zero.

    They are float32. `compute_dtype` is the type of activations, and of weights when they are used. Outputs and losses
    of models are always float32.
    """

    def __init__(self, parameters: Shapes, compute_dtype: tf.DType | str, scope: Scope) -> None:
        super().__init__()
        self.compute_dtype = tf.as_dtype(compute_dtype)
        with scope or contextlib.nullcontext():
            self.weights = {name: variable(name, shape) for name, shape in parameters.items()}

    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """The outputs, float32, for inputs as in a batch's first array, in evaluation mode."""
        return np.asarray(self(tf.constant(inputs), training=False).numpy())

    def _array(self, name: str) -> tf.Tensor:
        return tf.cast(self.weights[name], self.compute_dtype)

    def _linear(self, layer: str, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self._array(f"{layer}.weight"), transpose_b=True) + self._array(f"{layer}.bias")


def padded(x: tf.Tensor, count: int) -> tf.Tensor:
    """Images (N, H, W, channels) with `count` zeros added on each of the four sides. With a stride, "SAME" pads even
    sizes on one side only. Explicit paddings in `conv2d` are equivalent to this function, but on CPUs they bypass the
    fast kernels: a training step of ResNet-34 then takes 4 to 6 times as long.
    """
    return tf.pad(x, [[0, 0], [count, count], [count, count], [0, 0]]) if count else x


def convolved(x: tf.Tensor, kernel: tf.Tensor, stride: int) -> tf.Tensor:
    """Convolves images (N, H, W, in) with a square kernel (side, side, in, out) of odd side, padded with side // 2
    zeros.

    A single output pixel is computed as a matrix product: on a CPU the gradients of such a convolution take ten times
    as long (docs/project/decisions.md).
    """
    (height, width), side, padding = x.shape[1:3], kernel.shape[0], kernel.shape[0] // 2
    single = height is not None and width is not None and max(height, width) <= stride
    if single and not tf.config.get_visible_devices("GPU"):
        used = [min(side - padding, count) for count in (height, width)]  # the kernel's part that covers the image
        kernel = kernel[padding : padding + used[0], padding : padding + used[1]]
        pixels = tf.reshape(x[:, : used[0], : used[1]], (-1, math.prod(kernel.shape[:3])))
        return tf.matmul(pixels, tf.reshape(kernel, (-1, kernel.shape[3])))[:, None, None]
    if side == 1:  # oneDNN's strided 1x1 convolution corrupts memory for few channels: see layers_torch
        x, stride = x[:, ::stride, ::stride], 1
    if stride == 1:
        return tf.nn.conv2d(x, kernel, 1, "SAME")
    return tf.nn.conv2d(padded(x, padding), kernel, stride, "VALID")


def dropped(x: tf.Tensor, share: float, key: tf.Tensor | None) -> tf.Tensor:
    """Dropout: sets a share of x to 0 and scales the rest, so that the mean stays. Returns x itself without a key (2,).
    The mask is a function of the key, at any precision."""
    if key is None or not share:
        return x
    random = tf.random.stateless_uniform(tf.shape(x), key, alg="philox")
    return tf.where(random >= share, x / (1 - share), tf.zeros((), x.dtype))
