"""The command lines of Open MPI 4, Open MPI 5 and MPICH for the same job.

Open MPI 5 starts its daemons with PRRTE, which took over three of Open MPI's parameters under other names. MPICH's
mpirun (Hydra) has no such parameters: it gets only the settings of Horovod and of the ranks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.launch.tuning import Setting
from hvdtrain.system import exits, hosts
from hvdtrain.system.commands import Command
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots
from hvdtrain.system.launchers import mpi_version

OPEN_MPI, MPICH = "Open MPI", "MPICH"
PRRTE = {
    "oob_tcp_if_include": "prte_if_include",
    "plm_rsh_args": "plm_ssh_args",
    "orte_keep_fqdn_hostnames": "prte_keep_fqdn_hostnames",
}
"""Parameter of Open MPI 4 -> parameter of PRRTE"""
HYDRA_SSH = {"HYDRA_LAUNCHER_EXTRA_ARGS": "-o BatchMode=yes -o ConnectTimeout=10"}


@dataclasses.dataclass(frozen=True)
class Mpi:
    """The MPI that mpirun belongs to."""

    name: str = OPEN_MPI
    major: int = 4

    def adapted(self, settings: Sequence[Setting]) -> list[Setting]:
        """The settings that this MPI has, under its own names."""
        if self.name == MPICH:
            return [setting for setting in settings if not setting.mca]
        names = PRRTE if self.major >= 5 else {}
        return [dataclasses.replace(setting, name=names.get(setting.name, setting.name)) for setting in settings]

    def command(
        self,
        places: Sequence[Slots],
        ranks: int,
        parameters: Sequence[Setting],
        variables: Sequence[str],
        *,
        interface: str | None,
        logs: Path | None,
    ) -> Command:
        """mpirun's command line up to the ranks' program. It names the ranks' variables without their values."""
        if self.name == MPICH:
            words = ["mpirun", "-n", str(ranks), "-hosts", hosts.as_argument(places), "-bind-to", "none"]
            words += ["-iface", interface] if interface else []
            words += ["-outfile-pattern", f"{logs}/rank.%r.stdout"] if logs else []
            words += ["-errfile-pattern", f"{logs}/rank.%r.stderr"] if logs else []
            return [*words, "-genvlist", ",".join(variables)]
        words = ["mpirun", "-np", str(ranks), "-H", hosts.as_argument(places), "--bind-to", "none", "--map-by", "slot"]
        output = ["--output-filename", str(logs)] if self.major < 5 else ["--output", f"file={logs}/rank"]
        words += output if logs else []
        words += [*mca(parameters), *(word for name in variables for word in ("-x", name))]
        # PRRTE's daemons look a program up in their own PATH, env(1) in the rank's.
        return [*words, "env"] if self.major >= 5 else words


def mca(settings: Sequence[Setting]) -> Command:
    """The options that set parameters of Open MPI and PRRTE."""
    options = [("--prtemca" if setting.name in PRRTE.values() else "--mca", setting) for setting in settings]
    return [word for option, setting in options for word in (option, setting.name, setting.value)]


def find(path: str) -> Mpi:
    """The MPI of the mpirun in `path`. Without one, Open MPI 4, so that a dry run can show its command.

    Raises Failure (69) for an MPI that the launchers do not know.
    """
    program = shutil.which("mpirun", path=path)
    if program is None:
        return Mpi()
    done = subprocess.run([program, "--version"], env={**os.environ, "PATH": path}, text=True, capture_output=True)
    flavour, version = mpi_version(done.stdout + done.stderr) or ("an unknown MPI", "0")
    if flavour == "Intel MPI":  # its mpirun is Hydra too
        flavour = MPICH
    if flavour not in (OPEN_MPI, MPICH):
        hint = "put Open MPI or MPICH first in PATH, or use `horovodrun --gloo`"
        raise Failure(f"{program} belongs to {flavour}, which is not supported; hint: {hint}", exits.UNREACHABLE)
    major = re.match(r"\d+", version)
    return Mpi(flavour, int(major[0]) if major else 0)
