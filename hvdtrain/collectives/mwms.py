"""TensorFlow's MultiWorkerMirroredStrategy, over gRPC between CPUs and NCCL between GPUs.

The strategy must be made before TensorFlow runs its first operation, with the address of every rank. So each rank
reserves a port, all tell each other through the meeting, and then each starts its gRPC server. Gradients are summed by
the strategy's all_reduce in the replica's context, as Keras' optimizers do. Small host arrays go the same way, in one
graph per type, since TensorFlow traces its own `gather` anew each time.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import exits, notes
from hvdtrain.collectives import Alone, Meeting, Reach
from hvdtrain.collectives.meeting import FIRST_PORT, reserved_port
from hvdtrain.exits import Failure

START_NOTES = (
    *(b"absl::InitializeLog", b"oneDNN custom operations", b"cpu_feature_guard", b"To enable the following"),
    *(b"coordination_service", b"grpc_server_lib", b"Example stragglers", b"/job:worker/replica:0/task:"),
)


class MwmsRanks(Alone):
    """See `collectives.TensorFlowCollectives`."""

    def __init__(self, meeting: Meeting, reach: Reach, *, gpu: bool) -> None:
        """Raises Failure (69) if this rank cannot listen or reach the others."""
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self._meeting = meeting
        reserved = reserved_port(FIRST_PORT + self.local_rank)
        mine = f"{reach.address}:{reserved.getsockname()[1]}"
        addresses = [address.decode() for address in meeting.gather(mine.encode())]
        reserved.close()
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=self.rank, rpc_layer="grpc"
        )
        try:
            with notes.without(START_NOTES):
                self._strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        except tf.errors.OpError as error:
            reason = str(error).splitlines()[0]
            raise Failure(f"TensorFlow cannot connect {', '.join(addresses)}: {reason}", exits.UNREACHABLE) from error
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # TensorFlow has put its own in its place
        self.carrier = "nccl" if gpu else "grpc"
        self._sums: dict[str, Any] = {}

    def leave(self) -> None:
        self._meeting.gather(b"")  # nobody closes a connection that another still reads from
        self._meeting.leave()

    # --- small host arrays --------------------------------------------------------------------------------------

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        kind = values.dtype.name
        if kind not in self._sums:
            signature = [tf.TensorSpec([None], values.dtype)]
            self._sums[kind] = tf.function(
                lambda flat: self._strategy.run(self.graph_sum, (flat, name)), input_signature=signature
            )
        return np.asarray(self._sums[kind](tf.constant(values.reshape(-1))).numpy()).reshape(values.shape)

    def gather(self, mine: bytes) -> list[bytes]:
        lengths = np.zeros(self.size, dtype=np.int32)
        lengths[self.rank] = len(mine)
        lengths = self.sum(lengths, "gather.lengths")
        words = -(-int(lengths.max()) // 4)
        parts = np.zeros((self.size, words), dtype=np.int32)
        parts[self.rank] = np.frombuffer(mine.ljust(4 * words, b"\0"), dtype=np.int32)
        parts = self.sum(parts, "gather.bytes")
        return [part.tobytes()[:length] for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        return self.sum(values if self.rank == 0 else np.zeros_like(values), name)

    # --- the training step --------------------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        scope: contextlib.AbstractContextManager[Any] = self._strategy.scope()
        return scope

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._strategy.run(function, arguments)

    def graph_sum(self, tensor: Any, name: str) -> Any:
        here = tf.identity(tensor)  # a graph's argument has no device yet, which all_reduce goes by
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, here)

    def summed_gradients(self, tape: Any, loss: Any, weights: list[Any]) -> list[Any]:
        gradients = tape.gradient(loss, weights)
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients))
