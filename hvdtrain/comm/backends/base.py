"""The interface of a communication backend. The base classes serve a single process.

Every rank calls each collective method, in the same order. `name` identifies a tensor and is equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.comm.arrays import Array
from hvdtrain.comm.backends.framework import FrameworkExchange
from hvdtrain.sentinel.rank import Sentinel


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address and network interface through which other ranks connect to this one."""

    address: str
    """An IPv4 address or a host name"""
    interface: str | None
    """Interface of the link between hosts; the loopback interface on a single host; None if unknown"""
    loopback: bool = False


class Rendezvous(Protocol):
    """Ranks that have found each other and can exchange small messages."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    job_key: bytes
    """Known to the ranks of this job only; `rendezvous` says how each launcher distributes it"""

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order, on all ranks."""

    def shutdown(self) -> None:
        """Disconnect from the other ranks, possibly after waiting for the slowest. A second call does nothing."""


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Ranks that have found each other and are watched by a sentinel: all that a backend needs to connect them."""

    rendezvous: Rendezvous
    sentinel: Sentinel | None
    """None for a single process"""
    endpoint: Endpoint
    between_hosts: str = dataclasses.field(default_factory=lambda: os.environ.get("HVDTRAIN_BACKEND") or "tcp")
    """What connects the hosts for strategies that need `tcp`: tcp or mpi"""

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-serializable value of every rank, in rank order, on all ranks."""
        return [json.loads(text) for text in self.rendezvous.gather_bytes(json.dumps(value).encode())]

    def measure_links(self) -> list[dict[str, Any]]:
        """Measure the goodput of each host's link before a backend connects: see `Sentinel.measure_links`."""
        return self.sentinel.measure_links(self.gather) if self.sentinel else []


