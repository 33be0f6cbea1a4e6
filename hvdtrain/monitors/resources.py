"""Resource use of a host and its ranks from kernel counters: CPU, memory, network, disk; GPUs through NVML.

The kernel counts CPU time in ticks of 10 ms. So the percentage of a short interval is coarse, but the sum over
intervals is exact: use the lengths of the intervals as weights for averages. If the control group of a host has a CPU
quota (a virtual host, a container), CPU percent refers to that quota. RAM and disks are always those of the whole
machine, and NICs those of the network namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.monitors.nvml import Nvml
from hvdtrain.system import cgroup, proc

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Resources:
    """Counters of this host and its ranks. A device that disappears stays in the list with null values."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]], nvml: Nvml) -> None:
        self._nvml = nvml
        self._limit = cgroup.limit()
        self._machine: tuple[float, float] | None = None
        self._group_s: float | None = None
        self._ranks = {rank["rank"]: _process(rank["pid"]) for rank in ranks}
        self._rank_s: dict[int, float | None] = {}
        self._nics: dict[str, tuple[int, int] | None] = {}
        self._disks: dict[str, tuple[int, int] | None] = {}

    def describe(self) -> dict[str, Any]:
        """Values for `records.Sensors.resources`."""
        return {
            "cores": self._limit.cores if self._limit else psutil.cpu_count(),
            "cpu": str(self._limit.folder) if self._limit else "machine",
            "ram_bytes": psutil.virtual_memory().total,
            "disks": sorted(_disks()),
        }

    def take(self, seconds: float) -> dict[str, Any]:
        """Fields of `records.Sample` for the interval since the last call. The first call only starts an interval."""
        read, written = self._disk_bytes()
        return {
            "cpu_percent": self._cpu_percent(seconds),
            "ranks": [self._rank(rank, process, seconds) for rank, process in self._ranks.items()],
            "ram_used_bytes": psutil.virtual_memory().used,
            "gpus": self._nvml.utilisation(),
            "nics": self._nic_bytes(),
            "disk_read_bytes": read,
            "disk_written_bytes": written,
        }

    def _cpu_percent(self, seconds: float) -> float | None:
        if self._limit:
            before_s, self._group_s = self._group_s, group_cpu_s(self._limit.folder)
            used_s = _growth(before_s, self._group_s)
            return None if used_s is None else _percent(used_s, seconds * self._limit.cores)
        times = psutil.cpu_times()  # user and nice already include guest times
        all_s = times.user + times.nice + times.system + times.idle + times.iowait + times.irq + times.softirq
        idle_s = times.idle + times.iowait
        before, self._machine = self._machine, (all_s + times.steal, idle_s)
        if before is None or self._machine[0] <= before[0]:
            return None
        total_s = self._machine[0] - before[0]
        return _percent(max(0.0, total_s - (idle_s - before[1])), total_s)

    def _rank(self, rank: int, process: psutil.Process | None, seconds: float) -> dict[str, Any]:
        """Usage of the process with its threads and children, except this sampler. Shared memory counts repeatedly."""
        now_s = rss = None
        if process is not None and process.is_running():
            now_s, rss = process_usage(pid for pid in proc.tree(process.pid) if pid != os.getpid())
        used_s = _growth(self._rank_s.get(rank), now_s)
        self._rank_s[rank] = now_s
        percent = None if used_s is None else _percent(used_s, seconds)
        return {"rank": rank, "cpu_percent": percent, "rss_bytes": rss or None}  # a zombie has no memory

    def _nic_bytes(self) -> list[dict[str, Any]]:
        now = psutil.net_io_counters(pernic=True, nowrap=False)
        usage = []
        for nic in sorted({*self._nics, *now}):
            if _redundant(nic):
                continue
            before, after = self._nics.get(nic), None
            if nic in now:
                after = (now[nic].bytes_sent, now[nic].bytes_recv)
            self._nics[nic] = after
            sent, received = _difference(before, after)
            usage.append({"nic": nic, "sent_bytes": sent, "received_bytes": received})
        return usage

    def _disk_bytes(self) -> tuple[int | None, int | None]:
        """Sums over the physical disks. Partitions, LVM, RAID and loop devices would count twice."""
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
    """Total bytes read and written by each physical disk."""
    counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    return {name: (disk.read_bytes, disk.write_bytes) for name, disk in counters.items() if _physical(name)}


@functools.cache
def _physical(disk: str) -> bool:
    return Path(f"/sys/block/{disk}/device").exists()


@functools.cache
def _redundant(nic: str) -> bool:
    """Whether its bytes cross no link or are counted by another NIC: the throttle's ifb, a bond, VLAN or bridge."""
    return bool(re.fullmatch(r"lo|(hvd)?ifb\d+", nic)) or any(Path("/sys/class/net", nic).glob("lower_*"))


def group_cpu_s(group: Path) -> float | None:
    """Total CPU seconds of a control group (its folder); None if unknown.

    Uses the kernel's counter if the group has one. With the cpu controller of cgroup v1 alone there is none, so the
    times of the processes are added up.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (group / "cpu.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("usage_usec")) / 1e6
    with contextlib.suppress(OSError, ValueError):
        return int((group / "cpuacct.usage").read_text()) / 1e9
    with contextlib.suppress(OSError, ValueError):
        pids = (int(pid) for path in group.rglob("cgroup.procs") for pid in path.read_text().split())
        return process_usage(pids)[0]
    return None


def process_usage(pids: Iterable[int]) -> tuple[float, int]:
    """CPU seconds (including ended children) and resident bytes of these processes. Ended processes count 0."""
    cpu_s, rss_bytes = 0.0, 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            rss_bytes += process.memory_info().rss
    return cpu_s, rss_bytes


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid)
    return None


def _growth(before_s: float | None, after_s: float | None) -> float | None:
    """Seconds between two readings; None if the value fell because the time of an ended process was lost."""
    if before_s is None or after_s is None or after_s < before_s - 5 * TICK_S:
        return None
    return max(0.0, after_s - before_s)


def _difference(before: tuple[int, int] | None, after: tuple[int, int] | None) -> tuple[int, int] | tuple[None, None]:
    """Growth of a pair of counters; None if a reading is missing or a counter was reset."""
    if before is None or after is None or after[0] < before[0] or after[1] < before[1]:
        return None, None
    return after[0] - before[0], after[1] - before[1]


def _percent(part_s: float, whole_s: float) -> float | None:
    return round(100 * part_s / whole_s, 2) if whole_s > 0 else None
