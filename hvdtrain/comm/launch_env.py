"""This process's place among the ranks that a launcher started, as its environment variables tell it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from hvdtrain.system.environment import MOST_TASKS, number, task_counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place, read from its launcher's environment variables before anything heavy is imported."""

    launcher: str
    """alone, torchrun, horovodrun, mpirun or srun"""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


# launcher, then the variables of rank, size, local rank, local size
LAUNCHERS: list[tuple[str, ...]] = [
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("mpirun", *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("srun", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
]


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place. horovodrun on MPI starts mpirun and so appears as mpirun.

    torchrun is recognised by TORCHELASTIC_RUN_ID, because other programs set RANK too. It wins over mpirun and srun,
    which may have started it. Raises Failure (78) for a variable that is not a number within its bounds.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in environment
    if torchrun and environment.get("WORLD_SIZE") == "1":
        return Place(launcher="alone")
    for launcher, rank, size, local_rank, local_size in LAUNCHERS if torchrun else LAUNCHERS[1:]:
        if rank in environment and size in environment:
            hint = f"start the ranks with {launcher}, or unset {rank} and {size}"
            count = number(size, environment[size], hint, least=1)
            here = environment.get(local_size)
            return Place(
                launcher=launcher,
                rank=number(rank, environment[rank], hint, most=count - 1),
                size=count,
                local_rank=number(local_rank, environment.get(local_rank, "0"), hint, most=count - 1),
                local_size=tasks_here(environment) if here is None else number(local_size, here, hint, least=1),
            )
    return Place(launcher="alone")


def tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this Slurm step on this node; 1 outside of Slurm."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = task_counts(name, environment.get(name, "1"))
    node = number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"), "unset it", most=MOST_TASKS)
    return counts[min(node, len(counts) - 1)]


# variables of size and rank set by starters that do not connect ranks for us, who sets them, what to do
SEPARATE = [
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "by srun", "add --mpi=pmix, or sbatch launch/slurm.sbatch"),
    ("PMI_SIZE", "PMI_RANK", "by PMI, as MPICH's mpiexec does", "use Open MPI's mpirun, horovodrun or torchrun"),
    ("WORLD_SIZE", "RANK", "with WORLD_SIZE and RANK", "use torchrun, mpirun or horovodrun, or unset WORLD_SIZE"),
]


def separate_programs(environment: Mapping[str, str] = os.environ) -> tuple[str, bool] | None:
    """The error if a starter made several programs that are not ranks of one job, and whether this one (the first)
    prints it; None if there is no such error."""
    for size, rank, starter, advice in SEPARATE:
        count = environment.get(size, "1")
        if rank in environment and count != "1" and place(environment).launcher == "alone":
            what = f"{count} separate programs were started {starter}, not {count} ranks: {advice}"
            return what, environment[rank] == "0"
    return None
