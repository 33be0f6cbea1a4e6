"""The CNN of `solar.py` in TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.models.layers_tf import Held, Scope, dropped
from hvdtrain.models.mlp_tf import forecast_error
from hvdtrain.models.solar import CHANNELS, POOL, CNNSpec, parameters, sides


class CNNTF(Held):
    """The network of `spec`: see `layers_tf.Held`."""

    def __init__(
        self, spec: CNNSpec, compute_dtype: tf.DType = tf.float32, scope: Scope = None, stage: range | None = None
    ) -> None:
        """`stage`: only these layers (`solar.layers`)."""
        super().__init__(parameters(spec, stage), compute_dtype, scope)
        self.spec = spec
        layers = [self._convolved, self._first, self._second]
        self._layers = [layers[number] for number in stage or range(len(layers))]

    def __call__(
        self, maps: tf.Tensor, targets: tf.Tensor = None, key: tf.Tensor = None, training: bool = False
    ) -> tf.Tensor:
        """(N, 1) float32 of maps (N, side, side); for a stage, its output for the previous stage's output. In
        `training` dropout is a function of the key (2,) int64."""
        x, drawn = tf.cast(maps, self.compute_dtype), tf.ensure_shape(key, (2,)) if training else None
        for layer in self._layers:
            x = layer(x, drawn)
        return tf.cast(x, tf.float32)

    def _convolved(self, maps: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
        x = maps[..., tf.newaxis]
        for layer in ("conv1", "conv2"):
            x = tf.nn.conv2d(x, self._array(f"{layer}.weight"), 1, "VALID")
            x = tf.nn.relu(tf.nn.bias_add(x, self._array(f"{layer}.bias")))
        return tf.reshape(tf.nn.max_pool2d(x, POOL, POOL, "VALID"), (-1, CHANNELS[-1] * sides(self.spec)[2] ** 2))

    def _first(self, x: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
        return tf.nn.relu(self._linear("dense1", dropped(x, self.spec.dropout[0], key)))

    def _second(self, x: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
        return self._linear("dense2", dropped(x, self.spec.dropout[1], None if key is None else key + 1))

    def loss(
        self, maps: tf.Tensor, targets: tf.Tensor, key: tf.Tensor, training: bool
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The sum of losses, and the metric's sums."""
        return forecast_error(self(maps, targets, key, training), targets)
