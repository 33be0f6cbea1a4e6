"""Who may speak to a job: whoever knows its secret, 32 random bytes that all its ranks share.

A datagram is sent with a code that only they can make (HMAC-SHA256). On a connection both ends prove that they know the
secret, over a nonce of each, so that nothing heard before is of use:

    connecting end:  its number, a nonce
    accepting end:   a nonce, its proof
    connecting end:  its proof
    accepting end:   one byte, welcome

After that the connection is plain TCP, as fast and as readable as any. What strangers send is compared and never
parsed, and has a time limit; many of them cost the oldest its place, and a rank that lost its place comes again.
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

SECRET_BYTES = 32
CODE_BYTES = 32
NONCE_BYTES = 16
NUMBER_BYTES = 4
HELLO_BYTES = NUMBER_BYTES + NONCE_BYTES
WELCOME = b"!"
VISIT_S = 5.0
"""For a connection to prove itself"""
MOST_VISITORS = 128
"""That have not proved themselves yet: less than the 1024 descriptors a process has at least, more than arrive in the
time of a handshake"""
AGAIN_S = 0.1


class Party(NamedTuple):
    """One end of a connection."""

    secret: bytes
    purpose: bytes
    """What the connection is for; a proof for one purpose is none for another"""
    number: int
    """This end's, a rank or a host"""


def code(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) of the parts.

    Only the last part may vary in length; otherwise two lists of parts could have the same code.
    """
    return hmac.digest(secret, b"\0".join(parts), "sha256")


def sealed(secret: bytes, purpose: bytes, text: bytes) -> bytes:
    """A message that `opened` takes."""
    return code(secret, purpose, text) + text


def opened(secret: bytes, purpose: bytes, message: bytes) -> bytes | None:
    """The text of a message from someone who knows the secret; None for any other."""
    text = message[CODE_BYTES:]
    return text if hmac.compare_digest(code(secret, purpose, text), message[:CODE_BYTES]) else None


def _proof(party: Party, side: bytes, accepting: int, connecting: int, nonces: bytes) -> bytes:
    numbers = b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in (accepting, connecting))
    return code(party.secret, b"hvdtrain connection", party.purpose, side, numbers + nonces)


# --- the connecting end -----------------------------------------------------------------------------------------------


def connected(address: str, port: int, me: Party, to: int, patience_s: float, source: str = "") -> socket.socket:
    """A connection to party `to`, which accepts; from the IPv4 address `source` if given.

    Raises OSError if it cannot be reached, PermissionError if whoever listens there does not know the secret.
    """
    deadline = time.monotonic() + patience_s
    while True:
        from_here = (source, 0) if source else None
        connection = socket.create_connection((address, port), max(0.1, deadline - time.monotonic()), from_here)
        try:
            _introduce(connection, me, to)
            return connection
        except ConnectionError:  # it had too many visitors
            connection.close()
            if time.monotonic() + AGAIN_S > deadline:
                raise
            time.sleep(AGAIN_S)
        except BaseException:
            connection.close()
            raise


def _introduce(connection: socket.socket, me: Party, to: int) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(me.number.to_bytes(NUMBER_BYTES, "little") + nonce)
    answer = exactly(connection, NONCE_BYTES + CODE_BYTES)
    nonces = nonce + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(me, b"accepting", to, me.number, nonces)):
        raise PermissionError("whoever listens there does not know this job's secret")
    connection.sendall(_proof(me, b"connecting", to, me.number, nonces))
    exactly(connection, len(WELCOME))


# --- the accepting end ------------------------------------------------------------------------------------------------


class Visitor:
    """A connection that has not proved itself yet."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        self.socket, self.until = connection, now + VISIT_S
        self.number: int | None = None
        self._nonces = b""
        self._await(HELLO_BYTES)

    def _await(self, count: int) -> None:
        self._awaited = count
        # Who sends less does not wake us (socket(7)).
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def hear(self, me: Party, awaited: Set[int]) -> bool:
        """Takes what has arrived; whether it has proved itself. Raises OSError if it cannot."""
        data = self.socket.recv(self._awaited)
        if len(data) < self._awaited:
            raise ConnectionResetError("the other end closed the connection")
        if self.number is None:
            number = int.from_bytes(data[:NUMBER_BYTES], "little")
            if number not in awaited:
                raise PermissionError("nobody waits for it")
            nonce = secrets.token_bytes(NONCE_BYTES)
            self.number, self._nonces = number, data[NUMBER_BYTES:] + nonce
            self.socket.send(nonce + _proof(me, b"accepting", me.number, number, self._nonces))
            self._await(CODE_BYTES)
            return False
        expected = _proof(me, b"connecting", me.number, self.number, self._nonces)
        if self.number not in awaited or not hmac.compare_digest(data, expected):
            raise PermissionError("it does not know the secret")
        self._await(1)  # whoever reads from now on is woken by any byte
        self.socket.send(WELCOME)
        return True


def accepted(listener: socket.socket, me: Party, awaited: Set[int], patience_s: float) -> dict[int, socket.socket]:
    """The connections of the awaited parties; those that did not come in time are missing.

    Strangers (a port scanner, another job, an attacker) may come too, say anything or nothing, and stay: nobody waits
    for them. Ends early if another thread, which has failed to connect, closes the listener.
    """
    found: dict[int, socket.socket] = {}
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
        if len(visitors) == MOST_VISITORS:
            dismiss(next(iter(visitors)))
        try:
            visitor = Visitor(listener.accept()[0], now)
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError:  # no descriptor is left
            if visitors:
                dismiss(next(iter(visitors)))
            else:
                time.sleep(AGAIN_S)
            return
        visitors[visitor.socket.fileno()] = visitor
        poll.register(visitor.socket, select.POLLIN)

    while listener.fileno() >= 0 and set(found) != awaited and (now := time.monotonic()) < deadline:
        while visitors and (oldest := next(iter(visitors.items())))[1].until < now:
            dismiss(oldest[0])
        until = min([deadline, *(visitor.until for visitor in visitors.values())])
        for descriptor, _ in poll.poll(1000 * (until - now) + 1):
            if descriptor == listener.fileno():
                admit(now)
            elif descriptor in visitors:
                visitor = visitors[descriptor]
                try:
                    proved = visitor.hear(me, awaited - set(found))
                except OSError:
                    dismiss(descriptor)
                    continue
                if proved:
                    assert visitor.number is not None
                    found[visitor.number] = visitor.socket
                    dismiss(descriptor, close=False)
    for descriptor in list(visitors):
        with contextlib.suppress(OSError):
            dismiss(descriptor)
    return found
