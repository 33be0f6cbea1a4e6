"""A script's run folder (see `hvdtrain.script.record`): each step that Keras' callbacks see, and each epoch's logs."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.script import job, record
from hvdtrain.strategies.payload import ring_bytes
from hvdtrain.tensorflow.operations import Operations
from hvdtrain.tensorflow.step import tensor

_begun: list[record.Recorder | None] = []
"""The process's recorder, once it was asked for"""


def step(optimizer: Any) -> None:
    """Records a step of a `DistributedOptimizer` that is done just now. Collective the first time."""
    exchange = optimizer._hvd_state.step
    variables = [tensor(variable) for variable in optimizer._trainable_variables]
    numbers = sum(int(variable.shape.num_elements()) for variable in variables)
    if not _begun:
        if exchange is None and isinstance(mpi_ops.MPI_LIB, Operations):
            return  # calls of Horovod's over streams: they are not counted
        recorder = job.recorder(
            exchange.exchange if exchange else None,
            exchange.world if exchange else None,
            parameters=numbers,
            device="gpu" if any("GPU" in variable.device for variable in variables) else "cpu",
            threads=tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1,
        )
        _begun.append(recorder)
    if _begun[0] is not None:
        waited_s, sent_bytes = exchange.spent() if exchange else (None, ring_bytes(4 * numbers, mpi_ops.size()))
        lr = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        _begun[0].step(lr=lr, exchange_s=waited_s, sent_bytes=sent_bytes)


def epoch(number: int, logs: dict[str, Any]) -> None:
    """Records an epoch. Keras' names without val_ are those of the training."""
    own = {name: value for name, value in logs.items() if name != "lr"}
    told = {name if name == "loss" or name.startswith("val_") else f"train_{name}": own[name] for name in own}
    record.log(epoch=number, **told)
