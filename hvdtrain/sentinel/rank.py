"""The rank's side of the sentinel: starts it, tells it who is who, and how this rank ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from hvdtrain.sentinel import interfaces, waiting
from hvdtrain.sentinel.watch import RankWords
from hvdtrain.system import net

START_S = 10.0
ANSWER_S = 15.0
ROOT = str(Path(__file__).resolve().parent.parent.parent)


class Sentinel:
    """A rank's end of the line to its host's sentinel.

    Whatever goes wrong here costs the watch, never the run.
    """

    def __init__(self, rank: int, *, first: bool, secret: bytes, stall_limit_s: float) -> None:
        """`first` for the one rank of each host that starts the process; `secret` is the job's; `stall_limit_s`: see
        `stalls`, 0 for none."""
        self._rank, self._secret, self._stall_limit_s = rank, secret, stall_limit_s
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses = interfaces.addresses() if first else None
        self.way: interfaces.Way | None = None
        """From this host to the next one; None on a single host, or where none is to be seen"""
        self.hosts = 1
        """Of the job, by name"""
        self._next: str | None = None

    def join(self, gather: Callable[[Any], list[Any]]) -> None:
        """Finds the way to the other hosts, and begins the watch. `gather` brings what all ranks gave it, by rank.

        All ranks must call it. They meet twice: first to find the address of the link, then to tell the ports of the
        sentinels that listen on it.
        """
        offers = gather(self._offer())
        self.hosts = len({offer["host"] for offer in offers})
        leaders: dict[str, int] = {}
        for rank, offer in enumerate(offers):
            if offer["addresses"] is not None:
                leaders.setdefault(offer["sees"], rank)
        mine = leaders.get(offers[self._rank]["sees"])
        if mine is not None:
            order = sorted(leaders.values())
            following = order[(order.index(mine) + 1) % len(order)]
            if following != mine:
                ours, theirs = offers[mine], offers[following]
                self._next = theirs["host"]
                self.way = interfaces.way(ours["addresses"], theirs["addresses"], self._next, interfaces.asked())
        doors = gather(self._start() if mine == self._rank else None)
        for leader in leaders.values() if self._rank == 0 and len(leaders) > 1 else ():
            if not doors[leader] or not doors[leader]["address"]:
                why = "it has no network in common with the next host" if doors[leader] else "it has no sentinel"
                name = offers[leader]["host"]
                print(f"hvdtrain: if {name} or the link to it fails, this job will not notice: {why}", file=sys.stderr)
        if mine is None or doors[mine] is None:
            return
        with contextlib.suppress(OSError):
            self._socket.connect(("127.0.0.1", doors[mine]["words"]))
            self._socket.setblocking(False)
            # Signals reach the sentinel as one byte each, written by the C handler: also while Python cannot run.
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
            waiting.begin(self._tell, self._stall_limit_s)
        if mine == self._rank:
            self._send(self._table(offers, doors))

    def _offer(self) -> dict[str, Any]:
        """What all ranks must know of this one."""
        host = socket.gethostname()
        return {
            "host": host,
            # Which processes it can see: hosts may share a name, and containers a machine.
            "sees": f"{host} {_identity()}",
            "pid": os.getpid(),
            "port": self._socket.getsockname()[1],
            "addresses": self._addresses,
        }

    def _start(self) -> dict[str, Any] | None:
        """Starts the process; where it listens."""
        # Isolated from the environment and without site-packages: 20 ms and 10 MB. In a session of its own, since
        # launchers signal a rank's whole process group.
        program = f"import sys; sys.path.insert(0, {ROOT!r}); from hvdtrain.sentinel.watch import main; main()"
        command = [sys.executable, "-I", "-S", "-c", program, f"hvdtrain-sentinel of rank {self._rank}"]
        try:
            self._process = subprocess.Popen(
                [*command, *([self.way.source] if self.way else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            print(f"hvdtrain: no sentinel on {socket.gethostname()}: {error.strerror}", file=sys.stderr, flush=True)
            return None
        ports = self._answer(START_S)
        if not ports:
            self._process.kill()
            self._process = None
            return None
        return {"address": self.way.source if self.way else None, **ports}

    def _table(self, offers: list[dict[str, Any]], doors: list[dict[str, Any] | None]) -> dict[str, Any]:
        leaders = [rank for rank, door in enumerate(doors) if door and (door["address"] or rank == self._rank)]
        if not self.way:
            leaders = [self._rank]
        hosts = []
        for leader in leaders:
            ranks = [rank for rank, other in enumerate(offers) if other["sees"] == offers[leader]["sees"]]
            hosts.append({"name": offers[leader]["host"], "ranks": ranks, **(doors[leader] or {})})
        ours = [(rank, o) for rank, o in enumerate(offers) if o["sees"] == offers[self._rank]["sees"]]
        ranks_here = [{"rank": rank, "pid": offer["pid"], "port": offer["port"]} for rank, offer in ours]
        index = leaders.index(self._rank)
        told = {"secret": self._secret.hex(), "host": index, "hosts": hosts, "ranks": ranks_here}
        return {**told, "stall_limit_s": self._stall_limit_s}

    # --- the rank's words ---------------------------------------------------------------------------------------

    def left(self) -> None:
        """This rank is about to end as it should."""
        self._say(RankWords.LEFT)

    def failed(self) -> None:
        """This rank is about to end with an error, which it has shown."""
        self._say(RankWords.FAILED)

    def may_die(self) -> None:
        """The others can go on without this rank, however it ends, unless it says that it failed."""
        self._say(RankWords.MAY_DIE)

    def _say(self, word: int) -> None:
        for _ in range(3):  # UDP may lose one
            self._tell(bytes([word]))

    def _tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(message)

    def keeps(self, folder: str, command: str) -> None:
        """The run's folder, and the command for the advice how to continue."""
        self._send({"folder": folder, "command": command})

    # --- the link -----------------------------------------------------------------------------------------------

    def link(self) -> dict[str, Any] | None:
        """This host's link for the manifest, goodput measured now; None unless this rank started the sentinel.

        All hosts must do so at the same time, with nothing else on the links.
        """
        if self._process is None or self._next is None:
            return None
        from hvdtrain.lab import throttle  # used once, and on several hosts only

        asked = throttle.asked()
        if asked and self.nic and asked.get("dev") not in (self.nic, None):
            asked = None  # of another interface, which this run does not use
        found: dict[str, Any] = {
            "host": socket.gethostname(),
            "nic": self.nic,
            "address": self.way and self.way.source,
            "speed_mbit": self.way and net.speed_mbit(self.way.device),
            "throttle": asked,
            "goodput_to": self._next,
            "goodput_mbit": None,
            "reason": f"no common network with {self._next}",
        }
        if self.way:
            self._send({"measure": True})
            found |= self._answer(ANSWER_S) or {"reason": "the sentinel did not answer"}
        return found

    @property
    def nic(self) -> str | None:
        """The interface of the link; None on a single host, and unless this rank started the sentinel."""
        return self.way.device if self.way and self._process else None

    def nic_counters(self) -> tuple[int, int] | None:
        """Bytes sent and received so far by the link's interface; None unless this rank started the sentinel."""
        with contextlib.suppress(OSError, KeyError):
            return net.counters(self.nic) if self.nic else None
        return None

    # --- the process --------------------------------------------------------------------------------------------

    def _send(self, order: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(json.dumps(order).encode() + b"\n")

    def _answer(self, patience_s: float) -> dict[str, Any] | None:
        assert self._process is not None
        stream: IO[bytes] | None = self._process.stdout
        poll = select.poll()
        if stream is not None:
            poll.register(stream, select.POLLIN)
        if stream is None or not poll.poll(1000 * patience_s):
            return None
        with contextlib.suppress(ValueError):
            return json.loads(stream.readline())
        return None


def _identity() -> str:
    """Tells apart machines and process namespaces that share a host name."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)
