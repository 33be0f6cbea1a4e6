"""The rank's side of the sentinel: starts it, describes the job to it, and reports how the rank ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from hvdtrain.sentinel import interfaces, waiting
from hvdtrain.sentinel.goodput import COUNT_S, SETTLE_S
from hvdtrain.sentinel.watch import RankReport
from hvdtrain.system import net

START_S = 10.0
ANSWER_S = 15.0
ROOT = str(Path(__file__).resolve().parent.parent.parent)


class Sentinel:
    """A rank's connection to the sentinel of its host.

    Errors here disable the watch but never end the run.
    """

    def __init__(self, rank: int, *, first: bool, job_key: bytes, stall_limit_s: float, elastic: bool = False) -> None:
        """`first`: whether this rank starts the sentinel process of its host. `stall_limit_s`: see `stalls`; 0 for no
        limit. `elastic`: the launcher finds faults, and the sentinel only measures links."""
        self._rank, self._job_key, self._stall_limit_s = rank, job_key, stall_limit_s
        self._elastic = elastic
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._process: subprocess.Popen[bytes] | None = None
        self._addresses = interfaces.addresses() if first else None
        self.route: interfaces.Route | None = None
        """From this host to the next one; None on a single host, or if no route was found"""
        self.hosts = 1
        """Number of host names in the job"""
        self.machines = 1
        """Number of hosts, which may share a name"""
        self.links: list[dict[str, Any]] = []
        """The result of the last `measure_links`"""
        self._next_host: str | None = None

    def join(self, gather: Callable[[Any], list[Any]]) -> None:
        """Find the routes to the other hosts and start the watch. Collective.

        `gather` returns every rank's value, by rank. It is called twice: first to find the address of the link, then to
        exchange the ports of the sentinels, which listen on that address.
        """
        offers = gather(self._offer())
        self.hosts = len({offer["host"] for offer in offers})
        self.machines = len({offer["machine"] for offer in offers})
        leaders: dict[str, int] = {}
        for rank, offer in enumerate(offers):
            if offer["addresses"] is not None:
                leaders.setdefault(offer["machine"], rank)
        leader = leaders.get(offers[self._rank]["machine"])
        if leader is not None:
            order = sorted(leaders.values())
            following = order[(order.index(leader) + 1) % len(order)]
            if following != leader:
                self._next_host = offers[following]["host"]
                local, remote = offers[leader]["addresses"], offers[following]["addresses"]
                self.route = interfaces.route(local, remote, self._next_host, interfaces.preferred_networks())
        ports = gather(self._start() if leader == self._rank else None)
        for other in leaders.values() if self._rank == 0 and len(leaders) > 1 else ():
            if not ports[other] or not ports[other]["address"]:
                reason = "it shares no network with the next host" if ports[other] else "it has no sentinel"
                name = offers[other]["host"]
                print(f"hvdtrain: a failure of {name} or its link will not be noticed: {reason}", file=sys.stderr)
        if leader is None or ports[leader] is None:
            return
        with contextlib.suppress(OSError):
            self._socket.connect(("127.0.0.1", ports[leader]["reports"]))
            self._socket.setblocking(False)
            # The C signal handler sends each signal to the sentinel as one byte, even if Python cannot run.
            with contextlib.suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(self._socket.fileno(), warn_on_full_buffer=False)
            if not self._elastic:
                waiting.start(self._send_report, self._stall_limit_s)
        if leader == self._rank:
            self._order(self._job_table(offers, ports))

    def _offer(self) -> dict[str, Any]:
        """Host, process and addresses of this rank, for the other ranks."""
        return {
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "port": self._socket.getsockname()[1],
            "addresses": self._addresses,
        }

    def _start(self) -> dict[str, Any] | None:
        """Start the sentinel process and return its address and ports; None if it does not start."""
        # Isolated from the environment and without site-packages, it starts in 20 ms and takes 10 MB. It has its own
        # session because launchers signal a rank's whole process group.
        program = f"import sys; sys.path.insert(0, {ROOT!r}); from hvdtrain.sentinel.watch import main; main()"
        command = [sys.executable, "-I", "-S", "-c", program, f"hvdtrain-sentinel of rank {self._rank}"]
        try:
            self._process = subprocess.Popen(
                [*command, *([self.route.source] if self.route else [])],
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
        return {"address": self.route.source if self.route else None, **ports}

    def _job_table(self, offers: list[dict[str, Any]], ports: list[dict[str, Any] | None]) -> dict[str, Any]:
        """The hosts and ranks of the job, for the sentinel."""
        leaders = [rank for rank, own in enumerate(ports) if own and (own["address"] or rank == self._rank)]
        if not self.route:
            leaders = [self._rank]
        hosts = []
        for leader in leaders:
            ranks = [rank for rank, other in enumerate(offers) if other["machine"] == offers[leader]["machine"]]
            hosts.append({"name": offers[leader]["host"], "ranks": ranks, **(ports[leader] or {})})
        machine = offers[self._rank]["machine"]
        local = [(rank, offer) for rank, offer in enumerate(offers) if offer["machine"] == machine]
        return {
            "job_key": self._job_key.hex(),
            "host": leaders.index(self._rank),
            "hosts": hosts,
            "ranks": [{"rank": rank, "pid": offer["pid"], "port": offer["port"]} for rank, offer in local],
            "stall_limit_s": 0.0 if self._elastic else self._stall_limit_s,
            "elastic": self._elastic,
        }

    # --- the rank's reports ----------------------------------------------------------------------------------------

    def report_finished(self) -> None:
        """This rank is about to end without an error."""
        self._report(RankReport.FINISHED)

    def report_failed(self) -> None:
        """This rank is about to end with an error, which it has printed."""
        self._report(RankReport.FAILED)

    def _report(self, report: int) -> None:
        for _ in range(3):  # UDP may lose one
            self._send_report(bytes([report]))

    def _send_report(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(message)

    def set_run_folder(self, folder: str, command: str) -> None:
        """The run folder, and the command that resumes the run, for the sentinel's message."""
        self._order({"folder": folder, "command": command})

    # --- the link --------------------------------------------------------------------------------------------------

    def measure_links(self, gather: Callable[[Any], list[Any]]) -> list[dict[str, Any]]:
        """Measure the goodput of each host's link in 1.2 s; return the fields of `records.Manifest.links`. Collective.

        Empty on a single host. `gather` returns every rank's value, by rank. All hosts measure at the same time.
        """
        measures = self._process is not None and self._next_host is not None
        if any(gather(measures)):  # also a barrier
            if not measures:
                time.sleep(SETTLE_S + COUNT_S)  # ranks that wait in MPI would poll, and disturb the measurement
            self.links = [link for link in gather(self._link() if measures else None) if link]
        return self.links

    def _link(self) -> dict[str, Any]:
        """This host's link for the manifest, with its goodput measured now."""
        throttled = net.requested_throttle()
        if throttled and self.nic and throttled.get("dev") not in (self.nic, None):
            throttled = None  # of another interface, which this run does not use
        link: dict[str, Any] = {
            "host": socket.gethostname(),
            "nic": self.nic,
            "address": self.route and self.route.source,
            "speed_mbit": self.route and net.speed_mbit(self.route.device),
            "throttle": throttled,
            "goodput_to": self._next_host,
            "goodput_mbit": None,
            "reason": f"no common network with {self._next_host}",
        }
        if self.route:
            self._order({"measure": True})
            link |= self._answer(ANSWER_S) or {"reason": "the sentinel did not answer"}
        return link

    @property
    def nic(self) -> str | None:
        """The interface of the link; None on a single host, and unless this rank started the sentinel."""
        return self.route.device if self.route and self._process else None

    def nic_counters(self) -> tuple[int, int] | None:
        """Bytes sent and received so far by the link's interface; None unless this rank started the sentinel."""
        with contextlib.suppress(OSError, KeyError):
            return net.counters(self.nic) if self.nic else None
        return None

    # --- the process -----------------------------------------------------------------------------------------------

    def _order(self, order: dict[str, Any]) -> None:
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


def machine() -> str:
    """Return what is equal for ranks on one host: hosts may share a name, and containers a machine."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "net")]
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)
