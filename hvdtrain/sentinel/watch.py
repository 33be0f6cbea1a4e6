"""The sentinel of one host: a small process that keeps watching while the ranks are blocked in a collective.

    each second:  check the ranks of this host and their launcher; send a heartbeat to the other hosts
    on a fault:   report it once, tell the other hosts, end the ranks, then any launcher that would never end

Faults are: a rank that dies without a report, a rank that stays stopped while others run, a launcher that is gone, a
silent host, and ranks that wait for one without progress (`stalls`). A rank reports how it ends (`RankReport`), and the
C handler reports each signal even while the rank is blocked in C++, so an ordinary end never counts as a fault.

Heartbeats use UDP, which passes a saturated link with some losses and survives a short interruption. A host is watched
only after its first heartbeat, so a firewall disables the watch but does not end the job. Heartbeats are signed with
the job key and carry an increasing number (`auth`). They use a socket on the link; the reports of ranks use one on
loopback. The kernel filters both by sender.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.launch import stalls
from hvdtrain.launch.stalls import numbers
from hvdtrain.sentinel import auth, ending, goodput
from hvdtrain.sentinel.orders import Orders, write
from hvdtrain.sentinel.processes import HARMLESS, Process, launchers
from hvdtrain.system import socket_filter

BEAT_S = 1.0
SILENCE_S = 15.0
"""Silence of a host that is a fault: three times a cable unplugged for 5 s. Within 30 s the job must have ended"""
STOPPED_S = 15.0
"""How long a rank may be stopped while others run. If all are stopped, the user suspended the job"""
ASLEEP_S = 5.0
"""If this process did not run for this long (a suspended machine), the other deadlines start again"""
REFUSED_S = 10.0
MAX_MESSAGES = 1000
"""Messages taken per round, so that a flood does not stop the other duties"""
PURPOSE = b"heartbeat"


class RankReport:
    """Reports of a rank to its sentinel, one byte each. Signal numbers are lower; `stalls` has two more."""

    FINISHED = 76
    """It ends without an error. Later messages from its port do not count, since others may bind the port"""
    FAILED = 70
    """It ends with an error, which it has printed"""


class Rank:
    """A rank of this host."""

    def __init__(self, number: int, pid: int) -> None:
        self.number = number
        self.process = Process(pid)
        self.launchers = launchers(pid)
        """In an ordinary end, each outlives the rank"""
        self.last_report: int | None = None
        self.stopped_since: float | None = None


class Peer:
    """The sentinel of another host."""

    def __init__(self, index: int, host: dict[str, Any], now: float) -> None:
        self.index = index
        self.name: str = host["name"]
        self.ranks: list[int] = host["ranks"]
        self.address: tuple[str, int] = (host["address"], host["udp"])
        self.number = 0
        """Number of its last message"""
        self.heard_at: float | None = None
        self.known_since = now
        self.finished = self.idle = self.knows_fault = self.warned = False
        self.refused_since: float | None = None
        self.stall: dict[str, Any] = {}
        """See `Stalls.summary`"""


class Watch:
    """The rules: when there is a fault, and what follows. The caller provides the time."""

    def __init__(
        self, table: dict[str, Any], reports: socket.socket, heartbeats: socket.socket | None, now: float
    ) -> None:
        """`reports`: socket for the ranks of this host. `heartbeats`: socket for other hosts; None without a route."""
        self._job_key: bytes = bytes.fromhex(table["job_key"])
        self._index: int = table["host"]
        self._reports, self._heartbeats = reports, heartbeats
        self._beats = 0
        self._host: str = table["hosts"][self._index]["name"]
        self._peers = [Peer(i, host, now) for i, host in enumerate(table["hosts"]) if i != self._index]
        self._ranks = {("127.0.0.1", r["port"]): Rank(r["rank"], r["pid"]) for r in table["ranks"]}
        chains = [rank.launchers for rank in self._ranks.values()]
        self._launchers = list({p.pid: p for chain in chains for p in chain}.values())
        pids = {r["rank"]: r["pid"] for r in table["ranks"]}
        self._stalls = stalls.Stalls(table.get("stall_limit_s", 0.0), self._host, pids, now)
        self._elastic: bool = table.get("elastic", False)
        self.folder: str | None = None
        self.command: str | None = None
        self._last_round = self._next_beat = now
        self._fault: dict[str, Any] | None = None
        self._fault_at = 0.0
        self._fault_printed = False
        self._ending: ending.Ending | None = None

    # --- one round -------------------------------------------------------------------------------------------------

    def describe(self, order: dict[str, Any]) -> None:
        """Take the run folder, and the command that resumes the run."""
        self.folder, self.command = order.get("folder", self.folder), order.get("command", self.command)

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank or launcher ends."""
        processes = [rank.process for rank in self._ranks.values()] + self._launchers
        return [p.pidfd for p in processes if p.pidfd is not None and not p.gone()]

    def round(self, now: float) -> bool:
        """Receive, check, act, send. Returns False when nothing is left to do."""
        self._receive(now)
        if now - self._last_round > ASLEEP_S:
            self._restart_deadlines(now)
        self._last_round = now
        alive = [rank for rank in self._ranks.values() if not rank.process.gone()]
        if self._fault is None and (fault := self._find_fault(now)):
            self._begin(fault, now)
        if self._fault is not None:
            self._print_fault(now)
            assert self._ending is not None
            more = self._ending.advance(now - self._fault_at)
            if not alive and (self._fault_printed or not self._fault["text"]):
                _release_stderr()  # launchers wait until no process holds it
        else:
            more = bool(alive)
        if now >= self._next_beat or not more:
            self._send_heartbeat(now, finished=not more)
            self._stalls.report(write)
            self._next_beat = now + (BEAT_S if self._fault is None else BEAT_S / 5)
        return more

    def only_receive(self, now: float) -> bool:
        """Take heartbeats. Returns whether there is nothing else to do until this host's next one."""
        self._receive(now)
        return self._fault is None and now < self._next_beat

    def pause_s(self, now: float) -> float:
        """Seconds until the next heartbeat is due."""
        return max(0.0, min(self._next_beat - now, BEAT_S))

    def _restart_deadlines(self, now: float) -> None:
        for peer in self._peers:
            peer.heard_at = peer.heard_at and now
            peer.known_since = now
        for rank in self._ranks.values():
            rank.stopped_since = rank.stopped_since and now
        self._stalls.resume(now)

    # --- faults ----------------------------------------------------------------------------------------------------

    def _find_fault(self, now: float) -> dict[str, Any] | None:
        """The first fault: its kind (see `ending`) and the text to print, empty if a rank has printed the error."""
        if self._elastic:  # the launcher finds faults, because it knows the members
            return None
        for rank in self._ranks.values():
            if rank.process.gone():
                self._receive(now)  # its last report may have arrived since
                if rank.last_report is None:
                    what = f"rank {rank.number} on {self._host} died unexpectedly"
                    why = "killed by its launcher, as after Ctrl-C, or out of memory, or a crash; hint: see dmesg there"
                    return {"kind": "died", "text": f"{what} ({why})"}
                if rank.last_report == RankReport.FAILED:
                    return {"kind": "failed", "text": ""}
            lost = next((p for p in rank.launchers if p.gone()), None)
            if lost is not None and not rank.process.gone():
                text = f"{lost.name} (process {lost.pid}) on {self._host}, which started rank {rank.number}, is gone"
                return {"kind": "launcher", "text": text}
        return self._find_stopped(now) or self._find_silent(now) or self._find_stalled()

    def _find_stopped(self, now: float) -> dict[str, Any] | None:
        ranks = [rank for rank in self._ranks.values() if not rank.process.gone()]
        for rank in ranks:
            rank.stopped_since = (rank.stopped_since or now) if rank.process.state() == "T" else None
            if rank.process.state() in "Tt":
                self._stalls.resume(now, [rank.number])
        if self._all_stopped() and all(peer.idle or peer.finished for peer in self._peers):  # the job is suspended
            for rank in ranks:
                rank.stopped_since = now
            return None
        stopped = [
            rank.number for rank in ranks if rank.stopped_since is not None and now - rank.stopped_since > STOPPED_S
        ]
        if not stopped:
            return None
        text = f"{numbers(stopped)} on {self._host}: stopped (SIGSTOP) for {STOPPED_S:g} s while others wait"
        return {"kind": "stopped", "text": text}

    def _find_stalled(self) -> dict[str, Any] | None:
        text = self._stalls.judge([peer.stall for peer in self._peers if not peer.finished])
        return {"kind": "stopped", "text": text} if text else None

    def _all_stopped(self) -> bool:
        """Whether all ranks of this host are stopped."""
        return all(rank.stopped_since is not None for rank in self._ranks.values())

    def _find_silent(self, now: float) -> dict[str, Any] | None:
        silent = [p for p in self._peers if p.heard_at is not None and not p.finished and now - p.heard_at > SILENCE_S]
        for peer in self._peers:
            self._warn(peer, now)
        if not silent:
            return None
        if len(silent) == len(self._peers) > 1:
            text = f"{self._host} has not heard from any other host for {SILENCE_S:g} s (is its link down?)"
        else:
            names = " and ".join(f"{peer.name} ({numbers(peer.ranks)})" for peer in silent)
            text = f"host {names}: silent for {SILENCE_S:g} s (host or link down, seen from {self._host})"
        return {"kind": "lost", "text": text}

    def _warn(self, peer: Peer, now: float) -> None:
        """Warn once that a host is not watched. Only the first host warns, about the others."""
        if self._index or peer.warned or peer.finished:
            return
        if peer.heard_at is None and now - peer.known_since > SILENCE_S:
            reason = f"its heartbeats (UDP port {peer.address[1]}, both directions) do not arrive; a firewall?"
        elif peer.refused_since is not None and now - peer.refused_since > REFUSED_S:
            reason = "its sentinel is gone"
        else:
            return
        peer.warned = True
        write(f"hvdtrain: a failure of {peer.name} or its link will not be noticed: {reason}")

    # --- what follows from a fault ---------------------------------------------------------------------------------

    def _begin(self, fault: dict[str, Any], now: float) -> None:
        if self._fault is None:
            self._fault_at = now
            self._ending = ending.Ending(fault["kind"], [r.process for r in self._ranks.values()], self._launchers)
        self._fault = fault
        self._next_beat = now

    def _print_fault(self, now: float) -> None:
        """Print the fault once per job: on the host of rank 0, or where it was found if that host does not answer."""
        assert self._fault is not None
        if self._fault_printed or not self._fault["text"]:
            return
        if self._index:
            known = any(peer.knows_fault for peer in self._peers if peer.index == 0)
            self._fault_printed = known or not self._fault.get("own", True)
            if self._fault_printed or now - self._fault_at < BEAT_S:
                return
        self._fault_printed = True
        hint = "no checkpoint was written yet"
        if self.folder and _has_checkpoint(self.folder):
            hint = f"to continue: {self.command}"
        if self.folder and not self.command:  # a user's script, which writes its own checkpoints
            hint = f"its records are in {self.folder}"
        write(f"hvdtrain: {self._fault['text']}; ending the job; {hint}")

    # --- messages --------------------------------------------------------------------------------------------------

    def _send_heartbeat(self, now: float, finished: bool) -> None:
        self._beats += 1
        message = {
            "number": self._beats,
            "host": self._index,
            "idle": self._all_stopped(),
            "finished": finished,
            "fault": self._fault,
            "stall": self._stalls.summary(now),
        }
        data = auth.sign(self._job_key, PURPOSE, json.dumps(message).encode())
        for peer in self._peers:
            if self._heartbeats is not None and not peer.finished:
                for _ in range(3 if finished else 1):
                    with contextlib.suppress(OSError):  # no route while a link is down, or the last one was refused
                        self._heartbeats.sendto(data, peer.address)

    def _receive(self, now: float) -> None:
        for data, sender in _datagrams(self._reports):
            rank = self._ranks.get(sender)
            if rank and data[:1] in (stalls.WAIT, stalls.PROGRESS):
                self._stalls.receive(rank.number, data, now)
            elif rank and data and data[-1] not in HARMLESS and rank.last_report != RankReport.FINISHED:
                rank.last_report = data[-1]
        if self._heartbeats is not None:
            self._check_refused(self._heartbeats, now)
            for data, _ in _datagrams(self._heartbeats):
                if (content := auth.verify(self._job_key, PURPOSE, data)) is not None:
                    self._read_heartbeat(json.loads(content), now)

    def _check_refused(self, heartbeats: socket.socket, now: float) -> None:
        """Find the hosts without a sentinel in the socket's error queue (ip(7), IP_RECVERR)."""
        with contextlib.suppress(OSError):
            while True:
                _, ancillary, _, address = heartbeats.recvmsg(4096, 4096, socket.MSG_ERRQUEUE)
                refused = any(struct.unpack_from("=I", data)[0] == errno.ECONNREFUSED for _, _, data in ancillary)
                for peer in self._peers:
                    if refused and address == peer.address and peer.heard_at is not None:
                        # The host is alive but its sentinel is not, so its silence means nothing.
                        peer.heard_at, peer.refused_since, peer.stall = None, now, {}
                        peer.known_since = float("inf")

    def _read_heartbeat(self, message: dict[str, Any], now: float) -> None:
        peer = next((peer for peer in self._peers if peer.index == message["host"]), None)
        if peer is None or message["number"] <= peer.number:  # duplicated by the network, or replayed by an attacker
            return
        peer.number, peer.heard_at, peer.refused_since = message["number"], now, None
        peer.idle, peer.finished, peer.stall = message["idle"], message["finished"], message.get("stall", {})
        fault = message["fault"]
        peer.knows_fault = fault is not None and bool(fault["text"])
        if fault and self._fault is None:
            self._begin({**fault, "own": False}, now)


