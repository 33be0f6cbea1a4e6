"""Authentication of messages and connections by the job key, 32 random bytes that only the ranks of a job share.

A datagram is signed with HMAC-SHA256. On a new connection both ends prove that they know the job key. Each proof covers
a nonce of either end, so replaying an earlier connection does not help an attacker:

    connecting end:  its number, a nonce
    accepting end:   a nonce, its proof
    connecting end:  its proof
    accepting end:   one byte, welcome

After that the connection is plain TCP: neither slower nor encrypted. Data from strangers is compared, never parsed, and
subject to a time limit. If too many strangers connect, the oldest connection is dropped; a rank that is dropped
connects again.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Set
from typing import NamedTuple

from hvdtrain.system.link_probe import exactly

KEY_BYTES = 32
CODE_BYTES = 32
NONCE_BYTES = 16
NUMBER_BYTES = 4
HELLO_BYTES = NUMBER_BYTES + NONCE_BYTES
WELCOME = b"!"
VISIT_S = 5.0
"""Time for a connection to authenticate itself"""
MAX_VISITORS = 128
"""Connections that are not authenticated yet. A process has at least 1024 descriptors, and fewer than this arrive
during one handshake"""
RETRY_S = 0.1


class Party(NamedTuple):
    """One end of a connection."""

    job_key: bytes
    purpose: bytes
    """Purpose of the connection; a proof is valid for one purpose only"""
    number: int
    """The rank or host of this end"""


def code(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of the parts.

    Only the last part may vary in length. Otherwise two lists of parts could have the same code.
    """
    return hmac.digest(key, b"\0".join(parts), "sha256")


def sign(key: bytes, purpose: bytes, content: bytes) -> bytes:
    """The content, preceded by its signature."""
    return code(key, purpose, content) + content


def verify(key: bytes, purpose: bytes, message: bytes) -> bytes | None:
    """The content of a message that `sign` returned for this key and purpose; None for any other message."""
    content = message[CODE_BYTES:]
    return content if hmac.compare_digest(code(key, purpose, content), message[:CODE_BYTES]) else None


def _proof(party: Party, side: bytes, accepting: int, connecting: int, nonces: bytes) -> bytes:
    numbers = b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in (accepting, connecting))
    return code(party.job_key, b"hvdtrain connection", party.purpose, side, numbers + nonces)


# --- the connecting end -----------------------------------------------------------------------------------------------


def connect(address: str, port: int, me: Party, to: int, patience_s: float, source: str = "") -> socket.socket:
    """Connect to party `to`, from the IPv4 address `source` if given.

    Raises OSError if it cannot be reached, PermissionError if the listener does not know the job key.
    """
    deadline = time.monotonic() + patience_s
    while True:
        source_address = (source, 0) if source else None
        connection = socket.create_connection((address, port), max(0.1, deadline - time.monotonic()), source_address)
        try:
            _introduce(connection, me, to)
            return connection
        except ConnectionError:  # the listener had too many visitors
            connection.close()
            if time.monotonic() + RETRY_S > deadline:
                raise
            time.sleep(RETRY_S)
        except BaseException:
            connection.close()
            raise


def _introduce(connection: socket.socket, me: Party, to: int) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(me.number.to_bytes(NUMBER_BYTES, "little") + nonce)
    answer = exactly(connection, NONCE_BYTES + CODE_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(me, b"accepting", to, me.number, nonces)):
        raise PermissionError("the listener does not know this job's key")
    connection.sendall(_proof(me, b"connecting", to, me.number, nonces))
    exactly(connection, len(WELCOME))


# --- the accepting end ------------------------------------------------------------------------------------------------


class Visitor:
    """An accepted connection that is not authenticated yet."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        self.socket, self.until = connection, now + VISIT_S
        self.number: int | None = None
        self._nonces = b""
        self._expect(HELLO_BYTES)

    def _expect(self, count: int) -> None:
        self._expected_bytes = count
        # A shorter message does not wake this process (socket(7)).
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def receive(self, me: Party, expected: Set[int]) -> bool:
        """Take what has arrived, and return whether the connection is authenticated. Raises OSError if it cannot be."""
        data = self.socket.recv(self._expected_bytes)
        if len(data) < self._expected_bytes:
            raise ConnectionResetError("the other end closed the connection")
        if self.number is None:
            number = int.from_bytes(data[:NUMBER_BYTES], "little")
            if number not in expected:
                raise PermissionError("this number is not expected")
            nonce = secrets.token_bytes(NONCE_BYTES)
            self.number, self._nonces = number, data[NUMBER_BYTES:] + nonce
            self.socket.send(nonce + _proof(me, b"accepting", me.number, number, self._nonces))
            self._expect(CODE_BYTES)
            return False
        proof = _proof(me, b"connecting", me.number, self.number, self._nonces)
        if self.number not in expected or not hmac.compare_digest(data, proof):
            raise PermissionError("it does not know the job key")
        self._expect(1)  # from now on any byte wakes the reader
        self.socket.send(WELCOME)
        return True


def accept(listener: socket.socket, me: Party, expected: Set[int], patience_s: float) -> dict[int, socket.socket]:
    """The connections of the expected parties; those that do not connect in time are missing.

    Strangers (a port scanner, another job, an attacker) may connect too, and send anything or nothing; nothing waits
    for them. Ends early if another thread closes the listener because it failed to connect.
    """
    accepted: dict[int, socket.socket] = {}
    visitors: dict[int, Visitor] = {}  # by descriptor, the oldest first
    deadline = time.monotonic() + patience_s
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)

    def dismiss(descriptor: int, *, close: bool = True) -> None:
        visitor = visitors.pop(descriptor)
        poll.unregister(descriptor)
        if close:
            visitor.socket.close()

    def admit(now: float) -> None:
        if len(visitors) == MAX_VISITORS:
            dismiss(next(iter(visitors)))
        try:
            visitor = Visitor(listener.accept()[0], now)
        except (BlockingIOError, ConnectionError):  # already closed again
            return
        except OSError:  # no descriptor is left
            if visitors:
                dismiss(next(iter(visitors)))
            else:
                time.sleep(RETRY_S)
            return
        visitors[visitor.socket.fileno()] = visitor
        poll.register(visitor.socket, select.POLLIN)

    while listener.fileno() >= 0 and set(accepted) != expected and (now := time.monotonic()) < deadline:
        while visitors and (oldest := next(iter(visitors.items())))[1].until < now:
            dismiss(oldest[0])
        until = min([deadline, *(visitor.until for visitor in visitors.values())])
        for descriptor, _ in poll.poll(1000 * (until - now) + 1):
            if descriptor == listener.fileno():
                admit(now)
            elif descriptor in visitors:
                visitor = visitors[descriptor]
                try:
                    authenticated = visitor.receive(me, expected - set(accepted))
                except OSError:
                    dismiss(descriptor)
                    continue
                if authenticated:
                    assert visitor.number is not None
                    accepted[visitor.number] = visitor.socket
                    dismiss(descriptor, close=False)
    for descriptor in list(visitors):
        with contextlib.suppress(OSError):
            dismiss(descriptor)
    return accepted
