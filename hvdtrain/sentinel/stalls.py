"""Which ranks keep the others waiting, as a host's sentinel sees it: it names them, then ends the job.

A rank makes progress while bytes of an exchange move, while it computes (2 % of a processor, with the processes that it
started) or while it reads and writes files. A wait of the stall limit in which no bytes move anywhere is reported, with
the stacks of the ranks that do not take part. The job ends when no rank has made progress for ENDS times as long: one
that evaluates, or saves a checkpoint, while the others wait is never ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hvdtrain.system import proc

ENDS = 5
"""Stall limits without progress after which a job ends"""
BUSY = 0.02
"""Of a processor: less is the housekeeping of idle libraries"""
FILE_BYTES = 1 << 20
"""Of files, in a quarter of the stall limit"""
STACK = signal.SIGRTMAX - 3
"""Has a rank write its stacks to stderr; nobody else is likely to use it"""
WAITS, MOVES = b"W", b"B"
"""First byte of a rank's message: WAITS comes with seconds"""


class Rank:
    """What is known of one rank of this host."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.waits_since: float | None = None
        self.heard = self.moved = self.progressed = self._looked = now
        self._used = proc.used(pid)

    def look(self, now: float, limit_s: float) -> None:
        """Forgets a wait that has ended, and sees whether the rank is busy."""
        if now - self.heard > limit_s / 2:
            self.waits_since = None
        if now - self._looked >= limit_s / 4:
            seconds, size = proc.used(self.pid)
            busy = seconds - self._used[0] >= BUSY * (now - self._looked)
            if busy or size - self._used[1] >= FILE_BYTES:
                self.progressed = now
            self._used, self._looked = (seconds, size), now


class Stalls:
    """The ranks of this host; nothing is ever found without a limit."""

    def __init__(self, limit_s: float, name: str, pids: Mapping[int, int], now: float) -> None:
        """`name`: this host's; `pids`: rank -> its process."""
        self._limit_s, self._name = limit_s, name
        self._ranks = {number: Rank(pid, now) for number, pid in pids.items()} if limit_s else {}
        self._reported = False
        self._to_show: list[int] = []
        self._asked = 0
        """Process of the rank that was named"""
        self._why = ""
        self._about: dict[str, Any] = {}

    def heard(self, number: int, message: bytes, now: float) -> None:
        """Takes a rank's message."""
        if (rank := self._ranks.get(number)) is None:
            return
        if message[:1] == MOVES:
            rank.moved = rank.progressed = now
        with contextlib.suppress(ValueError):
            rank.waits_since = None if message[:1] == MOVES else now - float(message[1:])
            rank.heard = now

    def resume(self, now: float, numbers: Collection[int] | None = None) -> None:
        """These ranks, or all of them, could not run until now: the time before does not count."""
        for number, rank in self._ranks.items():
            if numbers is None or number in numbers:
                rank.moved = rank.progressed = now

    def about(self, now: float) -> dict[str, Any]:
        """What other hosts must know: the longest wait here, the ranks that do not wait, and for how long no bytes have
        moved and no rank has made progress. Empty if there is no limit, or no rank any more."""
        ranks = {number: rank for number, rank in self._ranks.items() if not proc.ended(rank.pid)}
        for rank in ranks.values():
            rank.look(now, self._limit_s)
        if not ranks:
            self._about = {}
            return {}
        self._about = {
            "name": self._name,
            "wait_s": max(0.0 if rank.waits_since is None else now - rank.waits_since for rank in ranks.values()),
            "absent": [number for number, rank in ranks.items() if rank.waits_since is None],
            "moved_s": now - max(rank.moved for rank in ranks.values()),
            "progress_s": now - max(rank.progressed for rank in ranks.values()),
        }
        return self._about

    def judge(self, others: Sequence[dict[str, Any]]) -> str:
        """Why the job must end; empty if it may go on. `others`: what `about` said on the other hosts."""
        everyone = [self._about, *others]
        if not all(everyone):  # a host of which nothing is known
            return ""
        wait_s, moved_s, progress_s = (
            pick(host[what] for host in everyone)
            for what, pick in (("wait_s", max), ("moved_s", min), ("progress_s", min))
        )
        if min(wait_s, moved_s) < self._limit_s:
            self._reported = False
            return ""
        absent = {host["name"]: host["absent"] for host in everyone if host["absent"]}
        if not self._reported:
            self._reported = True
            self._to_show = absent.get(self._name, []) if absent else list(self._ranks)
            self._why = "other ranks have waited {} s for it" if absent else "all ranks have waited {} s for each other"
        if min(wait_s, progress_s) < ENDS * self._limit_s:
            return ""
        names = [f"{numbers(ranks)} on {name}" for name, ranks in absent.items()]
        why = "other ranks have waited for it" if absent else "the ranks make different exchanges and have waited"
        return f"{' and '.join(names) or 'all ranks'}: {why} for {wait_s:.0f} s, and no rank has made progress"

    def show(self, write: Callable[[str], None]) -> None:
        """Called each second: names the next rank to be reported, or has the one just named write its stacks.

        One after the other, because the launcher mixes what comes at once from several processes.
        """
        if self._asked:
            with contextlib.suppress(OSError):
                os.kill(self._asked, STACK)
            self._asked = 0
        elif self._to_show:
            number = self._to_show.pop(0)
            pid = self._ranks[number].pid
            self._asked = pid if proc.catches(pid, STACK) else 0  # else the signal would end it
            line = f"hvdtrain: rank {number} on {self._name}: {self._why.format(f'{self._limit_s:g}')}"
            write(f"{line}; its stack{':' if self._asked else ' cannot be shown'}")


def numbers(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
