"""The programs that start ranks: the variables that each sets in a rank, and the names of its processes."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program that starts ranks."""

    name: str
    variables: tuple[str, str, str, str]
    """A rank's variables for its rank, the size, its local rank and the local size; empty for one that is not set"""
    needs: str = ""
    """A variable that must be set too, if other programs also set the first two"""
    starters: tuple[str, ...] = ()
    """Prefixes of the names of the program that a user starts, such as orterun for orterun_wrapper"""
    helpers: tuple[str, ...] = ()
    """Prefixes of the names of its processes between that program and the ranks"""


def _numbered(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


OPEN_MPI = Launcher(
    name="mpirun",
    variables=_numbered("OMPI_COMM_WORLD"),
    starters=("mpirun", "orterun", "prterun"),
    helpers=("orted", "prted"),
)
MPICH = Launcher(
    name="mpirun",
    variables=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    needs="MPI_LOCALRANKID",  # srun --mpi=pmi2 sets PMI_RANK too, without connecting the ranks
    starters=("mpiexec",),
    helpers=("hydra_pmi_proxy",),
)
LAUNCHERS = (
    # torchrun and hvdtrain's own come first, because mpirun or srun may have started them.
    Launcher(
        name="torchrun",
        variables=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        needs="TORCHELASTIC_RUN_ID",
        helpers=("hvdhost",),  # hvdtrain.torchrun.host
    ),
    Launcher(name="elastic", variables=_numbered("HVDTRAIN_ELASTIC")),
    Launcher(name="torch.distributed", variables=_numbered("HVDTRAIN_TORCH")),
    OPEN_MPI,
    MPICH,
    Launcher(name="horovodrun", variables=_numbered("HOROVOD"), starters=("horovodrun",)),
    Launcher(
        name="srun",
        variables=("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
        starters=("srun",),
        helpers=("slurmstepd",),
    ),
)
MPIRUN = (*OPEN_MPI.starters, *MPICH.starters)
"""Prefixes of the names of mpirun. The wheel's mpirun is a wrapper, and Open MPI 5's becomes prterun"""
HELPERS = tuple(name for one in LAUNCHERS for name in one.helpers)
STARTERS = tuple(name for one in LAUNCHERS for name in one.starters)
REMOTE_SHELLS = ("ssh", "rsh")

# --- MPI -------------------------------------------------------------------------------------------------------------

FLAVOURS = [
    ("Open MPI", r"\(Open MPI\) (\d[\w.]*)|OpenRTE\) (\d[\w.]*)"),
    ("Spectrum MPI", r"IBM Spectrum MPI\) (\d[\w.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library.*?Version (\S+(?: Update \d+)?)"),
    ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
]
"""Name of each MPI, and what `mpirun --version` prints before its version"""


def mpi_version(text: str) -> tuple[str, str] | None:
    """(flavour, version) from the output of `mpirun --version`. None for an unknown MPI."""
    for flavour, pattern in FLAVOURS:
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return flavour, next(group for group in match.groups() if group)
    return None
