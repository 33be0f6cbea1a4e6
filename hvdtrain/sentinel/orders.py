"""Orders from the rank that started the sentinel, and the sentinel's answers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections.abc import Callable
from typing import Any

from hvdtrain.sentinel import auth, goodput


def write(line: str, to: int = 2) -> None:
    """Write a line to standard error, or another descriptor, unless its reader is gone or blocked."""
    with contextlib.suppress(OSError):
        if select.select([], [to], [], 0)[1]:
            os.write(to, f"{line}\n".encode())


class Orders:
    """Reads one JSON object per line on stdin, and writes answers to stdout."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._hosts, self._index = table["hosts"], table["host"]
        self._me = auth.Party(bytes.fromhex(table["job_key"]), goodput.PURPOSE, self._index)
        self._rest = b""

    def open(self, receiver: goodput.Receiver) -> None:
        """Let the previous host measure its goodput to this one."""
        receiver.open(self._me, (self._index - 1) % len(self._hosts))

    def read(self, describe: Callable[[dict[str, Any]], None]) -> bool:
        """Carry out the orders that have arrived; `describe` gets what they say of the run.

        Returns False at the end of the stream.
        """
        data = os.read(0, 4096)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            describe(order)
            if "measure" in order:
                threading.Thread(target=self._measure, daemon=True).start()
        return bool(data)

    def _measure(self) -> None:
        following = (self._index + 1) % len(self._hosts)
        target, source = self._hosts[following], self._hosts[self._index]["address"]
        try:
            if following == self._index:
                raise OSError("no sentinel there")
            rate = goodput.measure(target["address"], target["tcp"], self._me, following, source)
            answer: dict[str, Any] = {"goodput_to": target["name"], "goodput_mbit": round(rate, 3), "reason": None}
        except OSError as error:
            reason = f"TCP to {target['name']} ({target['address']}:{target['tcp']}): {error.strerror or error}"
            answer = {"goodput_mbit": None, "reason": reason}
        write(json.dumps(answer), 1)  # if the process ended during a print(), the interpreter would abort
