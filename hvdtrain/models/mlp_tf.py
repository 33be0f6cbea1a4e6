"""The multilayer perceptron in TensorFlow: the layers of `mlp.py`, and its losses."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.models.layers import regression_terms
from hvdtrain.models.layers_tf import Held, Scope
from hvdtrain.models.mlp import MLPSpec, parameters


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Sum of the cross-entropies of logits (N, classes), and the sums of `metrics.Confusion`; labels (N,) int64."""
    classes = logits.shape[1]
    cells = tf.cast(labels * classes + tf.argmax(logits, 1), tf.int32)
    counts = tf.math.bincount(cells, minlength=classes**2, maxlength=classes**2)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_sum(losses), {"confusion": counts}


def forecast_error(outputs: tf.Tensor, targets: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Sum of the squared errors, and the sums of `hvdtrain.solar.Forecast`; outputs (N, 1), targets (N, 2): the reading
    to predict, and the last one of the window."""
    truth, last = tf.unstack(targets, 2, 1)
    terms = regression_terms(tf.cast(outputs[:, 0], tf.float64), tf.cast(truth, tf.float64))
    sums = {name: tf.reduce_sum(values) for name, values in terms.items()}
    persistence = tf.reduce_sum((tf.cast(last, tf.float64) - tf.cast(truth, tf.float64)) ** 2)
    return tf.reduce_sum((outputs[:, 0] - truth) ** 2), sums | {"persistence": persistence}


LOSSES = {"cross_entropy": cross_entropy, "forecast_error": forecast_error}


class MLPTF(Held):
    """The network of `spec`, trained by a loss of `LOSSES`. See `layers_tf.Held`."""

    def __init__(
        self,
        spec: MLPSpec,
        loss: str,
        compute_dtype: tf.DType = tf.float32,
        scope: Scope = None,
        stage: range | None = None,
    ) -> None:
        """`stage`: only these layers (`mlp.layers`)."""
        super().__init__(parameters(spec, stage), compute_dtype, scope)
        self._loss: Any = LOSSES[loss]
        self._numbers = list(stage or range(len(spec.sizes) - 1))

    def __call__(self, x: tf.Tensor, *_: tf.Tensor, training: bool = False) -> tf.Tensor:
        """(N, outputs) float32 of x (N, inputs); for a stage, its output for the previous stage's output."""
        x = tf.cast(x, self.compute_dtype)
        for number in self._numbers:
            x = self._linear(f"layers.{number}", tf.nn.relu(x) if number else x)
        return tf.cast(x, tf.float32)

    def loss(self, x: tf.Tensor, targets: tf.Tensor, training: bool) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The sum of losses, and the metric's sums."""
        return self._loss(self(x), targets)
