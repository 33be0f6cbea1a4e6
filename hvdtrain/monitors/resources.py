"""What a host's ranks use, as the kernel counts it: CPU, memory, network, disk; GPUs through NVML.

CPU time is counted in ticks of 10 ms, so a percentage of a short interval is coarse, while the sum over intervals is
exact: average with the intervals' lengths as weights. On a host whose control group has a CPU quota (a virtual host, a
container) CPU percent is of that quota; RAM and disks are the whole machine's in any case, NICs are those of the
network namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.monitors import cgroup
from hvdtrain.monitors.nvml import Nvml
from hvdtrain.system import cgroup as quota
from hvdtrain.system import proc

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Resources:
    """Counts for the ranks (offers) of this host. What disappears keeps its place, with null figures."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]], nvml: Nvml) -> None:
        self._nvml = nvml
        self._limit = quota.limit()
        self._machine: tuple[float, float] | None = None
        self._group_s: float | None = None
        self._ranks = {rank["rank"]: _process(rank["pid"]) for rank in ranks}
        self._rank_s: dict[int, float | None] = {}
        self._nics: dict[str, tuple[int, int] | None] = {}
        self._disks: dict[str, tuple[int, int] | None] = {}

    def describe(self) -> dict[str, Any]:
        """For `records.Sensors.resources`."""
        return {
            "cores": self._limit.cores if self._limit else psutil.cpu_count(),
            "cpu": str(self._limit.folder) if self._limit else "machine",
            "ram_bytes": psutil.virtual_memory().total,
            "disks": sorted(_disks()),
        }

    def take(self, seconds: float) -> dict[str, Any]:
        """The fields of `records.Sample` for the interval since the last call; the first call's are of no interval."""
        read, written = self._disk_bytes()
        return {
            "cpu_percent": self._cpu_percent(seconds),
            "ranks": [self._rank(rank, process, seconds) for rank, process in self._ranks.items()],
            "ram_used_bytes": psutil.virtual_memory().used,
            "gpus": self._nvml.figures(),
            "nics": self._nic_bytes(),
            "disk_read_bytes": read,
            "disk_written_bytes": written,
        }

    def _cpu_percent(self, seconds: float) -> float | None:
        if self._limit:
            before_s, self._group_s = self._group_s, cgroup.used_s(self._limit.folder)
            used_s = _growth(before_s, self._group_s)
            return None if used_s is None else _percent(used_s, seconds * self._limit.cores)
        times = psutil.cpu_times()  # of a guest's virtual machines: in user and nice already
        all_s = times.user + times.nice + times.system + times.idle + times.iowait + times.irq + times.softirq
        idle_s = times.idle + times.iowait
        before, self._machine = self._machine, (all_s + times.steal, idle_s)
        if before is None or self._machine[0] <= before[0]:
            return None
        total_s = self._machine[0] - before[0]
        return _percent(max(0.0, total_s - (idle_s - before[1])), total_s)

    def _rank(self, rank: int, process: psutil.Process | None, seconds: float) -> dict[str, Any]:
        """The process, its threads and its children but this sampler; memory that they share counts once for each."""
        now_s = rss = None
        if process is not None and process.is_running():
            now_s, rss = cgroup.of_processes(pid for pid in proc.tree(process.pid) if pid != os.getpid())
        used_s = _growth(self._rank_s.get(rank), now_s)
        self._rank_s[rank] = now_s
        percent = None if used_s is None else _percent(used_s, seconds)
        return {"rank": rank, "cpu_percent": percent, "rss_bytes": rss or None}  # a zombie has no memory

    def _nic_bytes(self) -> list[dict[str, Any]]:
        now = psutil.net_io_counters(pernic=True, nowrap=False)
        found = []
        for nic in sorted({*self._nics, *now}):
            if _repeats(nic):
                continue
            before, after = self._nics.get(nic), None
            if nic in now:
                after = (now[nic].bytes_sent, now[nic].bytes_recv)
            self._nics[nic] = after
            sent, received = _difference(before, after)
            found.append({"nic": nic, "sent_bytes": sent, "received_bytes": received})
        return found

    def _disk_bytes(self) -> tuple[int | None, int | None]:
        """Sums over the physical disks; partitions and what is made of disks (LVM, RAID, loop) would count twice."""
        now = _disks()
        total: list[int | None] = [None, None]
        for disk in {*self._disks, *now}:
            before, after = self._disks.get(disk), now.get(disk)
            self._disks[disk] = after
            for i, change in enumerate(_difference(before, after)):
                if change is not None:
                    total[i] = (total[i] or 0) + change
        return total[0], total[1]


def _disks() -> dict[str, tuple[int, int]]:
    """Bytes read and written so far by each physical disk."""
    counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    return {name: (disk.read_bytes, disk.write_bytes) for name, disk in counters.items() if _physical(name)}


@functools.cache
def _physical(disk: str) -> bool:
    return Path(f"/sys/block/{disk}/device").exists()


@functools.cache
def _repeats(nic: str) -> bool:
    """Whether its bytes cross no link, or are those of another NIC: of a detour for a throttle, or of a bond, a VLAN or
    a bridge over it."""
    return bool(re.fullmatch(r"lo|(hvd)?ifb\d+", nic)) or any(Path("/sys/class/net", nic).glob("lower_*"))


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def _growth(before_s: float | None, after_s: float | None) -> float | None:
    """Seconds between two readings; None if they fell, because a process ended that no other one waited for."""
    if before_s is None or after_s is None or after_s < before_s - 5 * TICK_S:
        return None
    return max(0.0, after_s - before_s)


def _difference(before: tuple[int, int] | None, after: tuple[int, int] | None) -> tuple[int, int] | tuple[None, None]:
    """Growth of a pair of counters; nothing if one is not there or was reset."""
    if before is None or after is None or after[0] < before[0] or after[1] < before[1]:
        return None, None
    return after[0] - before[0], after[1] - before[1]


def _percent(part_s: float, whole_s: float) -> float | None:
    return round(100 * part_s / whole_s, 2) if whole_s > 0 else None
