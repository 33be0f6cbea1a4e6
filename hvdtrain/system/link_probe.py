"""Measure a link: the TCP payload that arrives per second, and the time that short messages take.

The receiving end measures, because a sender only knows how fast its own queue accepted the bytes. It ignores the first
part of a stream, in which TCP finds the rate and a traffic shaper spends its saved tokens. A shaper whose bucket is too
large passes this test but lets short messages through unthrottled, so short messages are timed as well.

`doctor` and `throttle` send the text of this file to a bare Python (3.7 or newer) on other hosts. It therefore uses the
standard library only and imports nothing from hvdtrain.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
import typing

CHUNK = bytes(1 << 16)
QUEUE_BYTES = 1 << 18
"""Send buffer: 0.2 s at 10 Mbit/s, and enough for 10 Gbit/s at the round-trip time of a local network."""
POINTS = 45
PATIENCE_S = 10.0
"""How long to wait for the next bytes of the other end."""
PAUSE_S = 0.3
"""Long enough for any token bucket to fill again."""
MOST_BYTES, MOST_S = 1 << 24, 1000.0
"""Longest message in bytes, and longest stream in seconds."""
REQUEST = struct.Struct("!cQdd")
"""Kind, size in bytes, settling time, counting time.

Kinds: m, a message of `size` bytes; t, a stream to the server; b, a stream back.
"""


def count(connection: socket.socket, settle_s: float, count_s: float) -> float:
    """Rate in bit/s over `count_s` seconds, after `settle_s` seconds. Raises OSError if the stream ends too early."""
    buffer = bytearray(1 << 20)
    arrivals: list[tuple[float, int]] = []
    received, first_s = 0, time.monotonic()
    while not arrivals or arrivals[-1][0] - arrivals[0][0] < count_s:
        got = connection.recv_into(buffer)
        if not got:
            raise ConnectionResetError("the stream ended early")
        now_s = time.monotonic()
        received += got
        if now_s - first_s >= settle_s and (not arrivals or now_s - arrivals[-1][0] > count_s / POINTS):
            arrivals.append((now_s, received))
    return 8 * slope(arrivals)


def slope(points: list[tuple[float, int]]) -> float:
    """Theil-Sen estimate of the slope: the median of the slopes of all pairs of points.

    A lost packet delays all later ones until it is sent again, and then they arrive together. A virtual machine may
    pause. Both move a few points. This changes a mean or a least-squares line by up to a quarter, but not the median.
    """
    slopes = sorted((y - b) / (x - a) for i, (x, y) in enumerate(points) for a, b in points[:i])
    return slopes[len(slopes) // 2]


@contextlib.contextmanager
def feeding(connection: socket.socket) -> typing.Iterator[None]:
    """Inside the block, a thread sends zeros as fast as the link accepts them. Closing discards unsent bytes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    answered = threading.Event()

    def feed() -> None:
        with contextlib.suppress(OSError):
            while not answered.is_set():
                connection.send(CHUNK)

    sender = threading.Thread(target=feed, daemon=True)
    sender.start()
    try:
        yield
    finally:
        answered.set()
        sender.join(PATIENCE_S)


def exactly(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises ConnectionError if the other end closes before that."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        data += part
    return data


# --- server -----------------------------------------------------------------------------------------------------------


def listening(address: str) -> socket.socket:
    """Listen on a free port."""
    door = socket.socket()
    door.bind((address, 0))
    door.listen(socket.SOMAXCONN)
    return door


def serve(door: socket.socket) -> None:
    """Serve one client until it disconnects. Silent or greedy clients are dropped and do not count."""
    served = False
    while not served:
        connection, _ = door.accept()
        connection.settimeout(PATIENCE_S)
        with connection, contextlib.suppress(OSError):
            while True:
                kind, size, settle_s, count_s = REQUEST.unpack(exactly(connection, REQUEST.size))
                if size > MOST_BYTES or not (settle_s >= 0 < count_s and settle_s + count_s < MOST_S):
                    break
                served = True
                if kind == b"m":
                    exactly(connection, size)
                    connection.sendall(b"!")
                elif kind == b"b":
                    connection.settimeout(settle_s + count_s + PATIENCE_S)
                    with feeding(connection):
                        connection.recv(1)
                else:
                    connection.sendall(struct.pack("!d", count(connection, settle_s, count_s)))
                    while connection.recv(1 << 20):  # the sender closes when it has read the answer
                        pass


# --- client -----------------------------------------------------------------------------------------------------------


def ask(
    address: str, port: int, settle_s: float, count_s: float, *, back: bool = False, sizes: typing.Sequence[int] = ()
) -> dict[str, typing.Any]:
    """Measure the link to a `serve`. Raises OSError.

    Returns `messages_s`, the seconds of a message of each size from its first byte to the answer; then `bit_s`, the
    rate to the server, or from it with `back`; and `payload_bytes`, the TCP payload of a full frame.
    """
    times = []
    with socket.create_connection((address, port), PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(settle_s + count_s + 60)
        for size in (0, *sizes):  # the first message wakes both ends
            time.sleep(PAUSE_S)
            began_s = time.monotonic()
            connection.sendall(REQUEST.pack(b"m", size, settle_s, count_s) + bytes(size))
            exactly(connection, 1)
            times.append(time.monotonic() - began_s)
        connection.sendall(REQUEST.pack(b"b" if back else b"t", 0, settle_s, count_s))
        if back:
            rate = count(connection, settle_s, count_s)
        else:
            with feeding(connection):
                (rate,) = struct.unpack("!d", exactly(connection, 8))
        payload_bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    return {"bit_s": rate, "messages_s": times[1:], "payload_bytes": payload_bytes}
