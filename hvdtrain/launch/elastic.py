"""Start the ranks of each host, and let the job continue if a host is lost (`--elastic`).

mpirun ends all ranks when one dies, and its --enable-recovery returns 0 for failed jobs too. So this launcher starts an
agent on each host over ssh (`agent`), and decides alone who belongs to the job. Each list of members is a view with a
number. A host is lost if a signal ends one of its ranks, if its connection ends, or if it is silent for SILENCE_S.
Only the launcher makes views, so the two sides of a divided network can never both continue: a side without the
launcher gets no new view. A new view needs at least half of the hosts of the last one.

A lost host is started again as soon as it answers, and so is a host that is added to the hostfile. When its ranks are
ready, rank 0 of the job opens the next view between two steps, and gives them its state (`comm.elastic`).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.launch.agent import BEAT_S
from hvdtrain.launch.hostfile import HostfileWatch, say
from hvdtrain.launch.line import BrokenLine
from hvdtrain.launch.members import RETURN_MAX_S, Gathers, Host, Members, arrival, ask_who_blocks, dismiss
from hvdtrain.launch.stopping import StopRequests
from hvdtrain.system import exits
from hvdtrain.system.commands import Command
from hvdtrain.system.hosts import Slots

SILENCE_S = 4.0
"""Silence of a host after which the others continue without it"""
AGAIN_S = SILENCE_S + 1
"""Wait before the same members connect again, if a connection broke although no host is lost"""
ATTEMPTS = 5
"""Views in a row in which the members could not connect, after which the job ends"""
LOOK_S = 1.0
"""Time between two looks for stalls"""
LAST_WORDS_S = 4.0
"""Time for the other ranks to end after one of them failed"""
KEY_BYTES = 32


class ElasticJob:
    """A running elastic job."""

    def __init__(
        self,
        places: Sequence[tuple[Slots, str]],
        command: Command,
        environment: Mapping[str, str],
        *,
        hostfile: Path | None,
        returns: bool,
        grace_s: float,
    ) -> None:
        """`places`: each host with its slots and its address. `hostfile`: hosts that are added to this file take part.
        `returns`: whether hosts may come back."""
        self._returns = returns
        self._addresses = {slots.host: address for slots, address in places}
        self._hostfile = HostfileWatch(hostfile, self._addresses) if hostfile else None
        self._members = Members(len(places))
        self._stop = StopRequests(grace_s, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        self._code: int | None = None
        self._began: set[int] = set()
        self._joined: set[int] = set()
        # Hosts that were lost while others had not come to step 0, with the reason, and how long to wait for these
        self._early: dict[int, tuple[str, float]] = {}
        self._finished = self._ending = False
        self._give_up_at = math.inf
        self._gathers = Gathers()
        self._again_at: float | None = None
        self._attempts = 0
        self._next_look = 0.0
        size = sum(slots.slots for slots, _ in places)
        self._job = {"command": command, "environment": dict(environment), "folder": str(Path.cwd()), "size": size}
        self._hello = {"job_key": secrets.token_hex(KEY_BYTES), "addresses": self._addresses, "begun": {}}
        names = [slots.host for slots, _ in places for _ in range(slots.slots)]
        view = {"number": 0, "ranks": list(range(size)), "hosts": names, "reason": ""}
        numbers = iter(range(size))
        self._hosts = [Host(slots.host, at, [next(numbers) for _ in range(slots.slots)]) for slots, at in places]
        for host in self._hosts:
            self._start(host, view)
        self._next_rank = size + 1  # `size` is the number of the records of a rank 0 that comes back
        if self._hostfile:
            self._hostfile.start()

    def _start(self, host: Host, view: dict[str, Any]) -> None:
        """Start the agent of a host, and its ranks, whose first view is `view`."""
        host.start({**self._job, "host": host.name, "ranks": host.ranks, "hello": {**self._hello, "view": view}})

    def wait(self) -> int:
        """Wait until the job has ended. Returns its exit code."""
        next_beat, asked_at, before = 0.0, 0.0, time.monotonic()
        while not all(self._hosts[index].gone for index in self._members.present):
            now = time.monotonic()
            if now - before > SILENCE_S / 2:  # this process could not run, so it does not know who was silent
                for host in self._hosts:
                    host.heard_at = max(host.heard_at, now)
            before = now
            if self._stop.received and now - asked_at > 5.0:
                if not asked_at:
                    say("stopping: the ranks save a checkpoint (a second SIGTERM or Ctrl-C ends them immediately)")
                self._send_all({"signal": signal.SIGUSR1})
                asked_at = now
            if now > self._stop.deadline:
                self._end(None)
            if now > self._give_up_at:
                break
            if now >= next_beat:
                self._send_all({"beat": 1})
                next_beat = now + BEAT_S
            self._receive(BEAT_S / 4)
            self._check(time.monotonic())
            self._heed_stalls(time.monotonic())
            self._add_hosts(time.monotonic())
            self._bring_back(time.monotonic())
        dismiss(self._hosts, LAST_WORDS_S)
        if self._code is not None:
            return self._code
        if self._finished:
            return exits.OK
        return 128 + self._stop.received[0] if self._stop.received else exits.FAILED

    # --- what arrives ----------------------------------------------------------------------------------------------

    def _receive(self, patience_s: float) -> None:
        sources = {host.line.source: index for index, host in enumerate(self._hosts) if not host.lost}
        ready = select.select([self._stop.woken, *sources], [], [], patience_s)[0]
        for source in ready:
            if source == self._stop.woken:
                os.read(self._stop.woken, 4096)
                continue
            index = sources[source]
            host = self._hosts[index]
            try:
                messages = host.line.receive()
                for message in messages or ():
                    host.heard_at = time.monotonic()  # its agent has started, so START_S does not count any more
                    self._take(index, message)
            except BrokenLine as broken:
                if not host.lost:
                    self._lose(index, str(broken))
                continue
            if messages is None:
                self._closed(index)

    def _closed(self, index: int) -> None:
        host = self._hosts[index]
        if host.running and not host.lost:
            assert host.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):  # the agent could not start the command, and says why
                if host.process.wait(BEAT_S) == exits.UNREACHABLE and index in self._members.present:
                    self._code = exits.UNREACHABLE
                    self._end(None)
            self._lose(index, f"the connection to host {host.name} ended")
        host.lost = True

    def _take(self, index: int, message: dict[str, Any]) -> None:
        host = self._hosts[index]
        rank = message.get("ended", message.get("from"))
        if rank is not None and rank not in host.ranks:
            raise BrokenLine(f"host {host.name} sent a message of rank {rank}, which it does not have")
        if "stdout" in message:
            with contextlib.suppress(OSError):
                os.write(1, message["stdout"].encode("utf-8", "surrogateescape"))
        elif "ended" in message and not host.lost:
            self._rank_ended(index, message["ended"], message["code"])
        elif "stall" in message:
            host.stall, host.limit_s, host.stopped_s = message["stall"], message["limit_s"], message["stopped_s"]
            host.looked_at = time.monotonic()
        elif "from" in message and not host.lost:
            self._heard(index, message["from"], message["message"])

    def _heard(self, index: int, rank: int, message: dict[str, Any]) -> None:
        host = self._hosts[index]
        if "gather" in message:
            key = message["of"], message["gather"]
            if key[0] == self._members.number and index in self._members.present:
                hosts = self._members.present
            elif key[0] == -1 - index:
                hosts = [index]
            else:
                return
            ranks = [each for index in hosts for each in self._hosts[index].ranks]
            if (parts := self._gathers.give(key, rank, message["data"], ranks)) is not None:
                self._tell({"of": key[0], "gathered": key[1], "data": parts}, hosts)
        elif "began" in message:
            self._began.add(rank)
            if rank == host.ranks[0]:  # other ranks of a host measure less
                self._hello["begun"] = message["began"]
        elif "ready" in message:
            host.ready.add(rank)
            self._announce()
        elif "admit" in message and message["admit"] == self._members.number:
            self._admit()
        elif "joined" in message and message["joined"] == self._members.number and index in self._members.present:
            self._joined.add(rank)
            if self._joined == {*self._members.ranks(self._hosts)}:
                self._members.establish(self._members.number)
                for each in self._members.present:
                    self._hosts[each].new = False
                self._again_at, self._attempts = None, 0
        elif "broken" in message and self._finished:
            self._end(None)  # the run is complete, and this rank waits for one that has ended
        elif "broken" in message and message["broken"] == self._members.number and self._again_at is None:
            self._again_at = time.monotonic() + AGAIN_S

    def _rank_ended(self, index: int, rank: int, code: int) -> None:
        host = self._hosts[index]
        host.running.discard(rank)
        if code and index not in self._members.present:
            self._lose(index, f"rank {rank} on {host.name} ended with exit code {code}")
            if code in (exits.BAD_CONFIG, exits.BAD_DATA):  # it would end again
                host.return_at = math.inf
        elif code == 0:
            self._finished = True  # rank 0 writes COMPLETE before any rank ends
        elif code < 0 and not self._ending:
            name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
            reason = f"rank {rank} on {host.name} was ended by {name}"
            if self._finished:
                say(f"{reason}, after another rank had finished")
            self._lose(index, reason)
        elif self._code is None and code > 0:
            self._code = code
            self._stop.deadline = min(self._stop.deadline, time.monotonic() + LAST_WORDS_S)

    # --- members ---------------------------------------------------------------------------------------------------

    def _check(self, now: float) -> None:
        """Look for silent hosts, hosts that were lost before step 0, and members that could not connect."""
        for index, host in enumerate(self._hosts):
            if not host.gone and now - host.heard_at > SILENCE_S:
                self._lose(index, f"host {host.name} is silent for {SILENCE_S:g} s (host or link down)")
        for index, (reason, until) in [*self._early.items()]:
            if self._all_began:
                del self._early[index]
                self._continue_without(index, reason)
            elif now >= until:
                self._end(f"{reason} before step 0")
        if self._again_at is not None and now > self._again_at and not self._ending:
            for index in [*self._members.returned]:
                host = self._hosts[index]
                self._lose(index, f"{arrival([host])}, but the others could not connect to it")
                if host.new:  # each try interrupts the others
                    host.return_at = math.inf
                return
            self._attempts += 1
            if self._attempts > ATTEMPTS:
                self._end(f"its ranks could not connect {ATTEMPTS} times, although all hosts answer")
            self._members.number += 1
            self._show_view("a connection broke")

    def _heed_stalls(self, now: float) -> None:
        """Put out members that keep the others waiting or are stopped."""
        if now < self._next_look or self._ending:
            return
        self._next_look = now + LOOK_S
        hosts = {index: self._hosts[index] for index in self._members.present if not self._hosts[index].gone}
        blocking, reason = ask_who_blocks(hosts, now)
        for index in blocking:
            self._lose(index, reason)
        if reason and not blocking:
            self._end(reason)

    def _lose(self, index: int, reason: str) -> None:
        host = self._hosts[index]
        host.line.send({"end": True})
        host.lost = True
        again = self._returns or host.new
        host.return_at = time.monotonic() + host.wait_s if again else math.inf
        host.wait_s = min(2 * host.wait_s, RETURN_MAX_S)
        if self._ending or self._finished:
            return
        if index not in self._members.present:
            say(f"{reason}, before it took part{'' if host.new else ' again'}")
            self._announce()
            return
        if self._members.number == 0 and not self._all_began:
            if self._began:
                self._early[index] = reason, time.monotonic() + SILENCE_S
            else:
                self._end(f"{reason} before step 0")
        else:
            self._continue_without(index, reason)

    def _continue_without(self, index: int, reason: str) -> None:
        if problem := self._members.lose(index):
            self._end(f"{reason}; {problem}")
            return
        names = ", ".join(self._hosts[each].name for each in self._members.present)
        say(f"{reason}; continuing with {names} (view {self._members.number})")
        self._show_view(reason)

    @property
    def _all_began(self) -> bool:
        """Whether all ranks of hosts that are not lost have come to step 0."""
        hosts = [self._hosts[index] for index in self._members.present]
        return self._began.issuperset(rank for host in hosts if not host.lost for rank in host.ranks)

    def _add_hosts(self, now: float) -> None:
        """Take in hosts that were added to the hostfile, as hosts that are lost and may come back now."""
        while self._hostfile is not None and self._all_began:
            try:
                slots, address = self._hostfile.found.get_nowait()
            except queue.Empty:
                return
            if len(self._addresses) == 1:
                problem = f"{slots.host} cannot join, because the job started on one host"
                say(f"{problem}; hint: start it on two or more hosts")
                continue
            ranks = list(range(self._next_rank, self._next_rank + slots.slots))
            self._next_rank += slots.slots
            self._addresses[slots.host] = address
            self._hosts.append(Host(slots.host, address, ranks, lost=True, new=True, return_at=now))

    def _bring_back(self, now: float) -> None:
        """Start lost and new hosts that answer."""
        for index, host in enumerate(self._hosts):
            if self._ending or self._finished or self._stop.received:
                return
            if not host.lost or now < host.return_at or (answers := host.answers()) is None:
                continue
            host.return_at = now + host.wait_s
            if answers:
                if (slots := len(host.ranks)) > answers and host.new:
                    say(f"{host.name} has {answers} cores, so it gets {answers} ranks instead of {slots}")
                    del host.ranks[answers:]
                self._restart(index)
            elif host.new and not host.unreachable:
                host.unreachable = True
                say(f"{host.name} does not answer, and is tried again; hint: try `ssh {host.name} true`")

    def _restart(self, index: int) -> None:
        """Start the agent and the ranks of a lost or new host. At first they are alone in a view with a negative
        number."""
        host, number = self._hosts[index], -1 - index
        host.stop()
        self._gathers.keep(lambda view: view != number)
        view = {"number": number, "ranks": host.ranks, "hosts": [host.name] * len(host.ranks), "reason": ""}
        self._start(host, view)

    def _announce(self) -> None:
        """Send the members the number of ranks that are ready to take part. Rank 0 answers between two steps."""
        ready = self._members.newcomers(self._hosts)
        self._tell({"newcomers": sum(len(self._hosts[index].ranks) for index in ready)})

    def _admit(self) -> None:
        """Take in the hosts that are ready. Rank 0 waits for the next view."""
        hosts = self._members.newcomers(self._hosts)
        self._members.take_back(hosts)
        reason = arrival([self._hosts[index] for index in hosts])
        say(f"{reason} (view {self._members.number})")
        self._show_view(reason)

    def _show_view(self, reason: str) -> None:
        """Send the present members to each of them."""
        self._joined, self._again_at = set(), None
        self._gathers.keep(lambda view: view < 0)
        self._tell({"view": {**self._members.view(self._hosts), "reason": reason}})
        self._announce()

    # --- messages and the end --------------------------------------------------------------------------------------

    def _tell(self, message: dict[str, Any], hosts: Sequence[int] | None = None) -> None:
        """Send a message to all ranks of some hosts; None for all members."""
        for index in self._members.present if hosts is None else hosts:
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
            hint = "continue from the last checkpoint with --resume" if self._began else "the lines above may say why"
            say(f"{reason}; ending the job; hint: {hint}")
        self._send_all({"end": True})
