"""The connections of `calls`: one between every two ranks for arrays, and one to rank 0 for messages."""

from __future__ import annotations

import resource

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.stream import Stream, connect_ranks

CHUNK_BYTES = 1 << 16
OTHER_FILES = 512
"""Files that a rank may open besides these connections"""


class MessageConnection:
    """Messages to and from one other rank, in order. No method blocks."""

    def __init__(self, stream: Stream) -> None:
        self.socket, self.rank = stream.socket, stream.rank
        self.closed_because = ""
        """Why no more messages can come; empty while the connection is open"""
        self.unsent = bytearray()
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        self.unsent += len(message).to_bytes(4, "little") + message
        self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._close(error)

    def receive(self) -> list[bytes]:
        """The messages that have arrived completely."""
        try:
            while not self.closed_because:
                chunk = self.socket.recv(CHUNK_BYTES)
                self._received += chunk
                if not chunk:
                    self._close("it closed its connection")
                elif len(chunk) < CHUNK_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._close(error)
        messages, begin = [], 4
        while begin <= len(self._received):
            end = begin + int.from_bytes(self._received[begin - 4 : begin], "little")
            if end > len(self._received):
                break
            messages.append(bytes(self._received[begin:end]))
            begin = end + 4
        del self._received[: begin - 4]
        return messages

    def _close(self, cause: object) -> None:
        self.unsent.clear()
        self.closed_because = f"rank {self.rank} has ended ({cause})"


def connect_all(rendezvous: Rendezvous, endpoint: Endpoint) -> tuple[dict[int, Stream], dict[int, MessageConnection]]:
    """Connects every rank to every other. Collective.

    Returns the streams for arrays and the connections for messages, both by rank. Only rank 0 has messages with all
    ranks, the others with rank 0. Raises Failure (69) if a rank cannot be reached.
    """
    rank, size = rendezvous.rank, rendezvous.size
    if size == 1:
        return {}, {}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < (needed := 2 * size + OTHER_FILES):  # the usual limit is 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard < 0 else min(needed, hard), hard))
    higher_ranks = set(range(rank + 1, size))
    streams = connect_ranks(rendezvous, endpoint, b"calls", range(rank), higher_ranks)
    accepted = higher_ranks if rank == 0 else set[int]()
    messages = connect_ranks(rendezvous, endpoint, b"calls' order", range(min(rank, 1)), accepted)
    return streams, {other: MessageConnection(stream) for other, stream in messages.items()}
