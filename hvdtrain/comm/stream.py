"""TCP connections between two ranks: how they are made, and how a message is sent while another is received.

A message is its length (8 bytes) followed by its bytes. The receiver rejects a message that is longer than it can use.
A waiting thread sleeps in poll(2), so it takes no processor time from the computation.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.errors import PeerLost
from hvdtrain.sentinel import auth, waiting
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

PATIENCE_S = 60.0
"""Time for the other ranks to connect"""
WAKE_BYTES = 256 * 1024
"""A receiver is woken once this much has arrived, instead of for each packet. With 64 KiB, sums of 5.34 MB at 1 Gbit/s
took 1.1 to 1.8 times the processor time"""
LENGTH_BYTES = 8
ENDED = b"\xff" * LENGTH_BYTES
"""What a rank sends instead of a message when its script has ended"""
MAX_MESSAGE_BYTES = 1 << 32
"""Longest message accepted if the receiver has no closer limit"""


class Stream:
    """A connection to another rank. `local`: the rank is on this host."""

    def __init__(self, connection: socket.socket, rank: int, *, local: bool = False) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        self.socket, self.rank, self.local = connection, rank, local
        self.blocks_rank = True
        """Whether the whole rank is blocked while a thread waits for this stream; False for background threads"""

    def queued(self, which: int) -> int:
        """Bytes received but unread (FIONREAD), or not yet sent (TIOCOUTQ); see tcp(7)."""
        return int(struct.unpack("i", fcntl.ioctl(self.socket, which, bytes(4)))[0])


# --- making connections -----------------------------------------------------------------------------------------------


class Listening(NamedTuple):
    """Where a rank listens."""

    host: str
    address: str
    port: int

    @property
    def machine(self) -> tuple[str, str]:
        """Equal for ranks of the same host, which tests on one machine distinguish by address."""
        return self.host, self.address


def listen(endpoint: Endpoint) -> socket.socket:
    # The backlog is long because strangers' connections may come first.
    return socket.create_server((endpoint.address, 0), backlog=socket.SOMAXCONN)


def exchange_ports(
    gather_bytes: Callable[[bytes], Iterable[bytes]], endpoint: Endpoint, listener: socket.socket | None
) -> list[Listening]:
    """Where each rank listens, in rank order; port 0 for a rank without a listener. Collective."""
    port = listener.getsockname()[1] if listener else 0
    fields = [
        text.decode().split() for text in gather_bytes(f"{socket.gethostname()} {endpoint.address} {port}".encode())
    ]
    return [Listening(host, address, int(port)) for host, address, port in fields]


def connect_ranks(
    rendezvous: Rendezvous, endpoint: Endpoint, purpose: bytes, targets: Iterable[int], expected: Collection[int]
) -> dict[int, Stream]:
    """Streams by rank: to the `targets`, and from the `expected` ranks. Collective. Raises Failure (69)."""
    with listen(endpoint) as listener:
        ranks = exchange_ports(rendezvous.gather_bytes, endpoint, listener)
        me = auth.Party(rendezvous.job_key, purpose, rendezvous.rank)
        connected, accepted = open_streams(ranks, me, targets, listener, expected)
    return connected | accepted


def open_streams(
    ranks: list[Listening],
    me: auth.Party,
    targets: Iterable[int],
    listener: socket.socket | None,
    expected: Collection[int],
    patience_s: float | None = None,
) -> tuple[dict[int, Stream], dict[int, Stream]]:
    """Streams to the `targets`, which accept, and streams from the `expected` ranks, which connect to the listener.

    `patience_s`: None for PATIENCE_S. Raises Failure (69) if a target cannot be reached or an expected rank does not
    connect.
    """
    limit_s = patience_s or PATIENCE_S
    sockets: dict[int, socket.socket] = {}

    def accept() -> None:
        with contextlib.suppress(OSError, ValueError):  # the main thread failed to connect and closed the listener
            if listener is not None:
                sockets.update(auth.accept(listener, me, set(expected), limit_s))

    accepting = threading.Thread(target=accept, daemon=True)  # two ranks may each wait for the other to accept
    accepting.start()
    machine = ranks[me.number].machine
    connected = {
        rank: Stream(_connect(ranks[rank], me, rank, limit_s), rank, local=ranks[rank].machine == machine)
        for rank in targets
    }
    accepting.join()
    if missing := ", ".join(str(rank) for rank in sorted(set(expected) - set(sockets))):
        raise Failure(
            f"{socket.gethostname()}: rank {missing} did not connect within {limit_s:g} s; hint: open TCP between "
            "the hosts, see `hvdtrain doctor`",
            exits.UNREACHABLE,
        )
    return connected, _streams(sockets, ranks, machine)


def _streams(
    sockets: Mapping[int, socket.socket], ranks: list[Listening], machine: tuple[str, str]
) -> dict[int, Stream]:
    return {rank: Stream(each, rank, local=ranks[rank].machine == machine) for rank, each in sockets.items()}


def _connect(target: Listening, me: auth.Party, rank: int, patience_s: float) -> socket.socket:
    try:
        return auth.connect(target.address, target.port, me, rank, patience_s)
    except OSError as error:
        raise Failure(
            f"rank {me.number} on {socket.gethostname()} cannot connect to rank {rank} on {target.host} at "
            f"{target.address}, port {target.port} ({error}); hint: open TCP between the hosts, see `hvdtrain doctor`",
            exits.UNREACHABLE,
        ) from error


# --- messages ---------------------------------------------------------------------------------------------------------


def swap(
    target: Stream | None,
    data: np.ndarray | None,
    source: Stream | None,
    into: np.ndarray | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> np.ndarray:
    """Send a message to one rank while receiving one from another; either may be None. Return the received message.

    Raises RuntimeError if a message does not have the length of `into`, or without `into` exceeds `max_bytes`: then
    the ranks disagree on what they do. Raises PeerLost.
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
                if header == ENDED and source is not None:
                    raise _ended(source)
                in_header, length = False, int.from_bytes(header, "little")
                if into is None:
                    if source is not None and length > max_bytes:
                        raise RuntimeError(f"rank {source.rank} sent {length} bytes, but at most {max_bytes} may come")
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
    """The bytes of an array, without a copy, as one piece; an empty list for an empty array."""
    return [array.data.cast("B")] if array.size else []


