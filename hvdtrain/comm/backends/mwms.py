"""TensorFlow's MultiWorkerMirroredStrategy, over gRPC between CPUs and NCCL between GPUs.

The strategy must be made before TensorFlow runs its first operation, with the address of every rank. So each rank
reserves a port, all tell each other through the meeting, and then each starts its gRPC server. Gradients are summed by
the strategy's all_reduce in the replica's context, as Keras' optimizers do. Small host arrays go the same way, in one
graph per type, since TensorFlow traces its own `gather` anew each time.

That server listens on every address of its host, whatever address it is given, and does all that it is asked to. So the
kernel is told to let only packets from the job's hosts through to it (`cluster.admission`), as soon as it listens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.comm.backends.base import Alone, Meeting, Reach
from hvdtrain.comm.rendezvous import FIRST_PORT, reserved_port
from hvdtrain.sentinel import interfaces
from hvdtrain.system import exits, socket_filter, stderr
from hvdtrain.system.exits import Failure

START_NOTES = (
    *(b"absl::InitializeLog", b"oneDNN custom operations", b"cpu_feature_guard", b"To enable the following"),
    *(b"coordination_service", b"grpc_server_lib", b"Example stragglers", b"/job:worker/replica:0/task:"),
)


class MwmsRanks(Alone):
    """See `collectives.Alone`."""

    def __init__(self, meeting: Meeting, reach: Reach, *, gpu: bool) -> None:
        """Raises Failure (69) if this rank cannot listen or reach the others."""
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self._meeting = meeting
        reserved = reserved_port(FIRST_PORT + self.local_rank)
        port = reserved.getsockname()[1]
        mine = [f"{reach.address}:{port}", *([] if reach.loopback else interfaces.addresses().values())]
        told = [each.decode().split() for each in meeting.gather(" ".join(mine).encode())]
        addresses = [address for address, *_ in told]
        hosts = {each.partition("/")[0] for _, *more in told for each in more}
        reserved.close()
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=self.rank, rpc_layer="grpc"
        )
        try:
            with stderr.without(START_NOTES), _guarded(port, hosts):
                self._strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
        except tf.errors.OpError as error:
            reason = str(error).splitlines()[0]
            raise Failure(f"TensorFlow cannot connect {', '.join(addresses)}: {reason}", exits.UNREACHABLE) from error
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # TensorFlow has put its own in its place
        self.carrier = "nccl" if gpu else "grpc"
        self._sums: dict[str, Any] = {}

    def leave(self) -> None:
        self._meeting.gather(b"")  # nobody closes a connection that another still reads from

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
        return self._strategy.scope()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._strategy.run(function, arguments)

    def graph_sum(self, tensor: Any, name: str) -> Any:
        here = tf.identity(tensor)  # a graph's argument has no device yet, which all_reduce goes by
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, here)

    def summed_gradients(self, tape: Any, loss: Any, weights: list[Any]) -> list[Any]:
        gradients = tape.gradient(loss, weights)
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients))


# --- who may speak to TensorFlow's server -----------------------------------------------------------------------------

LOOK_S = 0.002


@contextlib.contextmanager
def _guarded(port: int, hosts: set[str]) -> Iterator[None]:
    """While TensorFlow starts its server on this port: closes it to all but this host and these IPv4 addresses.

    Raises Failure (69) if that cannot be done.
    """
    networks = [("127.0.0.0", "255.0.0.0"), *((host, "255.255.255.255") for host in sorted(hosts))]
    guarded: set[str] = set()
    started, problems = threading.Event(), list[OSError]()

    def watch() -> None:
        while not started.wait(LOOK_S):
            look()

    def look() -> None:
        for name, own in _sockets():
            with own:
                if name in guarded or not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if own.getsockname()[1] == port:
                    try:
                        socket_filter.only_networks(own, networks)
                        guarded.add(name)
                    except OSError as error:
                        problems.append(error)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        started.set()
        watching.join()
    look()
    for _, own in _sockets():  # who was faster than we
        with own, contextlib.suppress(OSError):
            if own.getsockname()[1] == port and not _is_one_of(own.getpeername()[0], hosts):
                own.shutdown(socket.SHUT_RDWR)
    if not guarded:
        why = problems[0].strerror if problems else "it is not to be found"
        raise Failure(
            f"TensorFlow's server on {socket.gethostname()}, port {port}, would obey any machine that reaches it, and "
            f"cannot be closed to strangers ({why}): use another --strategy",
            exits.UNREACHABLE,
        )


def _is_one_of(peer: str, hosts: set[str]) -> bool:
    address = peer.removeprefix("::ffff:")
    return address in hosts or address.startswith("127.")


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """This process's TCP sockets, each by a descriptor of its own, with the name that /proc knows it by."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                own = socket.socket(fileno=os.dup(int(entry.name)))
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                    yield name, own
                else:
                    own.close()
