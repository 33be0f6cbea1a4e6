"""`import hvdtrain.tensorflow as hvd` in place of `import horovod.tensorflow as hvd`: its names, and our strategies.

Horovod's functions are handed through as they are. What carries them is decided by `init`: Horovod itself, or, with
HVDTRAIN_STRATEGY, our streams (see `hvdtrain.script.job`). docs/OWN.md says what each name does on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as _tf
from horovod.tensorflow import *  # noqa: F403
from horovod.tensorflow import global_process_set, mpi_ops

from hvdtrain.script import job, record
from hvdtrain.script.record import log as log
from hvdtrain.strategies.table import DEFAULT_REDUCER
from hvdtrain.tensorflow.operations import Operations
from hvdtrain.tensorflow.step import tensor
from hvdtrain.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from hvdtrain.tensorflow.tape import DistributedGradientTape as DistributedGradientTape
from hvdtrain.tensorflow.tape import PartialDistributedGradientTape as PartialDistributedGradientTape

_FRONT = job.Front("tensorflow", mpi_ops, "MPI_LIB", Operations)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meets the other ranks; see `horovod.tensorflow.init` for the arguments. A second time does nothing.

    Raises Failure if HVDTRAIN_STRATEGY is none that a script can have, or the ranks cannot find each other.
    """
    job.init(_FRONT, comm, process_sets)


def shutdown() -> None:
    """Writes the end of the run's records, and leaves the other ranks as `horovod.tensorflow.shutdown` does."""
    record.finish()
    mpi_ops.shutdown()


class Absent:
    """Stands for a module of Horovod that has no counterpart: every use raises NotImplementedError."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(self._why)


elastic = Absent(
    "hvd.elastic: a script's ranks are fixed from start to end. Save at the end of each epoch, start the script again "
    "from what it saved; the sentinel ends a job that lost a rank (docs/CLUSTER.md)"
)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Gives all ranks the variables of one: TensorFlow's, or those of Keras. Collective.

    On streams, nothing but a checksum travels if all ranks hold the same bytes already, as they do when each made them
    from the same seed.
    """
    plain = [tensor(variable) for variable in variables]
    carried = mpi_ops.MPI_LIB
    if isinstance(carried, Operations) and _tf.executing_eagerly():
        return carried.broadcast_variables(plain, root_rank, process_set.process_set_id)
    return _horovod.broadcast_variables(plain, root_rank, process_set, inplace)


def DistributedOptimizer(optimizer: Any, *arguments: Any, strategy: str | None = None, **named: Any) -> Any:
    """`hvdtrain.keras.DistributedOptimizer` of a Keras optimizer; of a `tf.compat.v1` one Horovod's own.

    Raises ValueError for a strategy with the latter.
    """
    if isinstance(optimizer, _tf.compat.v1.train.Optimizer):
        exchange = job.exchange(strategy)
        if exchange is not None and str(exchange) != DEFAULT_REDUCER:
            why = f"an optimizer of tf.compat.v1 cannot have it: take one of Keras, or {DEFAULT_REDUCER}"
            raise ValueError(f"DistributedOptimizer, strategy {exchange}: {why}")
        return _horovod.DistributedOptimizer(optimizer, *arguments, **named)
    from hvdtrain.keras.optimizer import DistributedOptimizer as OfKeras

    named = dict(zip(("name", "use_locking", "device_dense", "device_sparse"), arguments, strict=False)) | named
    named.pop("use_locking", None)
    return OfKeras(optimizer, strategy=strategy, **named)
