"""CPU limits. A control group's quota gives a virtual host, a container or a Slurm job part of a machine.

`doctor` sends the text of this file to a bare Python (3.7 or newer) on other hosts. It therefore uses the standard
library only and imports nothing from hvdtrain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

LAUNCHERS_OWN = "HVDTRAIN_THREADS_BY_LAUNCHER"
"""Set when the launcher chose OMP_NUM_THREADS. Ranks then ignore it and count the cores of their own host."""
MOUNT = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class Limit:
    """The control group with the tightest CPU quota among those that hold this process."""

    folder: Path
    cores: float
    """The group's quota, in CPU seconds per second."""


def groups(controller: str, own: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> Iterator[tuple[Path, bool]]:
    """The control groups that hold this process and may limit it, and whether they are of cgroup v2."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = mount / controller if controllers else mount
            group = base / path.strip("/")
            for folder in (group, *group.parents):
                if base in (folder, *folder.parents):
                    yield folder, not controllers


def limit(own: Path = Path("/proc/self/cgroup"), mount: Path = MOUNT) -> Limit | None:
    """The CPU limit of this process in cgroup v1 or v2. None if it has no limit."""
    limits: list[Limit] = []
    for folder, v2 in groups("cpu", own, mount):
        with contextlib.suppress(OSError, ValueError):
            limits.append(Limit(folder=folder, cores=_cores(folder, v2=v2)))
    return min(limits, key=lambda one: one.cores, default=None)


def host_cores() -> float:
    """Cores that this host may use: all of the machine's, or fewer if a quota applies."""
    quota, machine = limit(), float(os.cpu_count() or 1)
    return min(quota.cores, machine) if quota else machine


def process_cores() -> float:
    """Cores that this process may use: its CPU affinity, or fewer if a quota applies."""
    return min(float(len(os.sched_getaffinity(0))), host_cores())


def threads(cores: float, ranks: int) -> int:
    """CPU threads for each of `ranks` ranks that share `cores`. At least one."""
    return max(1, int(cores / ranks))


def _cores(folder: Path, *, v2: bool) -> float:
    """Raises ValueError if the group has no quota."""
    if v2:
        quota, period = (int(word) for word in (folder / "cpu.max").read_text().split())  # "max 100000": no quota
    else:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    if quota <= 0:
        raise ValueError(f"{folder}: no quota")
    return quota / period
