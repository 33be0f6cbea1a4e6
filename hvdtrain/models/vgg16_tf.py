"""VGG16's features in TensorFlow: follows the plan of `vgg16.py` with native operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.models.vgg16 import LAYERS, LINEAR, POOL, SCALE, SHIFT


class Vgg16TF:
    """The frozen network with these `arrays` (PyTorch's names and shapes): tensors, not variables, so it cannot be
    trained.

    `device` is a result of `frameworks.tensorflow.prepare`.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: str = "cpu") -> None:
        self.device = device
        # A rank sees only one GPU, which TensorFlow numbers 0 whatever its number in the machine.
        self._place = "/cpu:0" if device == "cpu" else "/gpu:0"
        channels = arrays[f"{[layer for layer in LAYERS if layer != POOL][-1]}.bias"].size
        with tf.device(self._place):
            self._arrays = {name: tf.constant(_turned(name, array, channels)) for name, array in arrays.items()}
        images = tf.TensorSpec([None, None, None, 3], tf.uint8)
        self._graph = tf.function(self._features, input_signature=[images], autograph=False)

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features (n, 4096) float32 of images (n, 224, 224, 3) uint8, RGB."""
        with tf.device(self._place):
            return np.asarray(self._graph(tf.constant(images)).numpy())

    def _features(self, images: tf.Tensor) -> tf.Tensor:
        x = tf.cast(images, tf.float32) * SCALE + SHIFT
        for layer in LAYERS:
            if layer == POOL:
                x = tf.nn.max_pool2d(x, 2, 2, "VALID")
            else:
                x = tf.nn.relu(tf.nn.conv2d(x, self._arrays[f"{layer}.weight"], 1, "SAME") + self._bias(layer))
        x = tf.reshape(x, (tf.shape(x)[0], self._arrays[f"{LINEAR[0]}.weight"].shape[0]))
        for layer in LINEAR:
            x = tf.nn.relu(tf.matmul(x, self._arrays[f"{layer}.weight"]) + self._bias(layer))
        return x

    def _bias(self, layer: str) -> tf.Tensor:
        return self._arrays[f"{layer}.bias"]


def _turned(name: str, array: NDArray[Any], channels: int) -> NDArray[Any]:
    """The array in TensorFlow's layout: kernels (height, width, in, out), linear (in, out).

    TensorFlow flattens images with channels last, so the inputs of the first linear layer are reordered.
    """
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    if array.ndim == 2 and name.startswith(f"{LINEAR[0]}."):
        outputs, inputs = array.shape
        return array.reshape(outputs, channels, inputs // channels).transpose(2, 1, 0).reshape(inputs, outputs)
    return array.T
