"""Collectives over TCP, for strategies that exchange one vector per step.

The ranks of a host sum their vectors in the host's first rank, its leader. The leaders exchange over the network, with
one stream per pair of hosts, and then each shares the result with its host. So each host's data crosses the network
once, however many ranks the host has.

Leaders sum in a ring: each sends to the next and receives from the previous one, so each link carries one stream in
each direction and no host can run ahead. All other exchanges are pairwise: in round s, host i sends to host i+s and
receives from host i-s. Among three hosts or more, long messages wait until their receiver is ready, so no two hosts
send to a third at once. If they did, a slow link's queue would drop packets, and TCP would notice only after its
timeout of 200 ms. Messages that fit into that queue together are sent to all hosts at once.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.arrays import Array, is_numpy, on_host
from hvdtrain.comm.backends.base import Communicator, Endpoint, LeaderGroup, Rendezvous, VectorReducer
from hvdtrain.comm.backends.shared_gpu import SharedGpu, share_gpu
from hvdtrain.comm.backends.shared_memory import SHARED_FROM_BYTES, SharedMemory, share_memory
from hvdtrain.comm.stream import ENDED, MAX_MESSAGE_BYTES, Stream, exchange_ports, listen, open_streams, swap
from hvdtrain.sentinel import auth

SMALL_BYTES = 2048
"""Vectors up to this size are sent whole to every host at once, which takes one latency instead of 2(h-1)"""
QUEUE_BYTES = 32 * 1024
"""How much the queue of a slow link holds when several hosts send at once"""
NOTHING = np.empty(0, np.uint8)
HEAD_BYTES = 16
"""Each rank's bytes in a gather are preceded by its rank and their length"""
SLACK_BYTES = 1 << 16


def all_reduce_hops(nbytes: int, hosts: int, itemsize: int = 4) -> int:
    """Network latencies that `TcpLeaderGroup.all_reduce` takes for a vector of `nbytes` over `hosts` hosts."""
    if _sent_whole(nbytes, itemsize, hosts):
        return all_to_all_hops(nbytes, hosts)
    return 2 * (hosts - 1)


def all_to_all_hops(nbytes: int, hosts: int, *, even: bool = False) -> int:
    """Network latencies of `TcpLeaderGroup.all_to_all`, `all_to_all_streamed` or `all_gather`.

    `nbytes`: the largest part for one host. The receiver's ready token takes another latency per round.
    """
    if hosts == 1:
        return 0
    if _sent_at_once(nbytes, hosts):
        return 1
    return (hosts - 1) * (2 if _waits_for_receiver(nbytes, hosts, even) else 1)


def _sent_whole(nbytes: int, itemsize: int, hosts: int) -> bool:
    """Whether an all_reduce sends the whole vector to every host instead of using a ring."""
    return nbytes <= SMALL_BYTES or nbytes // itemsize < hosts


