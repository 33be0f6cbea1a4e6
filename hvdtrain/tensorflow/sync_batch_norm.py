"""Batch normalisation over the batches of all ranks, for Keras 3. Horovod's own is for Keras 2."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """While training, mean and variance are those of all ranks' batches, which have to be equally large.

    The gradient goes through them. Raises ValueError for fused=True, which Keras 3 does not have.
    """

    def __init__(self, fused: bool = False, **named: Any) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization: leave fused= out")
        super().__init__(**named)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if horovod.size() == 1:
            return mean, variance
        own = tf.stack([mean, variance + mean**2])
        mean, square = tf.unstack(horovod.allreduce(own, op=horovod.Average, name=f"{self.name}.moments"))
        return mean, square - mean**2
