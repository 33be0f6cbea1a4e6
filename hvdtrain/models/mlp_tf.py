"""The multilayer perceptron in TensorFlow: the layers of `mlp.py`, and two losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.models.mlp import MLPSpec, parameters
from hvdtrain.models.own_tf import errors

Loss = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, dict[str, tf.Tensor]]]


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Sum of the cross-entropies of logits (N, classes), and what `measures.Confusion` adds up; labels (N,) int64."""
    classes = logits.shape[1]
    places = tf.cast(labels * classes + tf.argmax(logits, 1), tf.int32)
    counts = tf.math.bincount(places, minlength=classes**2, maxlength=classes**2)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_sum(losses), {"confusion": counts}


def squared_error(outputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Sum of the squared errors, and what `measures.Regression` adds up; outputs (N, 1), targets (N,) or (N, 1)."""
    sums = {name: tf.reduce_sum(each) for name, each in errors(outputs, targets).items()}
    return tf.reduce_sum((tf.reshape(outputs, tf.shape(targets)) - targets) ** 2), sums


class MLPTF(tf.Module):
    """The network of `spec`, trained by `loss`: `cross_entropy` or `squared_error`.

    `weights` maps the neutral names to variables in the neutral shapes, zeros until they are assigned. Variables are
    float32; `compute_dtype` is the type of activations and of the weights at use. Outputs and loss are float32.
    """

    def __init__(
        self,
        spec: MLPSpec,
        loss: Loss,
        compute_dtype: tf.DType = tf.float32,
        scope: AbstractContextManager[Any] | None = None,
        part: range | None = None,
    ) -> None:
        """`scope`: of a tf.distribute strategy that is to hold `weights`; `part`: these layers (`mlp.layers`) alone."""
        super().__init__()
        self.compute_dtype, self._loss = compute_dtype, loss
        self._first = part.start if part else 0
        shapes = parameters(spec, part)
        with scope or contextlib.nullcontext():
            self.weights = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()}

    def __call__(self, x: tf.Tensor, *_: tf.Tensor, training: bool = False) -> tf.Tensor:
        """(N, outputs) float32 of x (N, inputs); of a part, what its layers make of what those before made."""
        x = tf.cast(x, self.compute_dtype)
        arrays = [tf.cast(array, self.compute_dtype) for array in self.weights.values()]
        for number, (weight, bias) in enumerate(zip(arrays[::2], arrays[1::2], strict=True), start=self._first):
            x = tf.matmul(x if number == 0 else tf.nn.relu(x), weight, transpose_b=True) + bias
        return tf.cast(x, tf.float32)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """(N, outputs) float32 of x (N, inputs) float32."""
        return np.asarray(self(tf.constant(x)).numpy())

    def loss(self, x: tf.Tensor, targets: tf.Tensor, training: bool) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The sum of losses, and the measure's sums."""
        return self._loss(self(x), targets)
