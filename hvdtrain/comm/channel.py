"""A connection between two ranks that sends and receives while both compute."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hvdtrain.comm.backends.base import Meeting, Reach
from hvdtrain.comm.backends.tcp import Stream, connect, swap
from hvdtrain.sentinel import waiting

T = TypeVar("T")

AHEAD = 2
"""Messages that wait here at most: to be sent, and to be received. A rank that sends more waits"""


class Channel:
    """Messages to and from one other rank, in order. One thread sends, one receives ahead of what is asked for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        stream.awaited = False
        self._out: queue.Queue[np.ndarray | None] = queue.Queue(AHEAD)
        self._in: queue.Queue[np.ndarray | Exception] = queue.Queue(AHEAD)
        self._lost: OSError | None = None
        self.sent_bytes = self.local_sent_bytes = 0
        self._sender = threading.Thread(target=self._sending, name="hvdtrain-send", daemon=True)
        self._sender.start()
        threading.Thread(target=self._receiving, name="hvdtrain-receive", daemon=True).start()

    def send(self, message: np.ndarray) -> None:
        """Goes out as soon as those before have; it must not be changed any more. Raises PeerLost."""
        if self._lost is not None:
            raise self._lost
        if self._stream.local:
            self.local_sent_bytes += message.nbytes
        else:
            self.sent_bytes += message.nbytes
        _patiently(lambda wait_s: self._out.put(message, timeout=wait_s))

    def receive(self) -> np.ndarray:
        """The next message, as uint8. Raises PeerLost."""
        message = _patiently(lambda wait_s: self._in.get(timeout=wait_s))
        if isinstance(message, Exception):
            raise message
        return message

    def leave(self) -> None:
        """Waits until all that was sent has gone out, and closes the connection."""
        self._out.put(None)
        self._sender.join()
        if self._lost is None:
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        self._stream.socket.close()

    def _sending(self) -> None:
        while (message := self._out.get()) is not None:
            if self._lost is None:
                try:
                    swap(self._stream, np.ascontiguousarray(message), None)
                except OSError as error:
                    self._lost = error  # what follows is taken and dropped, so that nobody waits to give it

    def _receiving(self) -> None:
        while True:
            try:
                self._in.put(swap(None, None, self._stream))
            except Exception as error:  # whatever it is: somebody waits for the message
                return self._in.put(error)


def _patiently(action: Callable[[float | None], T]) -> T:
    """What an action of a queue returns, which may wait; the sentinel is told so."""
    began = time.monotonic()
    while True:
        try:
            return action(waiting.every_s)
        except (queue.Empty, queue.Full):
            waiting.waits(time.monotonic() - began)


def neighbours(meeting: Meeting, reach: Reach, before: int | None, after: int | None) -> list[Channel | None]:
    """Channels to two other ranks, None for none. All ranks of the meeting call it. Raises Failure (69)."""
    targets = [] if before is None else [before]
    found = connect(meeting, reach, b"channels", targets, set() if after is None else {after})
    return [None if rank is None else Channel(found[rank]) for rank in (before, after)]
