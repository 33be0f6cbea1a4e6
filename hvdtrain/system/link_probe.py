"""What a link carries: the TCP payload that arrives in a second, and the time that short messages take.

The end that receives measures, since a sender only knows how fast its own queue took the bytes. It leaves out the first
part, in which TCP finds the rate and a traffic shaper spends what it has saved up. A shaper with a bucket that is too
large would pass that and still let short messages through unthrottled, so those are timed too.

`doctor` and `throttle` give this text to a bare Python (3.7 or newer) on other hosts: standard library, none of ours.
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
"""What may wait in the sender: 0.2 s at 10 Mbit/s, and enough for 10 Gbit/s at a local network's round trip"""
POINTS = 45
PATIENCE_S = 10.0
"""For the other end's next bytes"""
PAUSE_S = 0.3
"""Long enough for every token bucket to be full again"""
MOST_BYTES, MOST_S = 1 << 24, 1000.0
"""Of a message, and of a stream"""
REQUEST = struct.Struct("!cQdd")
"""m: a message of so many bytes; t: a stream there, to be counted after settling; b: a stream back"""


def count(connection: socket.socket, settle_s: float, count_s: float) -> float:
    """bit/s that arrive within `count_s` seconds, after `settle_s`. Raises OSError if the stream ends before."""
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
    """The line through the points (Theil and Sen: the median of the slopes of all pairs).

    A lost packet holds back all behind it until it was sent again, and then they arrive at once; a virtual machine
    stands still for a moment. That moves a few points, and with them a mean or a least-squares line by up to a quarter,
    but not the median.
    """
    slopes = sorted((y - b) / (x - a) for i, (x, y) in enumerate(points) for a, b in points[:i])
    return slopes[len(slopes) // 2]


@contextlib.contextmanager
def feeding(connection: socket.socket) -> typing.Iterator[None]:
    """Within it, a thread sends zeros as fast as the link takes them; closing then throws away what still waits."""
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
    """So many bytes. Raises ConnectionError if the other end closes before."""
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        found += part
    return found


# --- the end that serves ----------------------------------------------------------------------------------------------


def listening(address: str) -> socket.socket:
    """Listens on a port that is free."""
    door = socket.socket()
    door.bind((address, 0))
    door.listen(socket.SOMAXCONN)
    return door


def serve(door: socket.socket) -> None:
    """Answers one visitor until it leaves; who says nothing, or asks for too much, makes room for the next."""
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
                    while connection.recv(1 << 20):  # until the sender has read the answer and closes
                        pass


# --- the end that asks ------------------------------------------------------------------------------------------------


def ask(
    address: str, port: int, settle_s: float, count_s: float, *, back: bool = False, sizes: typing.Sequence[int] = ()
) -> dict[str, typing.Any]:
    """`bit_s` from here to a `serve`, or from there to here, before that `messages_s` for each size; `payload_bytes` of
    a full frame.

    A message's seconds are from its first byte to the answer, after a pause. Raises OSError.
    """
    times = []
    with socket.create_connection((address, port), PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(settle_s + count_s + 60)
        for size in (0, *sizes):  # the first one wakes both ends
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
