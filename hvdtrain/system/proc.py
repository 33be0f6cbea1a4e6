"""Processes as /proc shows them (proc(5)). Standard library only, as all of this room."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """What the kernel tells of a process."""

    name: str
    """Of its program, the first 15 letters"""
    state: str
    """R, S, D: running; T: stopped, t: held by a debugger; Z, X: ended"""
    parent: int
    started: int
    """Clock ticks since boot: tells it from a later process with the same number"""


TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GONE = Stat("", "X", 0, 0)


def stat(pid: int) -> Stat:
    """`GONE` if there is no such process."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:  # ESRCH too, if it ends while this reads
        return GONE
    fields = after.split()
    return Stat(before.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def ended(pid: int) -> bool:
    """Whether there is no such process any more; a zombie has ended."""
    return stat(pid).state in "ZX"


def strings(pid: int, what: str) -> list[str]:
    """The parts of `cmdline` or `environ`; none if the process has ended or this user may not read them."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """The children of all its threads, by the kernel's own lists: looking through all of /proc takes 1 ms and more."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def used(pid: int) -> tuple[float, int]:
    """Processor seconds, and bytes of files read and written so far, by a process and those below it in its session."""
    seconds, size = 0.0, 0
    for each in tree(pid):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.getsid(each) == os.getsid(pid):
                fields = Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / TICKS_PER_S
                lines = Path(f"/proc/{each}/io").read_text().splitlines()
                size += sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return seconds, size


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def processor() -> str | None:
    """This machine's processor, as the kernel names it; None if it does not."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return None