class LeaderGroup:
    """The leaders of all hosts, one rank per host. The base class is the group of a single host.

    Arrays are one-dimensional and contiguous.
    """

    count = 1
    """Number of hosts"""
    index = 0
    """This host's index, from 0 to count - 1"""
    sent_bytes = 0
    """Payload bytes sent over the network so far"""

    def all_reduce(self, values: np.ndarray) -> None:
        """Sum elementwise over hosts, in place. All hosts get the same bits; each sends 2(h-1)/h of the bytes."""

    def all_gather(self, part: np.ndarray, *, even: bool = False) -> list[np.ndarray]:
        """Return every host's part, in host order. For `even`, see `all_to_all_streamed`."""
        return self.all_to_all([part] * self.count, even=even)

    def all_to_all(self, parts: Sequence[np.ndarray], *, even: bool = False) -> list[np.ndarray]:
        """Send parts[j] to host j and return the parts sent here, in host order, including the own part.

        All parts have one dtype. For `even`, see `all_to_all_streamed`.
        """
        received = list(parts)
        for host, message in self.all_to_all_streamed(parts.__getitem__, even=even):
            received[host] = np.frombuffer(message, parts[0].dtype)
        return received

    def all_to_all_streamed(
        self, part: Callable[[int], np.ndarray], *, even: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Send part(j) to each other host j; yield (host, received bytes) in an order that never changes.

        With `even`, which must be equal on all hosts, all parts have the same length. Then part(j) is called only when
        it is needed, while the previous part is in flight, and a long part may wait until its receiver is ready.
        """
        return iter(())

    def all_gather_streamed(self, part: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Send a part to all other hosts; yield (host, bytes) for each host's part, this host's last.

        All parts have the same length.
        """
        yield from self.all_to_all_streamed(lambda _: part, even=True)
        yield self.index, part.view(np.uint8)


class VectorReducer(Protocol):
    """Sums vectors over hosts: see `strategies.reducers.base`."""

    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None: ...

    def add_residual(self, values: Array) -> None: ...


class Communicator:
    """The ranks of a job as one rank sees them. The base class is a single process, which sends nothing.

    `rank` and `size` change only in an elastic job, with its members.
    """

    rank = local_rank = 0
    size = local_size = 1
    hosts_count = 1
    """Number of leaders; hosts may share a name"""
    job_key = b""
    library = "none"
    """Library that carries the collectives: none, gloo, mpi, nccl, grpc, tcp or servers"""
    sent_bytes = 0
    """Payload bytes that this rank sent over the network for gradient exchanges; `sum` does not count"""
    local_sent_bytes = 0
    """Payload bytes that this rank passed to other ranks of its host for gradient exchanges, in memory or over TCP"""
    framework = ""
    """torch or tensorflow"""
    elastic = False
    """Whether these ranks are an `ElasticCommunicator`, whose members can change"""
    suspended = False
    """Whether the members changed, and the ranks have not continued together since"""
    in_framework = FrameworkExchange()
    """How these ranks take part in the framework's own step"""
    joining = False
    """Whether this rank's host has come back, and does not have the state of the run yet"""
    begun: Mapping[str, Any] = {}
    """If `joining`: what the others passed to `begin`"""
    _group: RankGroup | None = None
    _owns_group = False
    _local_bytes_taken = 0

    def use_group(self, group: RankGroup, framework: str, *, owned: bool) -> None:
        """Set the group and framework. `owned`: `shutdown` shuts down the group too."""
        self._group, self.framework, self._owns_group = group, framework, owned
        self.host = socket.gethostname()

    @property
    def group(self) -> RankGroup:
        """The ranks and the sentinel of a communicator that `world.connect` returned."""
        assert self._group is not None
        return self._group

    @property
    def sentinel(self) -> Sentinel | None:
        """Watches these ranks; None for a single process."""
        return self._group.sentinel if self._group else None

    def shutdown(self) -> None:
        """Disconnect from the other ranks, possibly after waiting for the slowest."""
        owned = self._group if self._owns_group else None
        if owned and owned.sentinel:
            owned.sentinel.report_finished()
        self._disconnect()
        if owned and owned.rendezvous is not self:
            owned.rendezvous.shutdown()

    def _disconnect(self) -> None:
        """Close the connections of this backend."""

    def take_local_sent_bytes(self) -> int:
        """Payload bytes that this rank sent to other ranks of its host since the last call."""
        before, self._local_bytes_taken = self._local_bytes_taken, self.local_sent_bytes
        return self._local_bytes_taken - before

    # --- collectives on small arrays in host memory ----------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-serializable value of every rank, in rank order, on all ranks."""
        return [json.loads(message) for message in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order, on all ranks."""
        return [own]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the elementwise sum over ranks, with the shape and dtype of `values`."""
        return values

    def broadcast(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return rank 0's values. All ranks pass the same shape and dtype."""
        first = self.gather_bytes(values.tobytes() if self.rank == 0 else b"")[0]
        return np.frombuffer(bytearray(first), values.dtype).reshape(values.shape)

    def agreed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the same arrays on all ranks: its own if all SHA-256 sums are equal, else rank 0's.

        Ranks that derive their arrays from the same seed exchange 64 characters instead of the arrays. Broadcasting
        ResNet-34 takes more than a minute at 10 Mbit/s.
        """
        if len(set(self.gather(digest(arrays)))) == 1:
            return arrays
        return {name: self.broadcast(array, name) for name, array in arrays.items()}

    # --- the loss of a host ------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The launcher's number of this rank, which never changes."""
        return self.rank

    def confirm(self) -> None:
        """End a transaction: wait until all ranks hold the result of the collective work before. Raises PeerLost."""

    def commit(self) -> None:
        """`confirm`; after a loss also `recover`. Raises Aborted if the work has to be repeated."""

    def lost(self) -> None:
        """Interrupt all transfers, because a peer is lost."""

    # --- gradient vectors --------------------------------------------------------------------------------------------

    def reduce(self, vector: Array, size: int = 0, reducer: VectorReducer | None = None) -> int:
        """Sum a vector over all ranks, in place, and return the payload bytes that this rank sent to other hosts.

        Each host's ranks are summed in its leader, the leaders' sums are reduced, and each host gets the result. The
        reducer sums the first `size` numbers; those after them are summed exactly. Raises NotImplementedError if this
        backend cannot reduce vectors.
        """
        if self.size > 1:
            raise NotImplementedError(f"ranks joined by {self.library} cannot sum vectors by a reducer")
        if reducer is not None:
            reducer.add_residual(vector[:size])
        return 0

    # --- the links between hosts --------------------------------------------------------------------------------------

    def measure_links(self) -> list[dict[str, Any]]:
        """Measure the goodput of each host's link: see `Sentinel.measure_links`. Collective."""
        return self.sentinel.measure_links(self.gather) if self.sentinel else []

    @property
    def links(self) -> list[dict[str, Any]]:
        """The result of the last measurement of links; empty on a single host."""
        return self.sentinel.links if self.sentinel else []


def digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names and values."""
    sha256 = hashlib.sha256()
    for name, array in arrays.items():
        sha256.update(name.encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()
