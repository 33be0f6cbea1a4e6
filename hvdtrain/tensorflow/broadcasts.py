"""`hvd.broadcast_variables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.horovod_api import job
from hvdtrain.tensorflow import api as horovod
from hvdtrain.tensorflow import operations
from hvdtrain.tensorflow.api import global_process_set
from hvdtrain.tensorflow.step import tensor


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Broadcast TensorFlow's or Keras' variables from one rank. Collective.

    The TCP backend sends only a checksum if all ranks hold the same bytes, for example because they used the same seed.
    """
    plain = [tensor(variable) for variable in variables]
    eagerly = tf.executing_eagerly()
    if job.is_connected() and eagerly:
        return operations.broadcast_variables(plain, root_rank, process_set)
    if inplace or not eagerly:
        return horovod.broadcast_variables(plain, root_rank, process_set, inplace)

    @tf.function(autograph=False)
    def broadcast() -> None:  # Horovod uses names, which differ for a model that Keras 3 has loaded
        for index, variable in enumerate(plain):
            name = f"broadcast_variables.{index}"
            variable.assign(horovod.broadcast(variable, root_rank, name=name, process_set=process_set))

    return broadcast()
