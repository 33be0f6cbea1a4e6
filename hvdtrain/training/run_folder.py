"""The run folder: made and locked on every host, and the identity of the run in it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import secrets
import shlex
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain import __file__ as package
from hvdtrain import __version__, records, strategies
from hvdtrain.comm.backends.base import Communicator, RankGroup
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config import workloads
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.config.options import TrainConfig
from hvdtrain.launch import launched_by
from hvdtrain.records import identity
from hvdtrain.system import exits, files, locks
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secrets
from hvdtrain.training.resume import PER_START, flags

PER_RANK = (*(name for name in PER_START if name != "resume"), "device", "threads")
"""Options that may differ between ranks"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run before its first step: the contents of its manifest, which its checkpoints must fit."""

    workload: str
    config: TrainConfig
    plan: BatchPlan
    data: dict[str, Any]
    """name, classes, fingerprint, the numbers of samples in train, validation and test; for images image_shape"""
    model: dict[str, Any]
    """name, parameters (their number) and spec"""

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a checkpoint to continue this run. The learning rate, for one, may change."""
        config, plan = dataclasses.asdict(self.config), dataclasses.asdict(self.plan)
        return identity_of(self.workload, self.model, self.data, config, plan)


def identity_of(
    workload: str, model: dict[str, Any], data: dict[str, Any], config: dict[str, Any], plan: dict[str, Any]
) -> dict[str, Any]:
    return {
        "workload": workload,
        "model": model,
        "data": data["fingerprint"],
        "optimizer": config["optimizer"],
        "strategy": strategies.canonical(str(config["strategy"])),
        "global_batch": plan["global_batch"],
        "seed": config["seed"],
        **({"epoch_samples": samples} if (samples := config.get("epoch_samples")) else {}),
        **({"micro_batches": parts} if (parts := plan.get("micro_batches", 1)) > 1 else {}),
    }


def alike(config: TrainConfig, fingerprint: str) -> dict[str, Any]:
    """Return what must be equal on all ranks: options, data, and the code of hvdtrain and of the program that runs."""
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in PER_RANK}
    return {"options": options, "data": fingerprint, "code": _code()}


@functools.cache
def _code() -> str:
    program = getattr(sys.modules["__main__"], "__file__", None)
    code = hashlib.sha256()
    for path in (*sorted(Path(package).parent.rglob("*.py")), *([Path(program)] if program else [])):
        with contextlib.suppress(OSError):
            code.update(path.read_bytes())
    return f"hvdtrain {__version__}, {code.hexdigest()[:12]}"


def check_alike(config: TrainConfig, fingerprint: str, group: RankGroup) -> None:
    """Check that all ranks have the same options, code and data. Collective.

    Raises Failure (78) for other options, which may come from a file on another host, or other code, and Failure (65)
    for data with another fingerprint.
    """
    (first_host, first), *others = group.gather([socket.gethostname(), alike(config, fingerprint)])
    for rank, (host, own) in enumerate(others, start=1):
        if differences := identity.differing(own | {"data": None}, first | {"data": None}):
            raise Failure(
                f"rank {rank} on {host} has other settings than rank 0 on {first_host} (here): "
                f"{'; '.join(differences)}; hint: give all ranks the same version of hvdtrain, flags, variables "
                "(mpirun -x NAME) and --config, and --resume a folder with the same manifest.json on every host",
                exits.BAD_CONFIG,
            )
        if own["data"] != first["data"]:
            raise Failure(
                f"rank {rank} on {host} has other data than rank 0 on {first_host}; hint: give all ranks the same "
                "data, in the same order",
                exits.BAD_DATA,
            )


def open_folder(config: TrainConfig, workload: str, world: Communicator) -> Path:
    """Make the run folder and lock it on every host. Collective.

    Raises Failure (73) if it cannot be made, holds a run, or is locked by another job, (74) if the disk is full.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    chosen = config.run_dir or f"results/{stamp}-{workload}-{secrets.token_hex(3)}"
    name, job, utc = world.gather([chosen, secrets.token_hex(8), records.utc_now()])[0]
    folder = Path(name)
    # Rank 0 takes the lock first. Then the first rank of each other host takes it; hosts that share the folder find the
    # same job in it.
    for first in (True, False):
        problem: list[Any] | None = None
        try:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
            if world.local_rank == 0 and first == (world.rank == 0):
                locks.take(folder, job, utc)
            # Hosts that do not share the folder may each hold an earlier run there.
            if world.local_rank == 0 and not config.resume and (folder / "manifest.json").exists():
                raise Failure(
                    f"{folder} on {world.host} already holds a run; hint: add --resume to continue it, or choose "
                    "another --run-dir",
                    exits.CANNOT_WRITE,
                )
        except OSError as error:
            where = f"{error.filename or folder} (rank {world.rank} on {world.host})"
            failure = files.unwritable(where, error, "choose another --run-dir")
            problem = [str(failure), failure.code]
        except Failure as failure:
            problem = [str(failure), failure.code]
        if problems := [each for each in world.gather(problem) if each]:
            raise Failure(*problems[0])
    if world.sentinel:
        world.sentinel.set_run_folder(str(folder), command(folder, workload, world))
    return folder


def command(folder: Path, workload: str, world: Communicator) -> str:
    """Return `with` and the command that resumes the run, or `on the same hosts with` if its launcher chose them."""
    arguments = ["--resume", str(folder)]
    variable = forwarded = ""
    if workload not in workloads.known():  # a script, which may not accept hvdtrain's flags
        arguments = flags(sys.argv)
        variable, forwarded = f"HVDTRAIN_RESUME={shlex.quote(str(folder))} ", "-x HVDTRAIN_RESUME "
    words = shlex.join(without_secrets([*workloads.program(workload, sys.argv), *arguments]))
    if launched := launched_by.from_environment():
        python = "" if "launch torchrun" in launched["launcher"] else "python "
        return f"with {variable}{launched['launcher']} {python}{words}"
    environment = launch_env()
    count, local = environment.size, environment.local_size
    start = {
        "alone": "python",
        "mpirun": f"mpirun {forwarded}-np {count} python",
        "horovodrun": f"horovodrun -np {count} python",
        "torchrun": f"torchrun --nproc-per-node {local}",
        "torch.distributed": "python",
        "srun": f"srun -n {count} --mpi=pmix python",
    }[environment.launcher]
    return f"{'on the same hosts ' if count > local else ''}with {variable}{start} {words}"
