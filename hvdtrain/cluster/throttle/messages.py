"""Times short messages over TCP: one end takes them, the other sends one after a pause and waits for the answer.

python -I messages.py receive ADDRESS PORT
python -I messages.py send ADDRESS PORT BYTES...      prints the seconds each took

Run by its path, not with -m, which would import from the current folder, as root. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import time

PAUSE_S = 0.3
"""Long enough for every token bucket to be full again"""
MOST_BYTES = 1 << 24
PATIENCE_S = 10.0
"""For the next part of a message"""


def receive(address: str, port: int) -> None:
    """Takes messages on one connection and answers each with a byte, until the other end closes.

    Whoever connects and says nothing for a moment, or announces more than a message, makes room for the next.
    """
    with socket.create_server((address, port), backlog=socket.SOMAXCONN) as server:
        print("listening", flush=True)
        answered = 0
        while not answered:
            connection, _ = server.accept()
            connection.settimeout(PATIENCE_S)
            with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
                while len(header := stream.read(8)) == 8:
                    size = int.from_bytes(header, "big")
                    if size > MOST_BYTES or len(stream.read(size)) < size:
                        break
                    connection.sendall(b"!")
                    answered += 1


def send(address: str, port: int, sizes: list[int]) -> list[float]:
    """Sends a message of each size after a pause; seconds from the first byte to the answer."""
    times = []
    with socket.create_connection((address, port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for size in (0, *sizes):  # the first one wakes both ends
            time.sleep(PAUSE_S)
            start = time.monotonic()
            connection.sendall(size.to_bytes(8, "big") + bytes(size))
            connection.recv(1)
            times.append(time.monotonic() - start)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="messages", description="Times short messages over TCP.")
    ends = parser.add_subparsers(dest="end", required=True)
    receiver = ends.add_parser("receive")
    receiver.add_argument("address")
    receiver.add_argument("port", type=int)
    sender = ends.add_parser("send")
    sender.add_argument("address")
    sender.add_argument("port", type=int)
    sender.add_argument("sizes", type=int, nargs="+", metavar="BYTES")
    options = parser.parse_args()
    if options.end == "receive":
        receive(options.address, options.port)
    else:
        print(*send(options.address, options.port, options.sizes))


if __name__ == "__main__":
    main()
