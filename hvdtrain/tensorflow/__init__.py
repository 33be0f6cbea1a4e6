"""`import hvdtrain.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`: its names, and our strategies.

Horovod's functions are handed through as they are. What carries them is decided by `init`: Horovod itself, or, with
HVDTRAIN_STRATEGY, our streams (see `hvdtrain.horovod_api.job`). docs/reference/horovod-compatibility.md says
what each name does on both.
"""

from __future__ import annotations

import inspect as _inspect
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as _tf
from horovod.tensorflow import *  # noqa: F403
from horovod.tensorflow import _executing_eagerly as _executing_eagerly
from horovod.tensorflow import global_process_set, mpi_ops

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.record import log as log
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow.operations import Operations
from hvdtrain.tensorflow.step import tensor
from hvdtrain.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from hvdtrain.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from hvdtrain.tensorflow.tape import PartialDistributedGradientTape as PartialDistributedGradientTape

_FRONT = job.Front("tensorflow", mpi_ops, "MPI_LIB", Operations)
init, shutdown, elastic = _FRONT.init, _FRONT.shutdown, job.Elastic()


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Gives all ranks the variables of one: TensorFlow's, or those of Keras. Collective.

    On streams, nothing but a checksum travels if all ranks hold the same bytes already, as they do when each made them
    from the same seed.
    """
    plain = [tensor(variable) for variable in variables]
    carried, eagerly = mpi_ops.MPI_LIB, _tf.executing_eagerly()
    if isinstance(carried, Operations) and eagerly:
        return carried.broadcast_variables(plain, root_rank, process_set.process_set_id)
    if inplace or not eagerly:
        return _horovod.broadcast_variables(plain, root_rank, process_set, inplace)

    @_tf.function(autograph=False)
    def broadcast() -> None:  # Horovod goes by names; in Keras 3 a loaded model's variables have other ones
        for place, variable in enumerate(plain):
            name = f"broadcast_variables.{place}"
            variable.assign(_horovod.broadcast(variable, root_rank, name=name, process_set=process_set))

    return broadcast()


def DistributedOptimizer(optimizer: Any, *arguments: Any, strategy: str | None = None, **named: Any) -> Any:
    """`hvdtrain.keras.DistributedOptimizer` of a Keras optimizer; of a `tf.compat.v1` one Horovod's own.

    Raises ValueError for a strategy with the latter.
    """
    if isinstance(optimizer, _tf.compat.v1.train.Optimizer):
        exchange = job.wanted(strategy)
        if exchange is not None and str(exchange) != DEFAULT_REDUCER:
            why = f"an optimizer of tf.compat.v1 cannot have it: take one of Keras, or {DEFAULT_REDUCER}"
            raise ValueError(f"DistributedOptimizer, strategy {exchange}: {why}")
        return _horovod.DistributedOptimizer(optimizer, *arguments, **named)
    from hvdtrain.keras.optimizer import DistributedOptimizer as OfKeras

    given = _inspect.signature(_horovod.DistributedOptimizer).bind(optimizer, *arguments, **named).arguments
    given.pop("use_locking", None)
    return OfKeras(strategy=strategy, **given)
