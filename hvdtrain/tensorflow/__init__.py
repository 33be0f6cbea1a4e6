"""Drop-in module for `import horovod.tensorflow as hvd`, with Horovod's names and hvdtrain's strategies.

`init` decides whether Horovod or hvdtrain's TCP backend carries the calls (see `hvdtrain.horovod_api.job`). A name is
Horovod's function in the first case, and hvdtrain's own with the same results in the second.
docs/reference/horovod-compatibility.md lists the names and how each behaves.
"""

from __future__ import annotations

import inspect as _inspect
from typing import Any

import tensorflow as _tf

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.record import log as log
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.tensorflow import api as _horovod
from hvdtrain.tensorflow import collectives as mpi_ops  # noqa: F401
from hvdtrain.tensorflow import elastic as elastic
from hvdtrain.tensorflow.api import *  # noqa: F403
from hvdtrain.tensorflow.broadcasts import broadcast_variables as broadcast_variables
from hvdtrain.tensorflow.collectives import FRONT as _FRONT
from hvdtrain.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from hvdtrain.tensorflow.tape import DistributedGradientTape as DistributedGradientTape

init, shutdown = _FRONT.init, _FRONT.shutdown


def __getattr__(name: str) -> Any:
    """What Horovod's module has besides, if it is installed. Raises AttributeError."""
    return _FRONT.get(name)


def DistributedOptimizer(  # type: ignore[no-redef]
    optimizer: Any, *arguments: Any, strategy: str | None = None, **named: Any
) -> Any:
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
