"""Drop-in module for `import horovod.tensorflow as hvd`, with Horovod's names and hvdtrain's strategies.

Horovod's functions are used unchanged. `init` decides whether Horovod or, with HVDTRAIN_STRATEGY, hvdtrain's TCP
backend carries their calls (see `hvdtrain.horovod_api.job`). Without Horovod, `standalone` has the same functions for
the TCP backend. docs/reference/horovod-compatibility.md lists the names and how each behaves.
"""

from __future__ import annotations

import inspect as _inspect
from collections.abc import Sequence
from typing import Any

import tensorflow as _tf

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.record import log as log
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow import api as _horovod
from hvdtrain.tensorflow import elastic as elastic
from hvdtrain.tensorflow.api import *  # noqa: F403
from hvdtrain.tensorflow.api import _executing_eagerly as _executing_eagerly
from hvdtrain.tensorflow.api import global_process_set, mpi_ops
from hvdtrain.tensorflow.operations import Operations
from hvdtrain.tensorflow.step import tensor
from hvdtrain.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from hvdtrain.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from hvdtrain.tensorflow.tape import PartialDistributedGradientTape as PartialDistributedGradientTape

_FRONT = job.Front("tensorflow", mpi_ops, "MPI_LIB", Operations, _horovod.MISSING)
init, shutdown = _FRONT.init, _FRONT.shutdown


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Broadcast TensorFlow's or Keras' variables from one rank. Collective.

    The TCP backend sends only a checksum if all ranks hold the same bytes, for example because they used the same seed.
    """
    plain = [tensor(variable) for variable in variables]
    operations, eagerly = mpi_ops.MPI_LIB, _tf.executing_eagerly()
    if isinstance(operations, Operations) and eagerly:
        return operations.broadcast_variables(plain, root_rank, process_set.process_set_id)
    if inplace or not eagerly:
        return _horovod.broadcast_variables(plain, root_rank, process_set, inplace)

    @_tf.function(autograph=False)
    def broadcast() -> None:  # Horovod uses names, which differ for a model that Keras 3 has loaded
        for index, variable in enumerate(plain):
            name = f"broadcast_variables.{index}"
            variable.assign(_horovod.broadcast(variable, root_rank, name=name, process_set=process_set))

    return broadcast()


def DistributedOptimizer(optimizer: Any, *arguments: Any, strategy: str | None = None, **named: Any) -> Any:
    """Wrap a Keras optimizer as `hvdtrain.keras` does, or one of `tf.compat.v1` as Horovod does.

    Raises ValueError for the latter with a strategy.
    """
    if isinstance(optimizer, _tf.compat.v1.train.Optimizer):
        exchange = job.wanted(strategy)
        if exchange is not None and str(exchange) != DEFAULT_REDUCER:
            hint = f"use an optimizer of Keras, or {DEFAULT_REDUCER}"
            raise ValueError(f"strategy {exchange} does not support optimizers of tf.compat.v1; hint: {hint}")
        return _horovod.DistributedOptimizer(optimizer, *arguments, **named)
    from hvdtrain.keras.optimizer import DistributedOptimizer as KerasOptimizer

    bound = _inspect.signature(_horovod.DistributedOptimizer).bind(optimizer, *arguments, **named).arguments
    bound.pop("use_locking", None)
    return KerasOptimizer(strategy=strategy, **bound)
