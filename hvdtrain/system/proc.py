"""Processes as /proc shows them (proc(5))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """Facts from /proc/PID/stat."""

    name: str
    """First 15 letters of the program's name."""
    state: str
    """R, S, D: running; T: stopped, t: held by a debugger; Z, X: ended."""
    parent: int
    started: int
    """Start time in clock ticks since boot. It distinguishes the process from a later one with the same id."""


TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # prctl(2)
GONE = Stat("", "X", 0, 0)


def stat(pid: int) -> Stat:
    """Read a process's facts. Returns `GONE` if it does not exist."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:  # also ESRCH, if the process ends during the read
        return GONE
    fields = after.split()
    return Stat(before.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def ended(pid: int) -> bool:
    """Whether the process has ended. A zombie counts as ended."""
    return stat(pid).state in "ZX"


def strings(pid: int, what: str) -> list[str]:
    """The strings of `cmdline` or `environ`. Empty if the process has ended or this user may not read them."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Children of all threads of a process.

    Reads the kernel's own lists, because a search through all of /proc takes 1 ms or more.
    """
    pids: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids += map(int, (task / "children").read_text().split())
    return pids


def tree(pid: int) -> list[int]:
    """The process and all of its descendants."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def used(pid: int) -> tuple[float, int]:
    """(CPU seconds, bytes of files read and written) so far, by a process and its descendants in the same session."""
    seconds, size = 0.0, 0
    for member in tree(pid):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.getsid(member) == os.getsid(pid):
                fields = Path(f"/proc/{member}/stat").read_text(errors="replace").rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / TICKS_PER_S
                lines = Path(f"/proc/{member}/io").read_text().splitlines()
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
    """Name of this machine's processor. None if the kernel does not report one."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return None


def rename(name: str) -> None:
    """Give this process another name in `stat`, of 15 characters at most."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send this signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
