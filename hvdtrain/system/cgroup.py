"""CPU limits: the control group whose quota makes a host of a part of a machine (virtual hosts, containers, Slurm)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

LAUNCHERS_OWN = "HVDTRAIN_THREADS_BY_LAUNCHER"
"""Set when the launcher chose OMP_NUM_THREADS. Ranks then ignore it and count the cores of their own host."""
MOUNT = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """The group with the tightest CPU quota among those that hold this process."""

    folder: Path
    cores: float
    """Its quota: CPU seconds per second"""


def limit(own: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> Limit | None:
    """What limits this process; None if nothing does. cgroup v1 and v2."""
    found: list[Limit] = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = mount
        elif "cpu" in controllers.split(","):
            base = mount / "cpu"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *(above for above in group.parents if above.is_relative_to(base))):
            with contextlib.suppress(OSError, ValueError):
                found.append(Limit(folder=folder, cores=_cores(folder, v2=controllers == "")))
    return min(found, key=lambda one: one.cores, default=None)


def host_cores() -> float:
    """Cores that this host may use: those of the machine, or fewer by a quota."""
    found, machine = limit(), float(os.cpu_count() or 1)
    return min(found.cores, machine) if found else machine


def process_cores() -> float:
    """Cores that this process may use: its affinity, or less by a quota."""
    return min(float(len(os.sched_getaffinity(0))), host_cores())


def threads(cores: float, ranks: int) -> int:
    """CPU threads for each of `ranks` ranks that share `cores`: whole ones, and one at least."""
    return max(1, int(cores / ranks))


def _cores(folder: Path, *, v2: bool) -> float:
    """Raises ValueError without a quota."""
    if v2:
        quota, period = (int(word) for word in (folder / "cpu.max").read_text().split())  # "max 100000": no quota
    else:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    if quota <= 0:
        raise ValueError(f"{folder}: no quota")
    return quota / period
