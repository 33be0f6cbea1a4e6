"""The hosts of an elastic job, and the rule for its views. Used by `launch.elastic`."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.launch import stalls
from hvdtrain.launch.agent import agent_command, on_host
from hvdtrain.launch.line import FROM_AGENT, Line

START_S = 30.0
"""Time for the connection to a host, and for its agent to start"""
RETURN_S = 5.0
"""Wait before a lost host is started again. It doubles with each loss of that host, up to RETURN_MAX_S"""
RETURN_MAX_S = 60.0
RECENT_S = 3.0
"""Age of the reports of stalls that count"""
STOPPED_S = 15.0
"""How long a rank may be stopped while others run"""

CORES = ["sh", "-c", "echo; exec env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc"]
"""Prints the number of cores in the last line"""


@dataclasses.dataclass
class Host:
    """A host of the job, and its agent."""

    name: str
    address: str
    ranks: list[int]
    process: subprocess.Popen[bytes] | None = None
    """Its agent; None until it is started"""
    line: Line = dataclasses.field(init=False)
    heard_at: float = 0.0
    lost: bool = False
    new: bool = False
    """Whether it was added to the hostfile, and has not taken part yet"""
    unreachable: bool = False
    """A new host that did not answer"""
    running: set[int] = dataclasses.field(default_factory=set)
    """Its ranks that have not ended"""
    ready: set[int] = dataclasses.field(default_factory=set)
    """After it was lost: its new ranks that are ready to take part again"""
    stall: dict[str, Any] = dataclasses.field(default_factory=dict)
    """See `stalls.Stalls.summary`; empty if it is not known"""
    limit_s: float = 0.0
    """Its stall limit; 0 for none"""
    stopped_s: float = 0.0
    """How long one of its ranks has been stopped (SIGSTOP)"""
    looked_at: float = 0.0
    """When its agent reported the last three"""
    wait_s: float = RETURN_S
    return_at: float = float("inf")
    """When it is started again"""
    probe: subprocess.Popen[bytes] | None = None
    """Tries whether the lost or new host answers"""

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self.ranks)

    @property
    def gone(self) -> bool:
        return self.lost or not self.running

    def start(self, job: dict[str, Any]) -> None:
        """Start its agent, which starts the ranks."""
        self.process = process = subprocess.Popen(
            agent_command(self.name, self.address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        self.line = Line(process.stdout.fileno(), process.stdin.fileno(), FROM_AGENT, f"host {self.name}")
        self.line.send(job)
        self.heard_at, self.lost = time.monotonic() + START_S, False
        self.running, self.ready = {*self.ranks}, set()

    def stop(self) -> None:
        """End the connection to its agent at once."""
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()

    def answers(self) -> int | None:
        """Try whether the host can be reached. Returns its cores, 0 if it cannot, and None as long as that is not
        known."""
        if self.probe is None:
            words = on_host(self.name, self.address, CORES)
            quiet = subprocess.DEVNULL
            self.probe = subprocess.Popen(words, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, process_group=0)
        elif (code := self.probe.poll()) is not None:
            assert self.probe.stdout is not None
            with self.probe.stdout as output:  # a login shell may have printed something before the number
                last = output.read().strip().rpartition(b"\n")[2]
            self.probe = None
            return int(last) if code == 0 and last.isdigit() else 0
        return None


def arrival(hosts: Sequence[Host]) -> str:
    """Describe the hosts that take part from now on."""
    back, new = ([host.name for host in hosts if host.new == new] for new in (False, True))
    words = [f"{' and '.join(back)} came back"] if back else []
    words += [f"{' and '.join(new)} {'is' if len(new) == 1 else 'are'} new"] if new else []
    return ", ".join(words) or "a host was ready to take part, and was lost again"


def ask_who_blocks(hosts: Mapping[int, Host], now: float) -> tuple[list[int], str]:
    """Judge the recent reports of the members as `blocked` does, and if there are any, ask each member for its own."""
    stalls = {index: host.stall for index, host in hosts.items() if now - host.looked_at < RECENT_S}
    for index, host in hosts.items() if stalls else ():  # they answer
        host.line.send({"stalls": [stall for other, stall in stalls.items() if other != index and stall]})
    return blocked(hosts, stalls)


def blocked(hosts: Mapping[int, Host], known: Mapping[int, dict[str, Any]]) -> tuple[list[int], str]:
    """Return the hosts for which the others wait, and the reason to put them out, or to end the job if all wait.

    `hosts`: the members. `known`: the recent reports of some of them, see `Stalls.summary`.
    """
    stopped = [index for index in known if hosts[index].stopped_s > STOPPED_S]
    if stopped and len(stopped) < len(hosts):  # otherwise the user suspended the job
        names = " and ".join(hosts[index].name for index in stopped)
        return stopped, f"a rank on {names} was stopped (SIGSTOP) for {STOPPED_S:g} s while others run"
    limit_s = max((hosts[index].limit_s for index in known), default=0.0)
    if not limit_s or len(known) < len(hosts):
        return [], ""
    found = stalls.judge([*known.values()], limit_s)
    if found is None or not found.reason:
        return [], ""
    return [index for index, stall in known.items() if stall["absent"]], found.reason


def dismiss(hosts: Sequence[Host], patience_s: float) -> None:
    """End the agents. On lost hosts they may not answer."""
    agents = [(host.process, host.lost) for host in hosts if host.process is not None]
    for agent, _ in agents:
        assert agent.stdin is not None
        agent.stdin.close()
    until = time.monotonic() + patience_s
    for agent, lost in agents:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, 0.0 if lost else until - time.monotonic()))
    for host in hosts:
        for process in (host.process, host.probe):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()


class Members:
    """The rule for views: which hosts continue after a loss."""

    def __init__(self, hosts: int) -> None:
        self.number, self.present = 0, list(range(hosts))
        self._established = hosts
        """Hosts of the last view in which all members were connected"""
        self.returned: set[int] = set()
        """Present hosts that have come back since then"""

    def lose(self, host: int) -> str | None:
        """Remove a host. Returns why the others cannot continue, or None if they can."""
        self.present.remove(host)
        self.returned.discard(host)
        self.number += 1
        return self.refusal(len(self.present))

    def refusal(self, count: int) -> str | None:
        """Return why `count` hosts cannot continue, or None if they can."""
        if 2 * count < self._established:
            return f"{count} of {self._established} hosts are left, less than half"
        return None

    def take_back(self, hosts: Sequence[int]) -> None:
        """Add hosts behind the others, so that rank 0 has the state of the run."""
        self.present += hosts
        self.returned.update(hosts)
        self.number += 1

    def newcomers(self, hosts: Sequence[Host]) -> list[int]:
        """Return the lost and new ones of all hosts whose ranks are all ready to take part."""
        absent = [(index, host) for index, host in enumerate(hosts) if index not in self.present]
        return [index for index, host in absent if not host.gone and host.all_ready]

    def ranks(self, hosts: Sequence[Host]) -> list[int]:
        return [rank for index in self.present for rank in hosts[index].ranks]

    def view(self, hosts: Sequence[Host]) -> dict[str, Any]:
        """Describe the present members to their ranks."""
        names = [hosts[index].name for index in self.present for _ in hosts[index].ranks]
        return {"number": self.number, "ranks": self.ranks(hosts), "hosts": names}

    def establish(self, number: int) -> None:
        """All members of view `number` are connected."""
        if number == self.number:
            self._established = len(self.present)
            self.returned.clear()


class Gathers:
    """Values of all ranks of a view, until each rank has sent its own."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[int, str]] = {}

    def give(self, key: tuple[int, int], rank: int, value: str, ranks: Sequence[int]) -> list[str] | None:
        """Add the value of a rank to a gather (its view and its number). Returns the values of all `ranks` at last."""
        self._parts.setdefault(key, {})[rank] = value
        if self._parts[key].keys() != {*ranks}:
            return None
        parts = self._parts.pop(key)
        return [parts[each] for each in ranks]

    def keep(self, belongs: Callable[[int], bool]) -> None:
        """Forget the gathers of the other views."""
        self._parts = {key: parts for key, parts in self._parts.items() if belongs(key[0])}