def _datagrams(receiver: socket.socket) -> Iterator[tuple[bytes, tuple[str, int]]]:
    """The pending datagrams and their senders, at most MAX_MESSAGES."""
    for _ in range(MAX_MESSAGES):
        try:
            yield receiver.recvfrom(4096)
        except BlockingIOError:
            return
        except OSError:  # an earlier message was not delivered; see the error queue
            continue


def _has_checkpoint(folder: str) -> bool:
    try:
        return any((Path(folder) / "checkpoints").glob("step-*"))
    except OSError:
        return False


def _release_stderr() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def main() -> None:
    """Print this process's ports on stdout, read the job table on stdin, and watch until the ranks of this host end.

    The optional second argument is the address of the link to other hosts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; this process ends with its ranks
    reports, heartbeats, receiver = _udp_socket("127.0.0.1"), None, None
    if len(sys.argv) > 2:
        heartbeats, receiver = _udp_socket(sys.argv[2]), goodput.Receiver(sys.argv[2])
        heartbeats.setsockopt(socket.IPPROTO_IP, getattr(socket, "IP_RECVERR", 11), 1)
    ports = {"udp": heartbeats.getsockname()[1], "tcp": receiver.port} if heartbeats and receiver else {}
    print(json.dumps({"reports": reports.getsockname()[1], **ports}), flush=True)
    first = os.fdopen(0, "rb", buffering=0, closefd=False).readline()
    if not first.strip():
        return
    table = json.loads(first)
    with contextlib.suppress(OSError):  # without the filter, other users of this host can crowd out a rank's reports
        socket_filter.only_senders(reports, [("127.0.0.1", rank["port"]) for rank in table["ranks"]])
    orders: Orders | None = Orders(table)
    if heartbeats and receiver and orders:
        with contextlib.suppress(OSError):  # without the filter, strangers can crowd out hosts but not impersonate them
            socket_filter.only_senders(heartbeats, [(host["address"], host["udp"]) for host in table["hosts"]])
        orders.open(receiver)
    watch = Watch(table, reports, heartbeats, time.monotonic())
    poll = select.poll()
    for one in (reports, heartbeats, 0):
        if one is not None:
            poll.register(one, select.POLLIN)
    while watch.round(time.monotonic()):
        # The end of a process wakes the poll at once; it must not wake it again in the next round.
        ends = watch.descriptors()
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        events = dict(poll.poll(1000 * watch.pause_s(time.monotonic())))
        while heartbeats and [*events] == [heartbeats.fileno()] and watch.only_receive(time.monotonic()):
            events = dict(poll.poll(1000 * watch.pause_s(time.monotonic())))
        for descriptor in ends:
            poll.unregister(descriptor)
        if orders and 0 in events and not orders.read(watch.describe):
            poll.unregister(0)
            orders = None


def _udp_socket(address: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind((address, 0))
    bound.setblocking(False)
    return bound
