"""How much a host can send to the next one: a stream of zeros over plain TCP, for about a second.

The receiver measures, since a sender only knows how fast its own queue took the bytes. It leaves out the first part,
in which TCP finds the rate and a traffic shaper spends what it has saved up, then counts for 0.9 s and tells the
sender. The hosts of a job do so in a ring and all at once, so that both directions of each link carry data, as
they do in an allreduce: a shaped link then gives 0.936 of its rate (acknowledgements share the way with the data).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from hvdtrain.sentinel import trust
from hvdtrain.sentinel.trust import Party

SETTLE_S = 0.3
COUNT_S = 0.9
EVERY_S = 0.02
PATIENCE_S = 3.0
"""For the connection, and for the receiver's answer"""
QUEUE_BYTES = 1 << 18
"""What may wait in the sender: 0.2 s at 10 Mbit/s, and enough for 10 Gbit/s at a local network's round trip"""
CHUNK = bytes(1 << 16)
OPEN_S = 3600.0
"""So long the receiver waits for the measurement, of which there is one"""
PURPOSE = b"goodput"


class Receiver:
    """Listens on a port of its own, and measures once for the host that may ask."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
        self.port: int = self._listener.getsockname()[1]

    def open(self, me: Party, sender: int) -> None:
        """Waits for host `sender` from now on, in a thread that ends with the process."""
        threading.Thread(target=self._serve, args=(me, sender), daemon=True).start()

    def _serve(self, me: Party, sender: int) -> None:
        with self._listener:
            found = trust.accepted(self._listener, me, {sender}, OPEN_S)
        for connection in found.values():
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(PATIENCE_S)
                connection.sendall(struct.pack("!d", _count(connection)))
                while connection.recv(len(CHUNK)):  # until the sender has read the answer and closes
                    pass


def _count(connection: socket.socket) -> float:
    """Bytes per second that arrive, once the stream has settled."""
    buffer = bytearray(1 << 20)
    connection.recv_into(buffer)
    first_s = time.monotonic()
    while (began_s := time.monotonic()) - first_s < SETTLE_S:
        connection.recv_into(buffer)
    arrivals: list[tuple[float, int]] = [(began_s, 0)]
    received, now_s = 0, began_s
    while now_s - began_s < COUNT_S:
        received += (got := connection.recv_into(buffer))
        if not got:
            raise ValueError("closed early")
        now_s = time.monotonic()
        if now_s - arrivals[-1][0] > EVERY_S:
            arrivals.append((now_s, received))
    return _slope(arrivals)


def _slope(points: list[tuple[float, int]]) -> float:
    """The line through the points (Theil and Sen: the median of the slopes of all pairs).

    A lost packet holds back all behind it until it was sent again, and then they arrive at once. That moves a few
    points, and with them a mean or a least-squares line by up to a quarter, but not the median.
    """
    slopes = [(y - b) / (x - a) for i, (x, y) in enumerate(points) for a, b in points[:i]]
    return sorted(slopes)[len(slopes) // 2]


def measure(address: str, port: int, me: Party, to: int, source: str) -> float:
    """Mbit/s of TCP payload from here (IPv4 address `source`) to the receiver of host `to` at `address`.

    Takes 1.2 s and three round trips. Raises OSError if the receiver cannot be reached or does not answer.
    """
    with trust.connected(address, port, me, to, PATIENCE_S, source) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        # Closing throws away what still waits, so that nothing of it delays the training.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.settimeout(PATIENCE_S)
        answer = threading.Event()
        reader = threading.Thread(target=_feed, args=(connection, answer), daemon=True)
        reader.start()
        try:
            rate = struct.unpack("!d", trust.exactly(connection, 8))[0]
        finally:
            answer.set()
            reader.join(PATIENCE_S)
    return float(rate) * 8 / 1e6


def _feed(connection: socket.socket, answer: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not answer.is_set():
            connection.send(CHUNK)