def _sent_at_once(nbytes: int, hosts: int) -> bool:
    """Whether an exchange of parts sends all of them before it receives any."""
    return nbytes <= max(SMALL_BYTES, QUEUE_BYTES // (hosts - 1))


def _waits_for_receiver(nbytes: int, hosts: int, even: bool) -> bool:
    return even and hosts > 2 and nbytes > QUEUE_BYTES


class TcpLeaderGroup(LeaderGroup):
    """The leaders, connected by one stream per pair. `streams[i]` leads to host i and is None for this host."""

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self.count = len(streams)
        self.index = list(streams).index(None)
        self.sent_bytes = 0
        self.max_message_bytes = MAX_MESSAGE_BYTES
        """Longest message accepted from another host"""

    def all_to_all_streamed(
        self, part: Callable[[int], np.ndarray], *, even: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        rounds = self._rounds()
        parts: Iterator[np.ndarray] = map(part, [target for target, _ in rounds])
        first = list(itertools.islice(parts, 1 if even else None))
        parts = itertools.chain(first, parts)
        largest = max((one.nbytes for one in first), default=0)
        if at_once := self.count > 1 and _sent_at_once(largest, self.count):
            for (target, _), one in zip(rounds, parts, strict=True):
                self._swap(target, one, None)
        for target, source in rounds:
            own = None if at_once else next(parts)
            if _waits_for_receiver(largest, self.count, even):  # wait for the receiver's ready token
                self._swap(source, NOTHING, target)
            yield source, self._swap(target, own, source)

    def all_reduce(self, values: np.ndarray) -> None:
        if self.count == 1:
            return
        if _sent_whole(values.nbytes, values.itemsize, self.count):
            parts = self.all_gather(values.copy())
            np.copyto(values, parts[0])
            for part in parts[1:]:
                values += part
            return
        borders = [values.size * host // self.count for host in range(self.count + 1)]
        chunks = [values[begin:end] for begin, end in itertools.pairwise(borders)]
        received = np.empty(max(chunk.size for chunk in chunks), values.dtype)
        after, before = (self.index + 1) % self.count, (self.index - 1) % self.count
        order = [chunks[(self.index - step) % self.count] for step in range(2 * self.count - 1)]
        for step in range(self.count - 1):  # reduce-scatter: a chunk passes around the ring and grows
            order[step + 1] += self._swap(after, order[step], before, received[: order[step + 1].size])
        for step in range(self.count - 1, 2 * (self.count - 1)):  # all-gather: the sums pass around once more
            self._swap(after, order[step], before, order[step + 1])

    def _rounds(self) -> list[tuple[int, int]]:
        """(target, source) of each pairwise round."""
        return [((self.index + s) % self.count, (self.index - s) % self.count) for s in range(1, self.count)]

    def _swap(
        self, target: int | None, data: np.ndarray | None, source: int | None, into: np.ndarray | None = None
    ) -> np.ndarray:
        """Send `data` to one host while receiving from another, into `into` if given."""
        self.sent_bytes += 0 if data is None else data.nbytes
        to, back = (None if host is None else self._streams[host] for host in (target, source))
        return swap(to, data, back, into, self.max_message_bytes)


class TcpCommunicator(Communicator):
    """Ranks connected by TCP. Strategies reduce vectors; nothing is exchanged during a framework's own backward."""

    library = "tcp"

    connect_s: float | None = None
    """Time for the other ranks to connect; None for that of `stream`"""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        """Raises Failure (69) if a rank cannot be reached."""
        self._leader: Stream | None = None
        self._members: list[Stream] = []
        self._streams: list[Stream | None] = []
        self._connect(rendezvous, endpoint)

    def _connect(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self.job_key = rendezvous.job_key
        with listen(endpoint) as listener:
            ranks = exchange_ports(rendezvous.gather_bytes, endpoint, listener)
            machines = [rank.machine for rank in ranks]
            leaders = [machines.index(machine) for machine in dict.fromkeys(machines)]
            own = machines[self.rank]
            leader = machines.index(own)
            targets, expected = [leader], set[int]()
            if leader == self.rank:
                targets = [rank for rank in self._peers(leaders) if rank < self.rank]
                expected = {rank for rank in range(self.size) if machines[rank] == own} - {self.rank}
                expected |= {rank for rank in self._peers(leaders) if rank > self.rank}
            me = auth.Party(rendezvous.job_key, b"tcp", self.rank)
            connected, accepted = open_streams(ranks, me, targets, listener, expected, self.connect_s)
            streams = connected | accepted
        self._leader = None if leader == self.rank else streams.pop(leader)
        self._members = [streams[rank] for rank in sorted(streams) if machines[rank] == own]
        self._streams = [streams.get(rank) for rank in leaders]
        self.hosts_count = len(leaders)
        self._host_of = [leaders.index(machines.index(machine)) for machine in machines]
        """The host of each rank, as an index of `leaders`"""
        self._leaders = self._leader_group(leaders)
        self._shared = share_memory(self._leader, self._members)
        self._gpu: SharedGpu | None = None
        self._gpu_bytes = 0
        """The longest vector for which the ranks of this host have tried to share a GPU's memory"""
        self._scratch = np.empty(0, np.float32)

    def _peers(self, leaders: Sequence[int]) -> Sequence[int]:
        """The leaders to which a leader opens streams."""
        return leaders

    def _leader_group(self, leaders: Sequence[int]) -> TcpLeaderGroup | None:
        """The group of these leaders; None for other ranks. Collective."""
        return TcpLeaderGroup(self._streams) if self.rank in leaders else None

    def _disconnect(self) -> None:
        # No wait: messages already sent still arrive, and a peer that waits for more notices that this rank is gone.
        for stream in self._all_streams():
            stream.socket.close()

    def interrupt(self) -> None:
        """End all transfers with PeerLost, now and from now on. Called from any thread."""
        for stream in self._all_streams():
            with contextlib.suppress(OSError):  # the other end was faster
                stream.socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """This rank exchanges nothing more. Ranks that still wait for it get PeerLost."""
        for stream in self._all_streams():
            with contextlib.suppress(OSError):
                stream.socket.send(ENDED)
        self.interrupt()

    def _all_streams(self) -> list[Stream]:
        return [stream for stream in (*self._members, *self._streams, self._leader) if stream is not None]

    # --- small arrays in host memory -------------------------------------------------------------------------------

    def gather_bytes(self, own: bytes) -> list[bytes]:
        block = np.concatenate([np.array([self.rank, len(own)]).view(np.uint8), np.frombuffer(own, np.uint8)])
        if self._leader is not None:
            swap(self._leader, block, None)
            blocks = [swap(None, None, self._leader) for _ in range(self.hosts_count)]
        else:
            assert self._leaders is not None
            self._leaders.max_message_bytes = MAX_MESSAGE_BYTES
            local = [block, *(swap(None, None, member) for member in self._members)]
            blocks = self._leaders.all_gather(np.concatenate(local) if self._members else block)
            for member, part in itertools.product(self._members, blocks):
                swap(member, part, None)
        parts = {}
        for part in blocks:
            while part.size:
                rank, length = part[:HEAD_BYTES].view(np.int64).tolist()
                parts[rank], part = np.split(part[HEAD_BYTES:], [length])
        return [parts[rank].tobytes() for rank in range(self.size)]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        flat = np.array(values).reshape(-1)
        counted = self.sent_bytes, self.local_sent_bytes
        self.reduce(flat)
        self.sent_bytes, self.local_sent_bytes = counted
        return flat.reshape(values.shape)

    # --- vectors ---------------------------------------------------------------------------------------------------

    @property
    def leaders(self) -> TcpLeaderGroup | None:
        """The leaders of all hosts; None if this rank is not a leader."""
        return self._leaders

    def reduce(self, vector: Array, size: int = 0, reducer: VectorReducer | None = None) -> int:
        shared = self._memory_for(vector)
        if not is_numpy(vector) and not isinstance(shared, SharedGpu) and (self._leader or self._members):
            sent = 0

            def in_host_memory(host: np.ndarray) -> None:
                nonlocal sent
                sent = self._reduce(host, size, reducer, shared)

            on_host(vector, in_host_memory)
            return sent
        return self._reduce(vector, size, reducer, shared)

    def _memory_for(self, vector: Array) -> SharedMemory | SharedGpu | None:
        """The memory in which this host's ranks sum a vector; None if they send it to their leader. Collective."""
        if vector.nbytes < SHARED_FROM_BYTES or (self._leader is None and not self._members):
            return None
        if self._gpu_bytes < vector.nbytes:
            self._gpu, self._gpu_bytes = share_gpu(self._leader, self._members, vector), vector.nbytes
        return self._gpu or self._shared

    def _reduce(
        self, vector: Array, size: int, reducer: VectorReducer | None, shared: SharedMemory | SharedGpu | None
    ) -> int:
        leaders = self._leaders
        if leaders is None:
            self.local_sent_bytes += vector.nbytes
            if shared is not None:
                shared.reduce(vector)
                shared.broadcast(vector)
            else:
                swap(self._leader, vector, None)
                swap(None, None, self._leader, vector)
            return 0
        before = leaders.sent_bytes
        leaders.max_message_bytes = 2 * vector.nbytes + SLACK_BYTES
        if shared is not None:
            shared.reduce(vector)
        elif self._members:
            if self._scratch.nbytes != vector.nbytes:
                self._scratch = np.empty_like(vector)
            for member in self._members:
                vector += swap(None, None, member, self._scratch.view(vector.dtype))
        if len(vector) > size:
            on_host(vector[size:], leaders.all_reduce)
        if reducer is not None and size:
            if leaders.count > 1:
                reducer.all_reduce(vector[:size], leaders)
            else:
                reducer.add_residual(vector[:size])
        if shared is not None:
            shared.broadcast(vector)
        else:
            for member in self._members:
                swap(member, vector, None)
        sent = leaders.sent_bytes - before
        self.sent_bytes += sent
        self.local_sent_bytes += vector.nbytes * len(self._members)
        return sent
