"""Dropout from a step's key, in TensorFlow: equal keys, equal masks, at any precision."""

from __future__ import annotations

import tensorflow as tf


def dropped(x: tf.Tensor, share: float, key: tf.Tensor | None) -> tf.Tensor:
    """x without a share of its values, and the others larger, so that the mean stays; x itself without a key (2,)."""
    if key is None or not share:
        return x
    drawn = tf.random.stateless_uniform(tf.shape(x), key, alg="philox")
    return tf.where(drawn >= share, x / (1 - share), tf.zeros((), x.dtype))
