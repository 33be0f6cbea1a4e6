"""Horovod's functions for Keras, without hvdtrain's strategies."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.horovod_api.functions import Average
from hvdtrain.horovod_api.installed import Horovod
from hvdtrain.tensorflow import collectives
from hvdtrain.tensorflow.api import *  # noqa: F403
from hvdtrain.tensorflow.collectives import Compression

_HOROVOD = Horovod("tensorflow", "horovod.tensorflow.keras", "horovod.keras")


def allreduce(  # type: ignore[no-redef]
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    scales: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return collectives.allreduce(tf.constant(value, name=name), average, compression=compression, op=op, **scales)


def allgather(value: Any, name: str | None = None) -> Any:  # type: ignore[no-redef]
    return collectives.allgather(tf.constant(value, name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:  # type: ignore[no-redef]
    return collectives.broadcast(tf.constant(value, name=name), root_rank)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:  # type: ignore[no-redef]
    return collectives.reducescatter(tf.constant(value, name=name), op=op)


def __getattr__(name: str) -> Any:
    """What Horovod has besides, if it is installed. Raises AttributeError."""
    return _HOROVOD.get(name)
