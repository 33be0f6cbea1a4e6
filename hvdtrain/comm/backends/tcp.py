"""Ranks joined by TCP streams of our own: nothing polls, nothing is sent but what is asked for.

For the strategies that exchange one vector per round. The ranks of a host add their vectors up in its first rank, its
leader; the leaders exchange over the network, one stream for each pair of hosts; then each shares the outcome with its
host. So the network carries each host's data once, however many ranks it has.

Leaders sum in a ring: each sends to the next and receives from the one before, so that each link carries one stream in
each direction and nobody can run ahead. What is not summed goes pairwise: in round s host i sends to host i+s and
receives from host i-s, so that no two hosts send to a third at once as long as they keep step, for which long messages
wait until their receiver is ready (what a queue of a slow link loses, TCP finds out only after its timeout of 200 ms).
A rank that waits sleeps in poll(2); Horovod's and Open MPI's threads would take turns with the computation instead, on
a processor that is the scarcest thing a small host has.

Found through the meeting, like the native strategies'. Who connects must know the job's secret (`sentinel.trust`).
A message is its length (8 bytes) and its bytes; one that is longer than its receiver can have use for is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from hvdtrain.comm.backends.base import Alone, Hosts, Meeting, PeerLost, Reach
from hvdtrain.sentinel import auth, waiting
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

PATIENCE_S = 60.0
"""For the other ranks to connect"""
SMALL_BYTES = 2048
"""Vectors up to this size are sent whole to every host, all at once: one latency instead of 2(h-1)"""
QUEUE_BYTES = 32 * 1024
"""What the queue of a slow link takes of two senders at once"""
NOTHING = np.empty(0, np.uint8)
WAKE_BYTES = 64 * 1024
"""A receiver is woken for so much at once, and not for each packet"""
LENGTH_BYTES = 8
HEAD_BYTES = 16
"""Before what a rank gives to all: its number and the length"""
MOST_BYTES = 1 << 32
"""The longest message that is accepted when the receiver does not know its length. While vectors are summed, the limit
is twice the vector."""
SLACK_BYTES = 1 << 16


class Stream:
    """One connection to another rank. `local`: that rank is on this host."""

    def __init__(self, connected: socket.socket, rank: int, *, local: bool = False) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setblocking(False)
        self.socket, self.rank, self.local = connected, rank, local
        self.awaited = True
        """Whether the rank does nothing else while a thread waits at this stream"""

    def queued(self, which: int) -> int:
        """Bytes that have arrived and are unread (FIONREAD), or are still to be sent (TIOCOUTQ); tcp(7)."""
        return int(struct.unpack("i", fcntl.ioctl(self.socket, which, bytes(4)))[0])


class StreamHosts:
    """This host's streams to the leaders of the others; see `collectives.Hosts`. `streams[i]` is None for itself."""

    def __init__(self, streams: Sequence[Stream | None]) -> None:
        self._streams = streams
        self.count = len(streams)
        self.index = list(streams).index(None)
        self.sent_bytes = 0
        self.most_bytes = MOST_BYTES
        """That another host may send at once"""

    def pairwise(self, part: Callable[[int], np.ndarray], *, even: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        rounds = self._rounds()
        parts: Iterator[np.ndarray] = map(part, [target for target, _ in rounds])
        first = list(itertools.islice(parts, 1 if even else None))
        parts = itertools.chain(first, parts)
        largest = max((each.nbytes for each in first), default=0)
        if small := largest <= SMALL_BYTES:  # fits into any queue: all at once
            for (target, _), each in zip(rounds, parts, strict=True):
                self._swap(target, each, None)
        for target, source in rounds:
            mine = None if small else next(parts)
            if even and largest > QUEUE_BYTES:  # the target says that it has received what another sent it
                self._swap(source, NOTHING, target)
            yield source, self._swap(target, mine, source)

    def exchange(self, parts: Sequence[np.ndarray], *, even: bool = False) -> list[np.ndarray]:
        found = list(parts)
        for host, theirs in self.pairwise(parts.__getitem__, even=even):
            found[host] = np.frombuffer(theirs, parts[0].dtype)
        return found

    def gather(self, part: np.ndarray, *, even: bool = False) -> list[np.ndarray]:
        return self.exchange([part] * self.count, even=even)

    def collected(self, part: np.ndarray) -> list[np.ndarray]:
        after, before = (self.index + 1) % self.count, (self.index - 1) % self.count
        found = [part] * self.count
        for step in range(self.count - 1):  # each part goes round, one host further in every round
            theirs = (before - step) % self.count
            found[theirs] = self._swap(after, found[(self.index - step) % self.count], before)
        return found

    def sum(self, values: np.ndarray) -> None:
        if self.count == 1:
            return
        if values.nbytes <= SMALL_BYTES or values.size < self.count:
            parts = self.gather(values.copy())
            np.copyto(values, parts[0])
            for part in parts[1:]:
                values += part
            return
        borders = [values.size * host // self.count for host in range(self.count + 1)]
        chunks = [values[begin:end] for begin, end in itertools.pairwise(borders)]
        arrived = np.empty(max(chunk.size for chunk in chunks), values.dtype)
        after, before = (self.index + 1) % self.count, (self.index - 1) % self.count
        at = [chunks[(self.index - step) % self.count] for step in range(2 * self.count - 1)]
        for step in range(self.count - 1):  # a chunk goes round and grows; its last host has the sum
            theirs = self._swap(after, at[step], before, arrived[: at[step + 1].size])
            at[step + 1] += theirs
        for step in range(self.count - 1, 2 * (self.count - 1)):  # and goes round again
            self._swap(after, at[step], before, at[step + 1])

    def _rounds(self) -> list[tuple[int, int]]:
        """Whom to send to and whom to receive from, round by round."""
        return [((self.index + s) % self.count, (self.index - s) % self.count) for s in range(1, self.count)]

    def _swap(
        self, target: int | None, data: np.ndarray | None, source: int | None, into: np.ndarray | None = None
    ) -> np.ndarray:
        """Sends `data` to one host while receiving from another, into `into` if it is given."""
        self.sent_bytes += 0 if data is None else data.nbytes
        to, back = (None if host is None else self._streams[host] for host in (target, source))
        return swap(to, data, back, into, self.most_bytes)


class StreamRanks(Alone):
    """See `collectives.Alone`; what `Alone` does in a training step is right here too: nothing."""

    carrier = "streams"

    def __init__(self, meeting: Meeting, reach: Reach) -> None:
        """Raises Failure (69) if a rank cannot be reached."""
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self.secret = meeting.secret
        with socket.create_server((reach.address, 0), backlog=socket.SOMAXCONN) as listener:  # strangers may come first
            mine = f"{socket.gethostname()} {reach.address} {listener.getsockname()[1]}"
            told = [each.decode().split() for each in meeting.gather(mine.encode())]
            names = [(host, address) for host, address, _ in told]
            leaders = [names.index(name) for name in dict.fromkeys(names)]
            leader = names.index(names[self.rank])
            targets, awaited = [leader], set[int]()
            if leader == self.rank:
                targets = [rank for rank in leaders if rank < self.rank]
                awaited = {rank for rank in range(self.size) if names[rank] == names[self.rank]} - {self.rank}
                awaited |= {rank for rank in leaders if rank > self.rank}
            me = auth.Party(meeting.secret, b"streams", self.rank)
            reached, arrived = joined(told, me, targets, listener, awaited)
            others = reached | arrived
        self._leader = None if leader == self.rank else others.pop(leader)
        self._members = [others[rank] for rank in sorted(others) if names[rank] == names[self.rank]]
        self._streams = [others.get(rank) for rank in leaders]
        self.hosts_count = len(leaders)
        self.network = StreamHosts(self._streams) if self._leader is None else None
        self._scratch = np.empty(0, np.float32)

    def leave(self) -> None:
        """Waits for nobody: what was sent arrives, and who still waits for more of this rank learns that it is gone."""
        for stream in (*self._members, *self._streams, self._leader):
            if stream is not None:
                stream.socket.close()

    # --- small host arrays --------------------------------------------------------------------------------------

    def gather(self, mine: bytes) -> list[bytes]:
        return [each.tobytes() for each in self._everyones(np.frombuffer(mine, np.uint8), StreamHosts.gather)]

    def _everyones(
        self, mine: np.ndarray, between: Callable[[StreamHosts, np.ndarray], list[np.ndarray]]
    ) -> list[np.ndarray]:
        """Bytes of all ranks in rank order; `between` hosts they go in one piece for each."""
        own = np.concatenate([np.array([self.rank, mine.size]).view(np.uint8), mine])
        if self._leader is not None:
            swap(self._leader, own, None)
            blocks = [swap(None, None, self._leader) for _ in range(self.hosts_count)]
        else:
            assert self.network is not None
            self.network.most_bytes = MOST_BYTES
            blocks = [own, *(swap(None, None, member) for member in self._members)]
            blocks = between(self.network, np.concatenate(blocks) if self._members else own)
            for member, block in itertools.product(self._members, blocks):
                swap(member, block, None)
        found = {}
        for block in blocks:
            while block.size:
                rank, length = block[:HEAD_BYTES].view(np.int64).tolist()
                found[rank], block = np.split(block[HEAD_BYTES:], [length])
        return [found[rank] for rank in range(self.size)]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        flat = np.array(values).reshape(-1)
        counted = self.sent_bytes, self.local_sent_bytes
        with self.hosts(flat) as hosts:
            if hosts is not None:
                hosts.sum(flat)
        self.sent_bytes, self.local_sent_bytes = counted  # which are those of the strategy's exchanges
        return flat.reshape(values.shape)

    # --- vectors ------------------------------------------------------------------------------------------------

    def collect(self, mine: np.ndarray) -> list[np.ndarray]:
        before = 0 if self.network is None else self.network.sent_bytes
        found = self._everyones(mine.view(np.uint8), StreamHosts.collected)
        if self.network is None:
            self.local_sent_bytes += mine.nbytes
        else:
            self.sent_bytes += self.network.sent_bytes - before
            self.local_sent_bytes += sum(each.nbytes for each in found) * len(self._members)
        return found

    @contextlib.contextmanager
    def hosts(self, vector: np.ndarray) -> Iterator[Hosts | None]:
        """See `collectives.Alone`. Raises PeerLost."""
        if self._leader is not None:
            swap(self._leader, vector, None)
            yield None
            swap(None, None, self._leader, vector)
            self.local_sent_bytes += vector.nbytes
            return
        assert self.network is not None
        before = self.network.sent_bytes
        self.network.most_bytes = 2 * vector.nbytes + SLACK_BYTES  # of topk's, each number with its place
        if self._members and self._scratch.nbytes != vector.nbytes:
            self._scratch = np.empty_like(vector)
        for member in self._members:
            vector += swap(None, None, member, self._scratch.view(vector.dtype))
        yield self.network
        for member in self._members:
            swap(member, vector, None)
        self.sent_bytes += self.network.sent_bytes - before
        self.local_sent_bytes += vector.nbytes * len(self._members)


def connect(
    meeting: Meeting, reach: Reach, purpose: bytes, targets: Iterable[int], awaited: set[int]
) -> dict[int, Stream]:
    """By rank: streams to the `targets`, and from the `awaited` ranks. All ranks of the meeting call it. Raises Failure
    (69)."""
    with socket.create_server((reach.address, 0), backlog=socket.SOMAXCONN) as listener:
        mine = f"{socket.gethostname()} {reach.address} {listener.getsockname()[1]}"
        told = [each.decode().split() for each in meeting.gather(mine.encode())]
        reached, arrived = joined(told, auth.Party(meeting.secret, purpose, meeting.rank), targets, listener, awaited)
    return reached | arrived


def joined(
    told: Sequence[Sequence[str]],
    me: auth.Party,
    targets: Iterable[int],
    listener: socket.socket | None,
    awaited: set[int],
) -> tuple[dict[int, Stream], dict[int, Stream]]:
    """Streams to the `targets`, which accept, and from the `awaited` ranks, which connect to the listener.

    `told[rank]` is its host, address and port. Raises Failure (69) if one cannot be reached or does not come.
    """
    arrived: dict[int, socket.socket] = {}

    def accept() -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, because this rank has failed to connect
            if listener is not None:
                arrived.update(auth.accepted(listener, me, awaited, PATIENCE_S))

    accepting = threading.Thread(target=accept, daemon=True)  # two ranks may each wait for the other to accept
    accepting.start()
    here = told[me.number][:2]
    found = {rank: Stream(_connected(told[rank], me, rank), rank, local=told[rank][:2] == here) for rank in targets}
    accepting.join()
    if missing := ", ".join(str(rank) for rank in sorted(awaited - set(arrived))):
        raise Failure(
            f"{socket.gethostname()}: rank {missing} did not connect within {PATIENCE_S:g} s: open TCP between the "
            "hosts, see `hvdtrain doctor`",
            exits.UNREACHABLE,
        )
    return found, {rank: Stream(each, rank, local=told[rank][:2] == here) for rank, each in arrived.items()}


def _connected(told: Sequence[str], me: auth.Party, rank: int) -> socket.socket:
    host, address, port = told
    try:
        return auth.connected(address, int(port), me, rank, PATIENCE_S)
    except OSError as error:
        raise Failure(
            f"rank {me.number} on {socket.gethostname()} cannot connect to rank {rank} on {host} at {address}, port "
            f"{port} ({error}): open TCP between the hosts, see `hvdtrain doctor`",
            exits.UNREACHABLE,
        ) from error


def swap(
    target: Stream | None,
    data: np.ndarray | None,
    source: Stream | None,
    into: np.ndarray | None = None,
    most_bytes: int = MOST_BYTES,
) -> np.ndarray:
    """Sends a message to one rank while receiving one from another; either may be None. Returns what was received.

    With `into`, a message of another length is an error, as is one of more than `most_bytes` without: the ranks do not
    agree on what they do. Raises PeerLost.
    """
    sending: list[memoryview] = []
    if data is not None:
        sending = [memoryview(data.nbytes.to_bytes(LENGTH_BYTES, "little")), *raw(data)]
    received = np.empty(0, np.uint8) if into is None else into
    header = bytearray(LENGTH_BYTES)
    receiving: memoryview | None = None if source is None else memoryview(header)
    in_header = True
    while sending or receiving is not None:
        sent = 0
        if sending and target is not None:
            left = sent = _try(target, functools.partial(target.socket.sendmsg, sending))
            while sending and left >= len(sending[0]):
                left -= len(sending.pop(0))
            if sending:
                sending[0] = sending[0][left:]
        got = 0
        if receiving is not None and source is not None:
            got = _try(source, functools.partial(source.socket.recv_into, receiving))
            receiving = receiving[got:]
        if receiving is not None and not receiving:
            if in_header:
                in_header, length = False, int.from_bytes(header, "little")
                if into is None:
                    if source is not None and length > most_bytes:
                        raise RuntimeError(f"rank {source.rank} sent {length} bytes where {most_bytes} are the most")
                    received = np.empty(length, np.uint8)
                elif source is not None and length != into.nbytes:
                    raise RuntimeError(f"rank {source.rank} sent {length} bytes where {into.nbytes} were expected")
                receiving = next(iter(raw(received)), None)
            else:
                receiving = None
        if not sent and not got:
            _wait(target if sending else None, source, len(receiving) if receiving is not None else 0)
    return received


def raw(array: np.ndarray) -> list[memoryview]:
    """Its bytes, in place: one piece, or none."""
    return [array.data.cast("B")] if array.size else []


def _try(stream: Stream, move: Callable[[], int]) -> int:
    """Bytes moved, 0 if it would have to wait."""
    try:
        moved = move()
    except BlockingIOError:
        return 0
    except OSError as error:
        raise PeerLost(f"rank {stream.rank}: {error}") from error
    if moved == 0:
        raise PeerLost(f"rank {stream.rank} closed its connection")
    return moved


def _wait(target: Stream | None, source: Stream | None, missing: int) -> None:
    """Sleeps until one can be written to, or the other has the `missing` bytes (or enough of them to be worth it)."""
    events: dict[socket.socket, int] = {}
    if source is not None and missing:
        source.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(missing, WAKE_BYTES))  # socket(7)
        events[source.socket] = select.POLLIN
    if target is not None:
        events[target.socket] = events.get(target.socket, 0) | select.POLLOUT
    poll = select.poll()
    for connection, event in events.items():
        poll.register(connection, event)
    every_ms = None if waiting.every_s is None else 1000 * waiting.every_s
    if not poll.poll(every_ms):
        _wait_long(poll, every_ms, target, source)
    waiting.moves()


def _wait_long(poll: select.poll, every_ms: float | None, target: Stream | None, source: Stream | None) -> None:
    """Tells the sentinel that this rank waits, or that bytes move, though fewer than poll(2) wakes it for."""
    began, before = time.monotonic(), None
    while not poll.poll(every_ms):
        queued = (target and target.queued(termios.TIOCOUTQ), source and source.queued(termios.FIONREAD))
        if queued != before and before is not None:
            began = time.monotonic()
            waiting.moves()
        elif all(stream is None or stream.awaited for stream in (source, target)):
            waiting.waits(time.monotonic() - began)
        before = queued
