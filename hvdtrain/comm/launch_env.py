"""The launcher's environment variables: which rank this process is, and of how many."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from hvdtrain.system.environment import MOST_TASKS, number, task_counts
from hvdtrain.system.launchers import LAUNCHERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchEnv:
    """What the launcher's environment variables say about this rank. Read before anything heavy is imported."""

    launcher: str
    """alone, torchrun, elastic (launch/mpirun.sh --elastic), torch.distributed, horovodrun, mpirun or srun"""
    rank: int = 0
    """`size` or more for a rank of a host that was added to a running elastic job"""
    size: int = 1
    """Ranks at the start of the job"""
    local_rank: int = 0
    local_size: int = 1


def launch_env(environment: Mapping[str, str] = os.environ) -> LaunchEnv:
    """Read the launcher's variables. `horovodrun --mpi` starts mpirun, so it appears as mpirun.

    The first of `LAUNCHERS` counts. Raises Failure (78) if a variable is not a number within its bounds.
    """
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("WORLD_SIZE") == "1":
        return LaunchEnv(launcher="alone")
    for one in LAUNCHERS:
        launcher, (rank, size, local_rank, local_size) = one.name, one.variables
        if rank in environment and size in environment and one.needs in {"", *environment}:
            hint = f"start the ranks with {launcher}, or unset {rank} and {size}"
            count = number(size, environment[size], hint, least=1)
            local = environment.get(local_size)
            return LaunchEnv(
                launcher=launcher,
                rank=number(rank, environment[rank], hint, most=MOST_TASKS if launcher == "elastic" else count - 1),
                size=count,
                local_rank=number(local_rank, environment.get(local_rank, "0"), hint, most=count - 1),
                local_size=_tasks_on_node(environment) if local is None else number(local_size, local, hint, least=1),
            )
    return LaunchEnv(launcher="alone")


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """The number of tasks of this Slurm step on this node; 1 outside Slurm."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = task_counts(name, environment.get(name, "1"))
    node = number("SLURM_NODEID", environment.get("SLURM_NODEID", "0"), "unset it", most=MOST_TASKS)
    return counts[min(node, len(counts) - 1)]


# Launchers that start processes without connecting them as ranks: size and rank variables, who sets them, what to do
SEPARATE = [
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "by srun", "add --mpi=pmix, or sbatch launch/slurm.sbatch"),
    ("PMI_SIZE", "PMI_RANK", "by PMI, as srun --mpi=pmi2 does", "use mpirun, horovodrun or torchrun"),
    ("WORLD_SIZE", "RANK", "with WORLD_SIZE and RANK", "use torchrun, mpirun or horovodrun, or unset WORLD_SIZE"),
]


def separate_programs(environment: Mapping[str, str] = os.environ) -> tuple[str, bool] | None:
    """The error if a launcher started several processes that are not ranks of one job; None if it did not.

    Returns the message, and whether this process (the first) prints it.
    """
    for size, rank, source, advice in SEPARATE:
        count = environment.get(size, "1")
        if rank in environment and count != "1" and launch_env(environment).launcher == "alone":
            message = f"{count} separate processes were started {source}, not {count} ranks; hint: {advice}"
            return message, environment[rank] == "0"
    return None
