"""The hostfile of an elastic job: lines that are added while the job runs are new hosts."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.launch.link import address_of
from hvdtrain.system import hosts, net
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots

LOOK_S = 1.0


class HostfileWatch(threading.Thread):
    """Looks for new hosts in a hostfile, in a thread because file systems and name servers may answer late."""

    def __init__(self, path: Path, known: Mapping[str, str]) -> None:
        """`known`: the address of each host that is not new, by name."""
        super().__init__(name="hvdtrain-hostfile", daemon=True)
        self._path, self._known = path, {*known}
        self._plays = sum(map(net.is_own, known.values())) > 1
        self._named = {self._place(address): name for name, address in known.items()}
        """Name of each known host, by address"""
        self._new: list[Slots] = []
        """New hosts in the file whose address is not known yet"""
        self._reported: set[str] = set()
        self.found: queue.SimpleQueue[tuple[Slots, str]] = queue.SimpleQueue()
        """New hosts with their addresses"""

    def run(self) -> None:
        before = read = (0, 0, 0)  # a time, so that the file is read once at first: it may have changed already
        while True:
            now = self._stamp()
            if before == now != read:  # an editor may still be writing a file that has just changed
                self._read()
                read = now
            before = now
            self._new = [slots for slots in self._new if not self._resolve(slots)]
            time.sleep(LOOK_S)

    def _place(self, address: str) -> str:
        """The same for all addresses of this machine, unless it plays several hosts."""
        return "here" if net.is_own(address) and not self._plays else address

    def _stamp(self) -> tuple[int, int, int]:
        """Differs if the file has changed; it is all -1 without a file."""
        try:
            state = self._path.stat()
        except OSError:
            return -1, -1, -1
        return state.st_mtime_ns, state.st_size, state.st_ino

    def _read(self) -> None:
        try:
            listed = hosts.read_hostfile(self._path)
        except Failure as failure:
            problem = str(failure).partition("; hint: ")[0]
            say(f"{problem}; no host was added; hint: correct the file, which is then read again")
            return
        self._new = [slots for slots in listed if slots.host not in self._known]

    def _resolve(self, slots: Slots) -> bool:
        """Hand over a new host if its address can be found. An error is printed once."""
        try:
            address = address_of(slots.host)
        except Failure as failure:
            if slots.host not in self._reported:
                say(str(failure))
            self._reported.add(slots.host)
            return False
        self._known.add(slots.host)
        if (name := self._named.setdefault(self._place(address), slots.host)) != slots.host:
            say(f"{slots.host} is not added: it is {name}, which is in the job; hint: give each host one name")
        else:
            self.found.put((slots, address))
        return True


def say(text: str) -> None:
    """Print a line of the launcher."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"hvdtrain: {text}\n".encode())
