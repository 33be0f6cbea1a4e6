"""Messages between the launcher of an elastic job, its agents and its ranks: one JSON object per line.

Each line begins with MARK. What precedes it is not ours: a login shell may print something, with or without a line end.
Messages are checked here, where they arrive, so that whoever uses them can rely on their fields.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from typing import Any

MARK = b"\x1e"
"""Record separator, as in RFC 7464. JSON escapes it in strings"""
MOST_BYTES = 1 << 26
"""Limit on a line, so that a broken program at the other end cannot fill the memory"""
CHUNK = 1 << 16

VIEW = {"number": int, "ranks": [int], "hosts": [str], "reason": str}
HELLO = {
    "job_key": str,
    "addresses": dict,
    "begun": dict,
    "view": VIEW,
    "rank": int,
    "local_rank": int,
    "local_size": int,
}
"""The first message to a rank"""
TO_RANK = (
    {"view": VIEW},
    {"newcomers": int},
    {"of": int, "gathered": int, "data": [str]},
)
FROM_RANK = (
    {"gather": int, "of": int, "data": str},
    {"began": dict},
    {"ready": bool},
    {"admit": int},
    {"joined": int},
    {"broken": int},
)
SUMMARY = {"name": str, "wait_s": float, "absent": [int], "moved_s": float, "progress_s": float}
"""See `Stalls.summary`"""
WATCHED = {"pid": int, "limit_s": float}
"""From a rank to its agent: its process, and the stall limit"""
REPORT = {"report": str}
"""From a rank to its agent: see `stalls.WAIT`"""
JOB = {
    "command": [str],
    "environment": dict,
    "folder": str,
    "size": int,
    "host": str,
    "ranks": [int],
    "hello": dict,
}
"""The first message to an agent"""
TO_AGENT = (
    {"beat": int},
    {"to": [int], "message": dict},
    {"signal": range(1, 65)},
    {"stalls": [SUMMARY]},
    {"end": bool},
)
FROM_AGENT = (
    {"beat": int},
    {"stdout": str},
    {"ended": int, "code": range(-64, 256)},
    {"from": int, "message": FROM_RANK},
    {"stall": (SUMMARY, {}), "limit_s": float, "stopped_s": float},
)


class BrokenLine(Exception):
    """The other end does not keep to the protocol."""


def encoded(message: dict[str, Any]) -> bytes:
    return MARK + json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decoded(line: bytes, form: Any, sender: str) -> dict[str, Any] | None:
    """Return the message in a line; None if there is none. Raises BrokenLine if it does not have the form.

    `form`: a type, a range of integers, a list of one form for lists of any length, a dict with a form for each key, or
    a tuple of alternatives. `sender`: for people.
    """
    _, mark, text = line.rstrip(b"\n").rpartition(MARK)
    if not mark and len(line) < MOST_BYTES:
        return None
    message = None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(text)
    if not fits(message, form):
        shown = text[:60].decode(errors="replace")
        raise BrokenLine(f"{sender} sent {len(text):,} bytes that are not a message: {shown!a}")
    return message


def fits(value: Any, form: Any) -> bool:
    match form:
        case tuple():
            return any(fits(value, each) for each in form)
        case dict():
            return (
                isinstance(value, dict)
                and value.keys() == form.keys()
                and all(fits(value[name], each) for name, each in form.items())
            )
        case list():
            return isinstance(value, list) and all(fits(each, form[0]) for each in value)
        case range():
            return type(value) is int and value in form
    return type(value) is form and (form is not float or math.isfinite(value))


class Line:
    """One end of a connection that never blocks."""

    def __init__(self, source: int, target: int, form: Any, sender: str) -> None:
        """`form`, `sender`: of the messages that arrive, see `decoded`."""
        self.source, self.target, self._form, self._sender = source, target, form, sender
        os.set_blocking(source, False)
        os.set_blocking(target, False)
        self._read, self._unsent = bytearray(), b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None at the end of the stream. Raises BrokenLine."""
        try:
            data = os.read(self.source, CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._read += data
        *lines, rest = self._read.split(b"\n") if b"\n" in data else [self._read]
        self._read = rest
        if len(rest) > MOST_BYTES:
            lines.append(rest)
        messages = [decoded(bytes(line), self._form, self._sender) for line in lines]
        return [message for message in messages if message is not None]

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += encoded(message)
        self.flush()

    def flush(self) -> bool:
        """Send as much as the other end takes now. Returns whether that was everything."""
        with contextlib.suppress(OSError):  # it would block, or the other end is gone
            while self._unsent:
                self._unsent = self._unsent[os.write(self.target, self._unsent) :]
        return not self._unsent
