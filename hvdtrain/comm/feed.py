"""How a host that has come back gets the state of a job while the others train.

Rank 0 sends it a copy of the state. From then on it records what all hosts receive at the end of each exchange, which
is as small as the strategy's messages, and sends that too. The host repeats the exchanges with these messages instead
of with other hosts, and so makes the same changes to its copy. When it has caught up, rank 0 admits it.

The messages of the first phase of an exchange are not needed: they only lead to the sums that the last phase sends to
all. Residuals depend on them, so the residuals of the repetition are wrong and are dropped.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, LeaderGroup
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.stream import Stream, listen, swap
from hvdtrain.sentinel import auth

GIVER, TAKER = 0, 1
"""The numbers of rank 0 and of the host that has come back, when they connect"""
CONNECT_S = 30.0
POLL_S = 0.1
ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""A host that only receives notices after 11 s that rank 0's host is gone. See tcp(7)"""
ACCEPT_S = 600.0
"""Time for rank 0 to connect, after which the host listens at another place"""

Exchange = list[bytes]
"""The messages of one exchange, in order"""


class Recorder(LeaderGroup):
    """Leaders whose exchanges are recorded. An exchange is complete when it is `sealed`."""

    def __init__(self, leaders: LeaderGroup) -> None:
        self._leaders, self.count, self.index = leaders, leaders.count, leaders.index
        self._current: Exchange = []
        self._complete: queue.SimpleQueue[Exchange] = queue.SimpleQueue()

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._leaders.sent_bytes

    def all_reduce(self, values: np.ndarray) -> None:
        self._leaders.all_reduce(values)
        self._current.append(values.tobytes())

    def all_to_all_streamed(
        self, part: Callable[[int], np.ndarray], *, even: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        return self._leaders.all_to_all_streamed(part, even=even)

    def all_gather_streamed(self, part: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        messages = [b""] * self.count
        for host, message in self._leaders.all_gather_streamed(part):
            messages[host] = message.tobytes()
            yield host, message
        self._current += messages

    def seal(self) -> None:
        """The exchange since the last call counts on all ranks. Called in the thread that exchanges."""
        if self._current:
            self._complete.put(self._current)
            self._current = []

    def take(self) -> list[Exchange]:
        """Return the exchanges that have been sealed since the last call."""
        return [self._complete.get() for _ in range(self._complete.qsize())]


class Player(LeaderGroup):
    """Leaders that are not there: each exchange receives recorded messages. Sends nothing."""

    def __init__(self, count: int, exchanges: Sequence[Exchange]) -> None:
        self.count = count
        self._messages = iter([message for exchange in exchanges for message in exchange])

    def all_reduce(self, values: np.ndarray) -> None:
        values[:] = np.frombuffer(next(self._messages), values.dtype)

    def all_gather_streamed(self, part: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        for host in range(self.count):
            yield host, np.frombuffer(next(self._messages), np.uint8)


class Place(NamedTuple):
    """Where the leader of a host that has come back listens."""

    number: int
    """The launcher's number of that rank"""
    address: str
    port: int


class Feed:
    """Sends the state of rank 0, and then recorded exchanges, to a host that has come back."""

    def __init__(self, place: Place, job_key: bytes, state: bytes) -> None:
        self.place, self._me = place, auth.Party(job_key, b"feed", GIVER)
        self._changed = threading.Condition()
        self._waiting = [state]
        self._acknowledged, self._added = 0, 1
        self._stream: Stream | None = None
        self.state_bytes, self.waiting_bytes = len(state), len(state)
        self.failed = self._closed = False
        threading.Thread(target=self._send, name="hvdtrain-feed", daemon=True).start()

    def add(self, message: bytes) -> None:
        with self._changed:
            self._waiting.append(message)
            self._added += 1
            self.waiting_bytes += len(message)
            self._changed.notify_all()

    @property
    def behind(self) -> int:
        """The number of messages that the host has not used yet."""
        return self._added - self._acknowledged

    @property
    def is_unreachable(self) -> bool:
        """Whether it has failed to connect."""
        return self.failed and self._stream is None

    @property
    def has_state(self) -> bool:
        """Whether the host has the state."""
        return self._acknowledged > 0

    def finish(self, wanted: Callable[[], bool]) -> bool:
        """Wait until the host has used all messages. Returns False if it is lost, or not `wanted` any more."""
        with self._changed:
            while self.behind and not self.failed and wanted():
                self._changed.wait(POLL_S)
            return not self.behind

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._stream is not None:
                _end(self._stream)

    def _send(self) -> None:
        try:
            place = self.place
            connection = auth.connect(place.address, place.port, self._me, TAKER, CONNECT_S)
            stream = Stream(connection, place.number)
            stream.blocks_rank = False
            with self._changed:
                self._stream = stream
            while (message := self._next()) is not None:
                swap(stream, np.frombuffer(message, np.uint8), None)
                swap(None, None, stream)
                with self._changed:
                    self._acknowledged += 1
                    self.waiting_bytes -= len(message)
                    self._changed.notify_all()
            _end(stream)
        except OSError:  # PeerLost too: that host is lost, and the launcher reports it to the others
            with self._changed:
                self.failed = True
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.pop(0)


class Follower:
    """The other end of a `Feed`, in the leader of a host that has come back."""

    def __init__(self, endpoint: Endpoint, job_key: bytes, number: int) -> None:
        self._listener, self._me = listen(endpoint), auth.Party(job_key, b"feed", TAKER)
        self.place = Place(number, endpoint.address, self._listener.getsockname()[1])
        self._stream: Stream | None = None
        self._messages: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="hvdtrain-feed", daemon=True).start()

    def stop(self) -> None:
        """`next` returns None after the messages that have arrived. Called in any thread."""
        self._messages.put(None)

    def next(self) -> np.ndarray | None:
        """Wait for the next message. Returns None after `stop`, and if rank 0 is lost."""
        return self._messages.get()

    def acknowledge(self) -> None:
        """Report to rank 0 that the last message has been used."""
        assert self._stream is not None
        try:
            swap(self._stream, np.empty(0, np.uint8), None)
        except PeerLost:
            self.stop()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        if self._stream is not None:
            _end(self._stream)

    def _receive(self) -> None:
        try:
            connections = auth.accept(self._listener, self._me, {GIVER}, ACCEPT_S)
            for option, value in ALIVE.items():
                connections[GIVER].setsockopt(socket.IPPROTO_TCP, option, value)
            self._stream = Stream(connections[GIVER], GIVER)
            self._stream.blocks_rank = False
            while True:
                self._messages.put(swap(None, None, self._stream))
        except (OSError, ValueError, KeyError):
            self._messages.put(None)


def _end(stream: Stream) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        stream.socket.shutdown(socket.SHUT_RDWR)
