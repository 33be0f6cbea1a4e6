"""How many CPU threads a rank computes with, and how they wait for each other.

A layer is cut into as many parts as there are threads, and all wait for the last one. With small layers that waiting is
most of the time, the more so where other work keeps one of the threads from running. So a rank takes its part of the
host's cores (affinity, CPU quota, ranks of the host), but no more threads than its layers have work for. The number
must not follow the load of the machine: sums are rounded otherwise with other threads, and a run would not repeat.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, MutableMapping

from hvdtrain.cluster import quota
from hvdtrain.world import Place

LEAST_WORK = 16e6
"""Multiply-adds of a layer for each thread: a quarter to half a millisecond of a core, several times what it takes to
wake a sleeping thread. On two cores, with 4 million in all, two sleeping threads were no faster than one; with 65
million they were a fifth faster alone and a third slower beside a copy of the run (figures in docs/LOG.md)"""


@dataclasses.dataclass(frozen=True)
class Threads:
    """Of one rank."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} thread{'' if self.count == 1 else 's'} each ({self.why})"

    def use(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """To be called before a framework is imported, which is when OpenMP reads its variables."""
        environment["OMP_NUM_THREADS"] = str(self.count)
        # Threads that spin while they wait keep others of the same cores from what they wait for.
        environment.setdefault("OMP_WAIT_POLICY", "passive")


def per_rank(asked: int, where: Place, work: float, environment: Mapping[str, str] = os.environ) -> Threads:
    """As asked, else the user's OMP_NUM_THREADS, else as this host's cores, its ranks and the model allow.

    `work`: multiply-adds of a layer for the samples of one step, on average.
    """
    if asked:
        return Threads(asked, "--threads")
    given = environment.get("OMP_NUM_THREADS", "")
    if given.isdigit() and quota.LAUNCHERS_OWN not in environment:
        return Threads(max(1, int(given)), "OMP_NUM_THREADS")
    cores, ranks = quota.process_cores(), where.local_size
    if environment.get("OMPI_MCA_orte_bound_at_launch"):  # each rank has cores of its own, or shares them with some
        count = min(quota.threads(cores, 1), quota.threads(quota.host_cores(), ranks))
        why = f"Open MPI binds each rank to {cores:g} of the cores; mpirun --bind-to none frees them"
    else:
        count = quota.threads(cores, ranks)
        why = f"{cores:g} core{'' if cores == 1 else 's'} here" + (f" for {ranks} ranks" if ranks > 1 else "")
    enough = int(max(1, min(count, work / LEAST_WORK)))
    if enough < count:
        return Threads(enough, f"small layers; --threads {count} may be faster where nothing else runs")
    return Threads(count, why)
