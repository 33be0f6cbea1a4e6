"""Records the steps of tapes and Keras optimizers in a script's run folder (see `hvdtrain.horovod_api.record`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvdtrain.horovod_api import job
from hvdtrain.system.rates import ring_bytes
from hvdtrain.tensorflow import api as horovod
from hvdtrain.tensorflow.collectives import size
from hvdtrain.tensorflow.step import Step, tensor


class Recorded:
    """Records the steps of one optimizer, or of all tapes with the same variables."""

    def __init__(
        self, exchange: Step | None, variables: Sequence[Any], compression: Any = horovod.Compression.none
    ) -> None:
        """`exchange` is None if Horovod's calls exchange, with `compression`. Collective."""
        self._exchange = exchange
        plain = [tensor(variable) for variable in variables]
        sent = [compression.compress(tf.zeros(variable.shape, variable.dtype))[0] for variable in plain]
        payload_bytes = sum(int(each.shape.num_elements()) * each.dtype.size for each in sent)
        self.sent_bytes = ring_bytes(payload_bytes, size())
        """Bytes of a step, if Horovod's calls exchange"""
        self._steps = job.recorder(
            exchange.exchange if exchange else None,
            None,  # not the strategy's communicator, which its first exchange may be using
            shapes=[tuple(variable.shape) for variable in plain],
            device="gpu" if any("GPU" in variable.device for variable in plain) else "cpu",
            threads=tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1,
        )

    def done(self, lr: float | None = None) -> None:
        """Record a step that has just ended."""
        if self._steps is not None:
            spent = self._exchange.spent() if self._exchange else (None, self.sent_bytes, None)
            waited_s, sent_bytes, local_sent_bytes = spent
            self._steps.done(lr=lr, exchange_s=waited_s, sent_bytes=sent_bytes, local_sent_bytes=local_sent_bytes)

    def exchanged(self) -> None:
        """Record that the weights were exchanged after the last step."""
        if self._steps is not None and self._exchange is not None:
            self._steps.exchanged(*self._exchange.spent())

    def done_after(self, gradients: Sequence[Any]) -> None:
        """Record a step of a tape that ends when these gradients are computed."""
        if tf.executing_eagerly():
            self.done()
        elif self._steps is not None:
            with tf.control_dependencies([each for each in tf.nest.flatten(gradients) if each is not None]):
                tf.numpy_function(self.done, [], [])


_tapes: dict[tuple[int, ...], Recorded] = {}
"""Recorders by the ids of the variables"""


def tape(
    exchange: Step | None, variables: Sequence[Any], gradients: Any, compression: Any = horovod.Compression.none
) -> None:
    """Record a tape's step, unless its graph cannot call Python. Collective the first time."""
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        if not graph.building_function or GraphOrParentsInXlaContext(graph):
            return
    key = tuple(map(id, variables))
    if key not in _tapes:
        with tf.init_scope():
            _tapes[key] = Recorded(exchange, variables, compression)
    _tapes[key].done_after(gradients)
