"""A connection between two ranks that sends and receives in the background while both compute."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.stream import Stream, connect_ranks, swap
from hvdtrain.sentinel import waiting

T = TypeVar("T")

AHEAD = 2
"""Maximum number of messages that wait to be sent, and that wait to be received; a sender blocks beyond that"""


class Channel:
    """Messages to and from one other rank, in order. One thread sends, another receives ahead of `receive`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        stream.blocks_rank = False
        self._outgoing: queue.Queue[np.ndarray | None] = queue.Queue(AHEAD)
        self._incoming: queue.Queue[np.ndarray | Exception] = queue.Queue(AHEAD)
        self._send_error: OSError | None = None
        self.sent_bytes = self.local_sent_bytes = 0
        self._sender = threading.Thread(target=self._send_all, name="hvdtrain-send", daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive_all, name="hvdtrain-receive", daemon=True).start()

    def send(self, message: np.ndarray) -> None:
        """Send a message after the previous ones. The array must not change any more. Raises PeerLost."""
        if self._send_error is not None:
            raise self._send_error
        if self._stream.local:
            self.local_sent_bytes += message.nbytes
        else:
            self.sent_bytes += message.nbytes
        _wait_reporting(lambda wait_s: self._outgoing.put(message, timeout=wait_s))

    def receive(self) -> np.ndarray:
        """The next message, as uint8. Raises PeerLost."""
        message = _wait_reporting(lambda wait_s: self._incoming.get(timeout=wait_s))
        if isinstance(message, Exception):
            raise message
        return message

    def shutdown(self) -> None:
        """Wait until all messages have been sent, and close the connection."""
        self._outgoing.put(None)
        self._sender.join()
        if self._send_error is None:
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        self._stream.socket.close()

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            if self._send_error is None:
                try:
                    swap(self._stream, np.ascontiguousarray(message), None)
                except OSError as error:
                    self._send_error = error  # later messages are taken and dropped, so that no sender blocks

    def _receive_all(self) -> None:
        while True:
            try:
                self._incoming.put(swap(None, None, self._stream))
            except Exception as error:  # of any kind: the receiver must not wait for ever
                return self._incoming.put(error)


def _wait_reporting(action: Callable[[float | None], T]) -> T:
    """Return the result of a blocking queue operation, and report the wait to the sentinel."""
    began = time.monotonic()
    while True:
        try:
            return action(waiting.every_s)
        except (queue.Empty, queue.Full):
            waiting.report_wait(time.monotonic() - began)


def neighbours(
    rendezvous: Rendezvous, endpoint: Endpoint, before: int | None, after: int | None
) -> list[Channel | None]:
    """Channels to the ranks `before` and `after`; None where the rank is None. Collective. Raises Failure (69)."""
    targets = [] if before is None else [before]
    streams = connect_ranks(rendezvous, endpoint, b"channels", targets, set() if after is None else {after})
    return [None if rank is None else Channel(streams[rank]) for rank in (before, after)]
