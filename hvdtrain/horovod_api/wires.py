"""What joins the ranks for `calls`: a stream from each to each for arrays, and one to rank 0 for messages."""

from __future__ import annotations

import resource

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.stream import Stream, connect_ranks

CHUNK_BYTES = 1 << 16
OTHER_FILES = 512
"""That a rank may have open beside these streams"""


class Wire:
    """Messages to and from another rank, in order; nobody waits here."""

    def __init__(self, stream: Stream) -> None:
        self.socket, self.rank = stream.socket, stream.rank
        self.ended = ""
        self.unsent = bytearray()
        self._heard = bytearray()

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
            self._end(error)

    def hear(self) -> list[bytes]:
        """The messages that have arrived whole."""
        try:
            while not self.ended:
                chunk = self.socket.recv(CHUNK_BYTES)
                self._heard += chunk
                if not chunk:
                    self._end("it closed its connection")
                elif len(chunk) < CHUNK_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(error)
        messages, begin = [], 4
        while begin <= len(self._heard):
            end = begin + int.from_bytes(self._heard[begin - 4 : begin], "little")
            if end > len(self._heard):
                break
            messages.append(bytes(self._heard[begin:end]))
            begin = end + 4
        del self._heard[: begin - 4]
        return messages

    def _end(self, cause: object) -> None:
        self.unsent.clear()
        self.ended = f"rank {self.rank} has ended ({cause})"


def connected(meeting: Rendezvous, reach: Endpoint) -> tuple[dict[int, Stream], dict[int, Wire]]:
    """By rank: the streams, and the wires, of which all but rank 0 have one. By all ranks together.

    Raises Failure (69) if one cannot be reached.
    """
    rank, size = meeting.rank, meeting.size
    if size == 1:
        return {}, {}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < (wanted := 2 * size + OTHER_FILES):  # 1024 are usual
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))
    later = set(range(rank + 1, size))
    streams = connect_ranks(meeting, reach, b"calls", range(rank), later)
    wires = connect_ranks(meeting, reach, b"calls' order", range(min(rank, 1)), later if rank == 0 else set())
    return streams, {other: Wire(stream) for other, stream in wires.items()}
