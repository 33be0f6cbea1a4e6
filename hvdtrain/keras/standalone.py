"""Horovod's functions of values for Keras, on the TCP backend, for an environment without Horovod."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow import standalone
from hvdtrain.tensorflow.standalone import Average, Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    scales: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return standalone.allreduce(tf.constant(value, name=name), average, compression=compression, op=op, **scales)


def allgather(value: Any, name: str | None = None) -> Any:
    return standalone.allgather(tf.constant(value, name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    return standalone.broadcast(tf.constant(value, name=name), root_rank)


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    return standalone.reducescatter(tf.constant(value, name=name), op=op)
