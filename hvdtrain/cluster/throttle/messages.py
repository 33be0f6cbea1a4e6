"""Times short messages over TCP: one end takes them, the other sends one after a pause and waits for the answer.

python -I messages.py receive PORT
python -I messages.py send ADDRESS PORT BYTES...      prints the seconds each took

Run by its path, not with -m, which would import from the current folder, as root. Standard library only.
"""

from __future__ import annotations

import argparse
import socket
import time

PAUSE_S = 0.3
"""Long enough for every token bucket to be full again"""


def receive(port: int) -> None:
    """Takes messages on one connection and answers each with a byte, until the other end closes."""
    with socket.create_server(("", port)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as stream:
            while header := stream.read(8):
                stream.read(int.from_bytes(header, "big"))
                connection.sendall(b"!")


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
    ends.add_parser("receive").add_argument("port", type=int)
    sender = ends.add_parser("send")
    sender.add_argument("address")
    sender.add_argument("port", type=int)
    sender.add_argument("sizes", type=int, nargs="+", metavar="BYTES")
    options = parser.parse_args()
    if options.end == "receive":
        receive(options.port)
    else:
        print(*send(options.address, options.port, options.sizes))


if __name__ == "__main__":
    main()