def _try(stream: Stream, move: Callable[[], int]) -> int:
    """The number of bytes moved; 0 if the call would block."""
    try:
        moved = move()
    except BlockingIOError:
        return 0
    except OSError as error:
        last = b""
        with contextlib.suppress(OSError):  # it may have said why it receives nothing more
            last = stream.socket.recv(WAKE_BYTES)
        if last.endswith(ENDED):
            raise _ended(stream) from error
        raise PeerLost(f"rank {stream.rank}: {error}") from error
    if moved == 0:
        raise PeerLost(f"rank {stream.rank} closed its connection")
    return moved


def _ended(stream: Stream) -> PeerLost:
    return PeerLost(f"the script of rank {stream.rank} has ended, and this one makes more steps")


def _wait(target: Stream | None, source: Stream | None, missing: int) -> None:
    """Sleep until the target can be written to, or `missing` bytes (at most WAKE_BYTES) can be read from the source."""
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
    waiting.report_progress()


def _wait_long(poll: select.poll, every_ms: float | None, target: Stream | None, source: Stream | None) -> None:
    """Keep waiting, and report to the sentinel that this rank waits or that bytes move.

    Bytes move if the queues change, even though too few arrived for poll(2) to return.
    """
    began, before = time.monotonic(), None
    while not poll.poll(every_ms):
        queued = (target and target.queued(termios.TIOCOUTQ), source and source.queued(termios.FIONREAD))
        if queued != before and before is not None:
            began = time.monotonic()
            waiting.report_progress()
        elif all(stream is None or stream.blocks_rank for stream in (source, target)):
            waiting.report_wait(time.monotonic() - began)
        before = queued
