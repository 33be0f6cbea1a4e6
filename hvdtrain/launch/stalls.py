"""Finds the ranks that keep the others waiting. The sentinel of their host names them, and later ends the job.

In an elastic job the agent of the host names them, and the launcher, which knows the members, later puts the host out.

A rank makes progress while bytes of an exchange move, while it computes (2 % of a processor, including its child
processes), or while it reads and writes files. If ranks wait for the stall limit and no bytes move anywhere, the
sentinel reports it, with the stacks of the ranks that do not take part. The job ends when no rank has made progress for
ENDS_AFTER times as long. A job whose ranks wait while one evaluates or saves a checkpoint is never ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hvdtrain.system import proc

ENDS_AFTER = 5
"""Number of stall limits without progress after which a job ends"""
BUSY = 0.02
"""Fraction of a processor; idle libraries use less"""
FILE_BYTES = 1 << 20
"""Bytes read or written in a quarter of the stall limit that count as progress"""
STACK = signal.SIGRTMAX - 3
"""The signal that makes a rank write its stacks to stderr; other programs are unlikely to use it"""
WAIT, PROGRESS = b"W", b"B"
"""First byte of a rank's report. The seconds waited follow WAIT"""


class Stall(NamedTuple):
    """Ranks have waited for the stall limit, and no bytes move."""

    absent: dict[str, list[int]]
    """By host, the ranks that the others wait for; empty if all ranks wait"""
    reason: str
    """Why to end what they block; empty before ENDS_AFTER stall limits without progress"""


def judge(hosts: Sequence[dict[str, Any]], limit_s: float) -> Stall | None:
    """Judge the summaries of all hosts (`Stalls.summary`). None without a stall, and if nothing is known of a host."""
    if not all(hosts):
        return None
    wait_s = max(host["wait_s"] for host in hosts)
    if min(wait_s, *(host["moved_s"] for host in hosts)) < limit_s:
        return None
    absent = {host["name"]: host["absent"] for host in hosts if host["absent"]}
    if min(wait_s, *(host["progress_s"] for host in hosts)) < ENDS_AFTER * limit_s:
        return Stall(absent, "")
    who = " and ".join(f"{numbers(ranks)} on {host}" for host, ranks in absent.items()) or "all ranks"
    what = "other ranks have waited for it" if absent else "the ranks call different collectives and have waited"
    text = f"{who}: {what} for {wait_s:.0f} s, and no rank has made progress (HVDTRAIN_STALL_LIMIT={limit_s:g} x"
    return Stall(absent, f"{text} {ENDS_AFTER}; 0: no limit)")


class Rank:
    """The state of one rank of this host."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.waits_since: float | None = None
        self.reported_at = self.moved_at = self.progressed_at = self._looked_at = now
        self._used = proc.used(pid)

    def look(self, now: float, limit_s: float) -> None:
        """Forget a wait that has ended, and check whether the rank is busy."""
        if now - self.reported_at > limit_s / 2:
            self.waits_since = None
        if now - self._looked_at >= limit_s / 4:
            seconds, size = proc.used(self.pid)
            busy = seconds - self._used[0] >= BUSY * (now - self._looked_at)
            if busy or size - self._used[1] >= FILE_BYTES:
                self.progressed_at = now
            self._used, self._looked_at = (seconds, size), now


class Stalls:
    """The ranks of this host. Without a stall limit it never finds anything."""

    def __init__(self, limit_s: float, host: str, pids: Mapping[int, int], now: float) -> None:
        """`pids`: the process of each rank of this host."""
        self._limit_s, self._host = limit_s, host
        self._ranks = {number: Rank(pid, now) for number, pid in pids.items()} if limit_s else {}
        self._reported = False
        self._to_name: list[int] = []
        self._named_pid = 0
        """Process of the rank that was named last"""
        self._reason = ""
        self._summary: dict[str, Any] = {}

    def receive(self, number: int, report: bytes, now: float) -> None:
        """Take a report of rank `number`."""
        if (rank := self._ranks.get(number)) is None:
            return
        if report[:1] == PROGRESS:
            rank.moved_at = rank.progressed_at = now
        with contextlib.suppress(ValueError):
            rank.waits_since = None if report[:1] == PROGRESS else now - float(report[1:])
            rank.reported_at = now

    def resume(self, now: float, numbers: Collection[int] | None = None) -> None:
        """These ranks, or all, could not run until now: earlier time does not count."""
        for number, rank in self._ranks.items():
            if numbers is None or number in numbers:
                rank.moved_at = rank.progressed_at = now

    def summary(self, now: float) -> dict[str, Any]:
        """The state of this host for the other hosts. Empty without a limit, or if all ranks have ended.

        `wait_s`: longest wait of a rank here. `absent`: ranks that do not wait. `moved_s`, `progress_s`: seconds since
        bytes moved, and since a rank made progress.
        """
        ranks = {number: rank for number, rank in self._ranks.items() if not proc.ended(rank.pid)}
        for rank in ranks.values():
            rank.look(now, self._limit_s)
        if not ranks:
            self._summary = {}
            return {}
        self._summary = {
            "name": self._host,
            "wait_s": max(0.0 if rank.waits_since is None else now - rank.waits_since for rank in ranks.values()),
            "absent": [number for number, rank in ranks.items() if rank.waits_since is None],
            "moved_s": now - max(rank.moved_at for rank in ranks.values()),
            "progress_s": now - max(rank.progressed_at for rank in ranks.values()),
        }
        return self._summary

    def judge(self, others: Sequence[dict[str, Any]]) -> str:
        """The reason to end the job; empty if it may continue. `others`: the summaries of the other hosts."""
        found = judge([self._summary, *others], self._limit_s) if self._limit_s else None
        if found is None:
            self._reported = False
            return ""
        if not self._reported:
            self._reported = True
            self._to_name = found.absent.get(self._host, []) if found.absent else list(self._ranks)
            waited = f"waited {self._limit_s:g} s for"
            self._reason = f"other ranks have {waited} it" if found.absent else f"all ranks have {waited} each other"
        return found.reason

    def report(self, write: Callable[[str], None]) -> None:
        """Name the next rank to be reported, or make the rank just named write its stacks. Called once per second.

        One rank at a time, because the launcher mixes the simultaneous output of several processes.
        """
        if self._named_pid:
            with contextlib.suppress(OSError):
                os.kill(self._named_pid, STACK)
            self._named_pid = 0
        elif self._to_name:
            number = self._to_name.pop(0)
            pid = self._ranks[number].pid
            self._named_pid = pid if proc.catches(pid, STACK) else 0  # otherwise the signal would end the process
            line = f"hvdtrain: rank {number} on {self._host}: {self._reason}"
            write(f"{line}; its stack{':' if self._named_pid else ' cannot be shown'}")


def numbers(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
