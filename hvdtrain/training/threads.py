"""Chooses how many CPU threads a rank computes with, and how they wait for each other.

The framework splits a layer into one part per thread, and all threads wait for the last. With small layers that wait
dominates, most of all when other work delays one thread. So a rank uses its share of the host's cores (affinity, CPU
quota, ranks of the host), but no more threads than its layers have work for. The number must not follow the load of the
machine: sums round differently with another number of threads, so a run would not be repeatable.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, MutableMapping

from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.system import cgroup
from hvdtrain.system.environment import number

LEAST_WORK = 16e6
"""Least multiply-adds of a layer per thread: a quarter to half a millisecond of a core, several times what waking a
sleeping thread takes. On two cores two sleeping threads were no faster than one with 4 million per layer; with 65
million they were a fifth faster alone and a third slower alongside a copy of the run (see docs/project/decisions.md)"""

MOST = 4096
"""Maximum number of threads of a rank; more than any host has cores"""


@dataclasses.dataclass(frozen=True)
class Threads:
    """Threads of one rank."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} thread{'' if self.count == 1 else 's'} each ({self.why})"

    def use(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Set OpenMP's variables; call it before a framework is imported, because OpenMP reads them then."""
        environment["OMP_NUM_THREADS"] = str(self.count)
        # A waiting thread that spins takes its core from the threads it waits for.
        environment.setdefault("OMP_WAIT_POLICY", "passive")


def per_rank(requested: int, launch: LaunchEnv, work: float, environment: Mapping[str, str] = os.environ) -> Threads:
    """Return `requested` unless it is 0, else the user's OMP_NUM_THREADS, else a number for these cores and ranks.

    `work`: multiply-adds of a layer of mean size for the samples of one step. Raises Failure (78) for an invalid
    OMP_NUM_THREADS.
    """
    if requested:
        return Threads(requested, "--threads")
    value = environment.get("OMP_NUM_THREADS", "").partition(",")[0]  # `4,2`: 4, and 2 for each in nested regions
    if value and cgroup.LAUNCHERS_OWN not in environment:
        hint = "set it to the threads of each rank, or unset it"
        return Threads(number("OMP_NUM_THREADS", value, hint, least=1, most=MOST), "OMP_NUM_THREADS")
    cores, ranks = cgroup.process_cores(), launch.local_size
    if bound := _bound(environment, ranks):  # several ranks may share the cores
        count = min(cgroup.threads(cores, 1), cgroup.threads(cgroup.host_cores(), ranks))
        why = f"{bound[0]} binds each rank to {cores:g} cores; {bound[1]} avoids it"
    else:
        count = cgroup.threads(cores, ranks)
        why = f"{cores:g} core{'' if cores == 1 else 's'} here" + (f" for {ranks} ranks" if ranks > 1 else "")
    enough = int(max(1, min(count, work / LEAST_WORK)))
    if enough < count:
        return Threads(enough, f"small layers; --threads {count} may be faster if nothing else runs")
    return Threads(count, why)


def _bound(environment: Mapping[str, str], ranks: int) -> tuple[str, str] | None:
    """Return what binds each rank to separate cores, and the option that avoids it."""
    if environment.get("OMPI_MCA_orte_bound_at_launch"):
        return "Open MPI", "mpirun --bind-to none"
    listed = environment.get("SLURM_CPU_BIND_LIST")  # cores for each rank; fewer entries: ranks share all of them
    if listed and listed.count(",") + 1 >= ranks:
        return "Slurm", "srun --cpu-bind=none"
    return None
