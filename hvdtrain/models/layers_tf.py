"""What the models in TensorFlow are made of."""

from __future__ import annotations

import tensorflow as tf


def variable(name: str, shape: tuple[int, ...], *, trainable: bool = True) -> tf.Variable:
    """Zeros for an array of this neutral shape: a kernel (out, in, height, width) is (height, width, in, out) here."""
    if len(shape) == 4:
        outputs, inputs, height, width = shape
        shape = (height, width, inputs, outputs)
    return tf.Variable(tf.zeros(shape), trainable=trainable, name=name)


def dropped(x: tf.Tensor, share: float, key: tf.Tensor | None) -> tf.Tensor:
    """x without a share of its values, and the others larger, so that the mean stays; x itself without a key (2,).
    Equal keys make equal masks, at any precision."""
    if key is None or not share:
        return x
    drawn = tf.random.stateless_uniform(tf.shape(x), key, alg="philox")
    return tf.where(drawn >= share, x / (1 - share), tf.zeros((), x.dtype))
