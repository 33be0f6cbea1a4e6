"""The CNN of `solar.py` in TensorFlow, and the loss of all networks there."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from hvdtrain.models.dropout_tf import dropped
from hvdtrain.models.mlp_tf import squared_error
from hvdtrain.models.solar import POOL, CNNSpec, parameters


def forecast_error(outputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Sum of the squared errors, and what `hvdtrain.solar.Forecast` adds up; outputs (N, 1), targets (N, 2): the
    reading that is to be found, and the last one that was seen."""
    truth, last = tf.unstack(targets, 2, 1)
    loss, sums = squared_error(outputs, truth)
    persistence = tf.reduce_sum((tf.cast(last, tf.float64) - tf.cast(truth, tf.float64)) ** 2)
    return loss, sums | {"persistence": persistence}


class CNNTF(tf.Module):
    """The network of `spec`, whose arrays hold zeros until they are assigned.

    `weights` maps the neutral names to variables in the neutral shapes, but for convolutions, which TensorFlow keeps as
    (height, width, in, out). Variables are float32; `compute_dtype` is the type of activations and of the weights at
    use. Outputs and loss are float32.
    """

    def __init__(
        self,
        spec: CNNSpec,
        compute_dtype: tf.DType = tf.float32,
        scope: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`scope`: of a tf.distribute strategy that is to hold `weights`."""
        super().__init__()
        self.spec, self.compute_dtype = spec, compute_dtype
        with scope or contextlib.nullcontext():
            self.weights = {name: _variable(name, shape) for name, shape in parameters(spec).items()}

    def __call__(self, maps: tf.Tensor, key: tf.Tensor | None = None) -> tf.Tensor:
        """(N, 1) float32 of maps (N, side, side). With a key (2,) int64 dropout draws from it: equal keys, equal
        masks; without one nothing is dropped."""
        keys = (None, None) if key is None else (tf.ensure_shape(key, (2,)), key + 1)
        before, behind = self.spec.dropout
        x = tf.cast(maps[..., tf.newaxis], self.compute_dtype)
        for layer in ("conv1", "conv2"):
            x = tf.nn.conv2d(x, self._array(f"{layer}.weight"), 1, "VALID")
            x = tf.nn.relu(tf.nn.bias_add(x, self._array(f"{layer}.bias")))
        x = tf.nn.max_pool2d(x, POOL, POOL, "VALID")
        x = dropped(tf.reshape(x, (-1, self.weights["dense1.weight"].shape[1])), before, keys[0])
        x = dropped(tf.nn.relu(self._linear("dense1", x)), behind, keys[1])
        return tf.cast(self._linear("dense2", x), tf.float32)

    def loss(
        self, maps: tf.Tensor, targets: tf.Tensor, key: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The sum of losses, and the measure's sums."""
        return forecast_error(self(maps, key if training else None), targets)

    def _linear(self, layer: str, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self._array(f"{layer}.weight"), transpose_b=True) + self._array(f"{layer}.bias")

    def _array(self, name: str) -> tf.Tensor:
        return tf.cast(self.weights[name], self.compute_dtype)


def _variable(name: str, shape: tuple[int, ...]) -> tf.Variable:
    if len(shape) == 4:
        outputs, inputs, height, width = shape
        shape = (height, width, inputs, outputs)
    return tf.Variable(tf.zeros(shape), name=name)
