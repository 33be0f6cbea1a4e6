"""Submit a training job to Slurm that requeues itself at the time limit and resumes.

examples:
  hvdtrain slurm -N 2 --ntasks-per-node=2 --time=4:00:00 -- python -m hvdtrain.resnet --epochs 90
  hvdtrain slurm --dry-run -N 2 --gpus=4 -- python -m hvdtrain.resnet

Words before -- are options of sbatch. The job gets the environment of this shell, so activate it first. The run folder
is results/slurm-<job id> unless the command names one. In a checkout, `sbatch launch/slurm.sbatch` does the same.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure

SCRIPT = Path(__file__).with_name("slurm.sbatch")


def parser() -> Parser:
    usage = "hvdtrain slurm [--dry-run] [OPTION OF SBATCH ...] -- COMMAND [ARGUMENT ...]"
    top = Parser(prog="hvdtrain slurm", usage=usage, description=__doc__)
    top.add_argument("--dry-run", action="store_true", help="print the sbatch command and submit nothing")
    return top


def main(arguments: list[str]) -> int:
    """Runs sbatch and returns its exit code. Raises Failure (2, 69)."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, for_sbatch = parser().parse_known_args(arguments[:cut])
    program = arguments[cut + 1 :]
    if not program:
        hint = "for example hvdtrain slurm -N 2 -- python -m hvdtrain.resnet"
        raise Failure(f"no command after --; hint: {hint}", exits.USAGE)
    command = ["sbatch", *for_sbatch, str(SCRIPT), *program]
    if options.dry_run:
        print(shlex.join(command))
        return exits.OK
    if shutil.which(command[0]) is None:
        raise Failure("no sbatch in PATH; hint: run this on a login node of the cluster", exits.UNREACHABLE)
    return subprocess.run(command).returncode
