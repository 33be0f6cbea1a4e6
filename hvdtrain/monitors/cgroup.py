"""CPU time of the processes of a control group, and of any processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def used_s(group: Path) -> float | None:
    """CPU seconds of all processes of a control group (its folder) so far; None if that cannot be told.

    The kernel's own sum where the group has one; a group of cgroup v1's cpu controller alone has none, so there it is
    the processes' own.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (group / "cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6
    with contextlib.suppress(OSError, ValueError):
        return int((group / "cpuacct.usage").read_text()) / 1e9
    with contextlib.suppress(OSError, ValueError):
        return of_processes(int(pid) for path in group.rglob("cgroup.procs") for pid in path.read_text().split())[0]
    return None


def of_processes(pids: Iterable[int]) -> tuple[float, int]:
    """(CPU seconds so far, with those of their ended children; resident bytes) of processes; those gone count 0."""
    cpu_s, rss_bytes = 0.0, 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            rss_bytes += process.memory_info().rss
    return cpu_s, rss_bytes
