"""TensorFlow's MultiWorkerMirroredStrategy, over gRPC between CPUs and NCCL between GPUs.

The strategy must be created before TensorFlow runs its first operation, with the address of every rank. So each rank
reserves a port, the ranks exchange their addresses at the rendezvous, and then each starts its gRPC server. The
strategy's all_reduce sums gradients in the replica context, as Keras optimizers do. Small host arrays take the same
way, in one graph per dtype, because TensorFlow traces its own `gather` again at each call.

TensorFlow's server listens on every address of its host, whatever address it is given, and executes every request. So
it shares its port with a decoy socket. The kernel gives the decoy each connection that does not come from one of the
job's hosts (`system.socket_filter`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.backends.base import Communicator, Endpoint, Rendezvous
from hvdtrain.comm.backends.framework import FrameworkExchange
from hvdtrain.comm.rendezvous import FIRST_PORT, reserved_port
from hvdtrain.sentinel import interfaces
from hvdtrain.system import exits, socket_filter, stderr
from hvdtrain.system.exits import Failure

START_NOTES = (
    *(b"absl::InitializeLog", b"oneDNN custom operations", b"cpu_feature_guard", b"To enable the following"),
    *(b"coordination_service", b"grpc_server_lib", b"Example stragglers", b"/job:worker/replica:0/task:"),
)


class MwmsCommunicator(Communicator, FrameworkExchange):
    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint, *, gpu: bool) -> None:
        """Raises Failure (69) if this rank cannot listen or cannot reach the others."""
        self.in_framework = self
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self._rendezvous = rendezvous
        decoy = reserved_port(FIRST_PORT + self.local_rank)
        port = decoy.getsockname()[1]
        own = [f"{endpoint.address}:{port}", *([] if endpoint.loopback else interfaces.addresses().values())]
        of_ranks = [text.decode().split() for text in rendezvous.gather_bytes(" ".join(own).encode())]
        addresses = [address for address, *_ in of_ranks]
        hosts = {address.partition("/")[0] for _, *others in of_ranks for address in others}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=self.rank, rpc_layer="grpc"
        )
        try:
            with stderr.suppress(START_NOTES), _closed_to_strangers(decoy, hosts):
                self._strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        except tf.errors.OpError as error:
            reason = str(error).splitlines()[0]
            raise Failure(f"TensorFlow cannot connect {', '.join(addresses)}: {reason}", exits.UNREACHABLE) from error
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # TensorFlow replaced the handler
        self.library = "nccl" if gpu else "grpc"
        self._sums: dict[str, Any] = {}

    def _disconnect(self) -> None:
        self._rendezvous.gather_bytes(b"")  # a barrier: another rank may still read from a connection

    # --- small host arrays --------------------------------------------------------------------------------------

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        kind = values.dtype.name
        if kind not in self._sums:
            signature = [tf.TensorSpec([None], values.dtype)]
            self._sums[kind] = tf.function(
                lambda flat: self._strategy.run(self.graph_sum, (flat, name)),
                input_signature=signature,
                autograph=False,
            )
        return np.asarray(self._sums[kind](tf.constant(values.reshape(-1))).numpy()).reshape(values.shape)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        lengths = np.zeros(self.size, dtype=np.int32)
        lengths[self.rank] = len(own)
        lengths = self.sum(lengths, "gather.lengths")
        words = -(-int(lengths.max()) // 4)
        parts = np.zeros((self.size, words), dtype=np.int32)
        parts[self.rank] = np.frombuffer(own.ljust(4 * words, b"\0"), dtype=np.int32)
        parts = self.sum(parts, "gather.bytes")
        return [part.tobytes()[:length] for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        return self.sum(values if self.rank == 0 else np.zeros_like(values), name)

    # --- the training step --------------------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self._strategy.scope()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._strategy.run(function, arguments)

    def graph_sum(self, tensor: Any, name: str) -> Any:
        placed = tf.identity(tensor)  # the argument of a graph has no device yet, and all_reduce needs one
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)

    def summed_gradients(self, tape: Any, loss: Any, weights: list[Any]) -> list[Any]:
        gradients = tape.gradient(loss, weights)
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients))


# --- access to TensorFlow's server ------------------------------------------------------------------------------------

LOOPBACK, STRANGER = "127.0.0.1", "127.0.0.2"
PATIENCE_S = 10.0
PAUSE_S = 0.01
"""Pause between two connections to the decoy, so that a flood of them takes no processor time from the training"""


@contextlib.contextmanager
def _closed_to_strangers(decoy: socket.socket, hosts: set[str]) -> Iterator[None]:
    """Start TensorFlow's server inside this context. It shares the decoy's port.

    The decoy gets all connections except those from this host and from `hosts`, which are IPv4 addresses. It stays open
    until the process ends, like the server. Raises Failure (69) if strangers cannot be kept out.
    """
    port = decoy.getsockname()[1]
    try:
        socket_filter.only_strangers(decoy, {LOOPBACK, *hosts})
    except OSError as error:
        raise _open_to_all(port, f"the kernel reports: {error.strerror}") from error
    decoy.listen()
    threading.Thread(target=_turn_away, args=[decoy], daemon=True).start()
    os.environ["TF_GRPC_REUSE_PORT"] = "true"
    yield
    with socket.socket() as stranger:
        stranger.settimeout(PATIENCE_S)
        try:
            stranger.bind((STRANGER, 0))
            stranger.connect((LOOPBACK, port))
            greeting = stranger.recv(1)
        except OSError as error:
            raise _open_to_all(port, f"a trial connection from {STRANGER} failed: {error}") from error
    if greeting:
        raise _open_to_all(port, f"a trial connection from {STRANGER} reached it")


def _turn_away(decoy: socket.socket) -> None:
    """Close every connection: strangers, and ranks that came before the server started and will try again."""
    while True:
        with contextlib.suppress(OSError):
            decoy.accept()[0].close()
        time.sleep(PAUSE_S)


def _open_to_all(port: int, reason: str) -> Failure:
    return Failure(
        f"TensorFlow's server on {socket.gethostname()}, port {port}, obeys every machine that reaches it, and "
        f"strangers cannot be kept out ({reason}); hint: use another --strategy",
        exits.UNREACHABLE,
    )
