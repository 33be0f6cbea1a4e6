"""Start one supervised group of ranks per host, and let the job continue if a host is lost (`--elastic`).

mpirun ends all ranks when one dies, and its --enable-recovery returns 0 for failed jobs too. So this launcher starts an
agent on each host over ssh (`agent`), and decides alone who belongs to the job. Each list of members is a view with a
number. A host is lost if a signal ends one of its ranks, if its connection ends, or if it is silent for SILENCE_S.
Nobody else makes views, so the two sides of a divided network can never both continue: a side without the launcher gets
no new view. A new view needs at least half of the hosts of the last one, and --min-hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain.launch.agent import BEAT_S, Line
from hvdtrain.system import exits, net, ssh
from hvdtrain.system.commands import Command
from hvdtrain.system.hosts import Slots

SILENCE_S = 4.0
"""Silence of a host after which the others continue without it"""
AGAIN_S = SILENCE_S + 1
"""Wait before the same members connect again, if a connection broke although no host is lost"""
ATTEMPTS = 5
"""Views in a row in which the members could not connect, after which the job ends"""
START_S = 30.0
"""Time for the connection to a host, and for its agent to start"""
LAST_WORDS_S = 4.0
"""Time for the other ranks to end after one of them failed"""
KEY_BYTES = 32
ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from hvdtrain.launch.agent import main; main()"


def agent_command(host: str, address: str) -> Command:
    """The words that start the agent of a host, without ssh if the host is this machine."""
    words = [sys.executable, "-I", "-S", "-c", PROGRAM]
    return words if net.is_own(address) else ssh.command(host, words)


@dataclasses.dataclass
class Host:
    """A host of the job."""

    name: str
    ranks: list[int]
    process: subprocess.Popen[bytes]
    line: Line
    heard_at: float
    lost: bool = False
    running: set[int] = dataclasses.field(default_factory=set)
    """Its ranks that have not ended"""

    @property
    def gone(self) -> bool:
        return self.lost or not self.running


class Members:
    """The rule for views: which hosts continue after a loss."""

    def __init__(self, hosts: int, min_hosts: int) -> None:
        self.number, self.present, self._least = 0, list(range(hosts)), min_hosts
        self._established = hosts
        """Hosts of the last view in which all members were connected"""

    def lose(self, host: int) -> str | None:
        """Remove a host. Returns why the others cannot continue, or None if they can."""
        self.present.remove(host)
        self.number += 1
        count = len(self.present)
        if count < self._least:
            return f"{count} of at least {self._least} hosts are left (--min-hosts)"
        if 2 * count < self._established:
            return f"{count} of {self._established} hosts are left, less than half"
        return None

    def establish(self, number: int) -> None:
        """All members of view `number` are connected."""
        if number == self.number:
            self._established = len(self.present)


class ElasticJob:
    """A running elastic job."""

    def __init__(
        self,
        places: Sequence[tuple[Slots, str]],
        command: Command,
        environment: Mapping[str, str],
        *,
        min_hosts: int,
        grace_s: float,
    ) -> None:
        """`places`: each host with its slots and its address."""
        self._grace_s, self._members = grace_s, Members(len(places), min_hosts)
        self._signals: list[signal.Signals] = []
        self._deadline: float | None = None
        self._woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._code: int | None = None
        self._began: set[int] = set()
        self._joined: set[int] = set()
        self._finished = self._ending = False
        self._give_up_at = float("inf")
        self._gathers: dict[tuple[int, int], dict[int, str]] = {}
        self._again_at: float | None = None
        self._attempts = 0
        self._hosts: list[Host] = []
        first, size = 0, sum(slots.slots for slots, _ in places)
        numbers = []
        for slots, _ in places:
            numbers.append(list(range(first, first + slots.slots)))
            first += slots.slots
        names = [slots.host for (slots, _), ranks in zip(places, numbers, strict=True) for _ in ranks]
        view = {"number": 0, "ranks": list(range(size)), "hosts": names, "reason": ""}
        hello = {"job_key": secrets.token_hex(KEY_BYTES), "view": view}
        job = {"command": command, "environment": dict(environment), "folder": str(Path.cwd()), "size": size}
        for (slots, address), ranks in zip(places, numbers, strict=True):
            process = subprocess.Popen(
                agent_command(slots.host, address),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
                bufsize=0,
            )
            assert process.stdin is not None and process.stdout is not None
            line = Line(process.stdout.fileno(), process.stdin.fileno())
            host = Host(slots.host, ranks, process, line, time.monotonic() + START_S, running={*ranks})
            line.send({**job, "ranks": ranks, "hello": hello})
            self._hosts.append(host)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = number != signal.SIGUSR1 and any(before != signal.SIGUSR1 for before in self._signals)
        self._signals.append(signal.Signals(number))
        if number != signal.SIGUSR1 and self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
        if again:
            self._deadline = 0.0

    def wait(self) -> int:
        """Wait until the job has ended. Returns its exit code."""
        next_beat, asked_at, before = 0.0, 0.0, time.monotonic()
        while not all(host.gone for host in self._hosts):
            now = time.monotonic()
            if now - before > SILENCE_S / 2:  # this process could not run, so it does not know who was silent
                for host in self._hosts:
                    host.heard_at = max(host.heard_at, now)
            before = now
            if self._signals and now - asked_at > 5.0:
                if not asked_at:
                    _say("stopping: the ranks save a checkpoint (a second SIGTERM or Ctrl-C ends them immediately)")
                self._send_all({"signal": signal.SIGUSR1})
                asked_at = now
            if self._deadline is not None and now > self._deadline:
                self._end(None)
            if now > self._give_up_at:
                break
            if now >= next_beat:
                self._send_all({"beat": 1})
                next_beat = now + BEAT_S
            self._receive(BEAT_S / 4)
            self._check(time.monotonic())
        self._dismiss()
        if self._code is not None:
            return self._code
        if self._finished:
            return exits.OK
        return 128 + self._signals[0] if self._signals else exits.FAILED

    # --- what arrives ----------------------------------------------------------------------------------------------

    def _receive(self, patience_s: float) -> None:
        sources = {host.line.source: index for index, host in enumerate(self._hosts) if not host.lost}
        ready = select.select([self._woken, *sources], [], [], patience_s)[0]
        for source in ready:
            if source == self._woken:
                os.read(self._woken, 4096)
                continue
            index = sources[source]
            host = self._hosts[index]
            messages = host.line.receive()
            if messages is None:
                self._closed(index)
                continue
            for message in messages:
                host.heard_at = max(host.heard_at, time.monotonic())
                self._take(index, message)

    def _closed(self, index: int) -> None:
        host = self._hosts[index]
        if host.running and not host.lost:
            self._lose(index, f"the connection to host {host.name} ended")
        host.lost = True

    def _take(self, index: int, message: dict[str, Any]) -> None:
        host = self._hosts[index]
        if "stdout" in message:
            with contextlib.suppress(OSError):
                os.write(1, message["stdout"].encode("utf-8", "surrogateescape"))
        elif "ended" in message:
            self._rank_ended(index, message["ended"], message["code"])
        elif "from" in message and not host.lost:
            self._heard(message["from"], message["message"])

    def _heard(self, rank: int, message: dict[str, Any]) -> None:
        if "gather" in message:
            key = message["of"], message["gather"]
            if key[0] != self._members.number:
                return
            self._gathers.setdefault(key, {})[rank] = message["data"]
            ranks = self._ranks()
            if self._gathers[key].keys() == {*ranks}:
                parts = self._gathers.pop(key)
                self._tell({"of": key[0], "gathered": key[1], "data": [parts[each] for each in ranks]})
        elif "began" in message:
            self._began.add(rank)
        elif "joined" in message and message["joined"] == self._members.number:
            self._joined.add(rank)
            if self._joined == {*self._ranks()}:
                self._members.establish(self._members.number)
                self._again_at, self._attempts = None, 0
        elif "broken" in message and self._finished:
            self._end(None)  # the run is complete, and this rank waits for one that has ended
        elif "broken" in message and message["broken"] == self._members.number and self._again_at is None:
            self._again_at = time.monotonic() + AGAIN_S

    def _rank_ended(self, index: int, rank: int, code: int) -> None:
        host = self._hosts[index]
        host.running.discard(rank)
        if code == 0:
            self._finished = True  # rank 0 writes COMPLETE before any rank ends
        elif code < 0 and not self._ending:
            name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
            reason = f"rank {rank} on {host.name} was ended by {name}"
            if self._finished:
                _say(f"{reason}, after another rank had finished")
            self._lose(index, reason)
        elif self._code is None and code > 0:
            self._code = code
            last = time.monotonic() + LAST_WORDS_S
            self._deadline = last if self._deadline is None else min(self._deadline, last)

    # --- members ---------------------------------------------------------------------------------------------------

    def _ranks(self) -> list[int]:
        return [rank for index in self._members.present for rank in self._hosts[index].ranks]

    def _check(self, now: float) -> None:
        """Look for silent hosts, and for members that could not connect."""
        for index in [*self._members.present]:
            host = self._hosts[index]
            if not host.gone and now - host.heard_at > SILENCE_S:
                self._lose(index, f"host {host.name} is silent for {SILENCE_S:g} s (host or link down)")
        if self._again_at is not None and now > self._again_at and not self._ending:
            self._attempts += 1
            if self._attempts > ATTEMPTS:
                self._end(f"its ranks could not connect {ATTEMPTS} times, although all hosts answer")
            self._members.number += 1
            self._show_view("a connection broke")

    def _lose(self, index: int, reason: str) -> None:
        host = self._hosts[index]
        host.line.send({"end": True})
        host.lost = True
        if self._ending or self._finished or index not in self._members.present:
            return
        if self._began != {rank for each in self._hosts for rank in each.ranks} and self._members.number == 0:
            self._end(f"{reason} before step 0")
            return
        if problem := self._members.lose(index):
            self._end(f"{reason}; {problem}")
            return
        names = ", ".join(self._hosts[each].name for each in self._members.present)
        _say(f"{reason}; continuing with {names} (view {self._members.number})")
        self._show_view(reason)

    def _show_view(self, reason: str) -> None:
        """Send the present members to each of them."""
        self._joined, self._again_at = set(), None
        self._gathers.clear()
        ranks = self._ranks()
        names = [self._hosts[index].name for index in self._members.present for _ in self._hosts[index].ranks]
        view = {"number": self._members.number, "ranks": ranks, "hosts": names, "reason": reason}
        self._tell({"view": view})

    # --- messages and the end --------------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks of the members."""
        for index in self._members.present:
            host = self._hosts[index]
            host.line.send({"to": host.ranks, "message": message})

    def _send_all(self, order: dict[str, Any]) -> None:
        for host in self._hosts:
            if not host.lost:
                host.line.send(order)

    def _end(self, reason: str | None) -> None:
        """Kill all ranks. `reason`: printed, unless a rank or the user knows it."""
        if self._ending:
            return
        self._ending, self._give_up_at = True, time.monotonic() + LAST_WORDS_S
        if reason:
            _say(f"{reason}; ending the job; hint: continue from the last checkpoint with --resume")
        self._send_all({"end": True})

    def _dismiss(self) -> None:
        """End the agents: those of lost hosts may not answer."""
        for host in self._hosts:
            assert host.process.stdin is not None
            host.process.stdin.close()
        until = time.monotonic() + LAST_WORDS_S
        for host in self._hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(max(0.0, 0.0 if host.lost else until - time.monotonic()))
        for host in self._hosts:
            if host.process.poll() is None:
                host.process.terminate()
                host.process.wait()


def show(places: Sequence[tuple[Slots, str]], command: Command) -> str:
    """The commands of a dry run. The agents get the ranks' command on standard input."""
    lines = [shlex.join(agent_command(slots.host, address)) for slots, address in places]
    return "\n".join([*lines, f"# each starts its ranks of: {shlex.join(command)}"])


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"hvdtrain: {text}\n".encode())
