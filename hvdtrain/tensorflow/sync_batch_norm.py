"""Batch normalisation over the batches of all ranks, for Keras 3. Horovod's layer requires Keras 2."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow import api as horovod


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Computes mean and variance over the batches of all ranks, which must have equal sizes, in training.

    The gradient includes them. Raises ValueError for fused=True, which Keras 3 does not support.
    """

    def __init__(self, fused: bool = False, **named: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization: Keras 3 does not support fused=; hint: leave it out")
        super().__init__(**named)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if horovod.size() == 1:
            return mean, variance
        local = tf.stack([mean, variance + mean**2])
        mean, square = tf.unstack(horovod.allreduce(local, op=horovod.Average, name=f"{self.name}.moments"))
        return mean, square - mean**2
