"""The goodput from a host to the next one (see `system.link_probe`), over an authenticated connection.

The hosts of a job form a ring and measure at the same time, so that both directions of each link carry data, as in an
all-reduce. A shaped link then yields 0.936 of its rate, because acknowledgements take a part of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from hvdtrain.sentinel import auth
from hvdtrain.sentinel.auth import Party
from hvdtrain.system import link_probe

SETTLE_S, COUNT_S = 0.3, 0.9
PATIENCE_S = 3.0
"""Timeout for the connection, and for the receiver's answer"""
OPEN_S = 3600.0
"""After this time without a measurement, the receiver waits again"""
PURPOSE = b"goodput"


class Receiver:
    """Listens on its own port, and measures for one sender, each time that it connects."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=socket.SOMAXCONN)
        self.port: int = self._listener.getsockname()[1]

    def open(self, me: Party, sender: int) -> None:
        """Wait for host `sender`, in a thread that ends with the process."""
        threading.Thread(target=self._serve, args=(me, sender), daemon=True).start()

    def _serve(self, me: Party, sender: int) -> None:
        while True:
            for connection in auth.accept(self._listener, me, {sender}, OPEN_S).values():
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE_S)
                    connection.sendall(struct.pack("!d", link_probe.count(connection, SETTLE_S, COUNT_S)))
                    while connection.recv(1 << 20):  # until the sender has read the answer and closed
                        pass


def measure(address: str, port: int, me: Party, to: int, source: str) -> float:
    """Mbit/s of TCP payload from the IPv4 address `source` to the receiver of host `to` at `address`.

    Takes 1.2 s and three round trips. Raises OSError if the receiver cannot be reached or does not answer.
    """
    with auth.connect(address, port, me, to, PATIENCE_S, source) as connection:
        connection.settimeout(PATIENCE_S)
        with link_probe.feeding(connection):
            (rate,) = struct.unpack("!d", link_probe.exactly(connection, 8))
    return float(rate) / 1e6
