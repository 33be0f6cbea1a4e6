"""What a change of members asks of a job: whether it can continue, how the work is divided again, whose files move.

See `membership` for when.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.elastic import ElasticCommunicator
from hvdtrain.config import batch_plan
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.config.options import TrainConfig
from hvdtrain.data.loader import Loader
from hvdtrain.plan.profile import Profile, as_json
from hvdtrain.records.identity import differing
from hvdtrain.strategies import Spec, presets
from hvdtrain.system import exits, files, locks
from hvdtrain.system.exits import Failure
from hvdtrain.training import manifest, run_folder
from hvdtrain.training.balance import Balance
from hvdtrain.training.connected import Connected
from hvdtrain.training.train_state import Position


def obstacle(launcher: str, exchange: Spec, config: TrainConfig) -> tuple[str, str] | None:
    """Return which options prevent the job from continuing without lost hosts, and a hint; None if nothing does.

    Always None if the launcher does not expect the job to continue.
    """
    if launcher != "elastic":
        return None
    if not exchange.capabilities.elastic:
        return f"--strategy {exchange}", f"use --strategy {' or '.join(presets.NAMES)}"
    if config.stages > 1:
        return f"--stages {config.stages}", "use --stages 1"
    if config.ema and exchange.capabilities.local_updates:
        return f"--ema and --strategy {exchange}", "leave --ema out, or use --strategy balanced"
    return None


def check(launcher: str, exchange: Spec, config: TrainConfig) -> None:
    """Raise Failure (78) if the launcher expects the job to continue without lost hosts, and it cannot."""
    if found := obstacle(launcher, exchange, config):
        message = f"--elastic: a job with {found[0]} cannot continue without a lost host"
        raise Failure(f"{message}; hint: {found[1]}", exits.BAD_CONFIG)


def begun(job: Connected, folder: Path) -> dict[str, Any]:
    """Return what a host needs that comes back or is new during the run: see `joined`."""
    return {
        "folder": str(folder),
        "identity": job.run.identity(),
        **run_folder.alike(job.run.config, job.run.data["fingerprint"]),
        "shares": job.run.plan.shares,
        "auto": job.auto,
        "profile": as_json(job.profile) if job.profile else None,
    }


def joined(job: Connected) -> tuple[Connected, Path]:
    """Return the job of a rank whose host has come back or is new, and the run folder.

    For --strategy auto it has the profile of another rank, because all ranks choose alike.
    Raises Failure (78) if the others have other settings.
    """
    run, world, begun = job.run, job.ranks, job.ranks.begun
    own = {"identity": run.identity(), **run_folder.alike(run.config, run.data["fingerprint"])}
    if differences := differing({name: begun[name] for name in own}, json.loads(json.dumps(own))):
        raise Failure(
            f"{world.host} has other settings than the running job: {'; '.join(differences)}; hint: give all hosts "
            "the same options, version of hvdtrain and data, as they were when the job started",
            exits.BAD_CONFIG,
        )
    plan = dataclasses.replace(run.plan, shares=tuple(begun["shares"]) if begun["shares"] else None)
    profile = msgspec.convert(begun["profile"], Profile) if begun["profile"] else None
    run = dataclasses.replace(run, plan=plan)
    return dataclasses.replace(job, run=run, auto=begun["auto"], profile=profile), Path(begun["folder"])


def has_room(job: Connected, world: Communicator, consumed: int) -> bool:
    """Whether the epoch has enough samples after the first `consumed` ones for the ranks that wait to take part."""
    if not isinstance(world, ElasticCommunicator) or not world.newcomers:
        return True
    size = world.size + world.newcomers
    return job.loader.has_room(consumed, size, _global_batch(job, size))


def _global_batch(job: Connected, ranks: int) -> int:
    """Return the samples per step of `ranks` ranks, in a run that began anew or was resumed: see `divided`."""
    config, plan = job.run.config, job.run.plan
    return config.global_batch_size or round(plan.global_batch * ranks / plan.ranks)


def divided(job: Connected, world: Communicator, balance: Balance | None) -> tuple[Loader, BatchPlan]:
    """Return the loader and the plan of a job for its present members. Collective.

    A global batch that was given stays, and each rank takes more of it. Otherwise each rank keeps the batch that it had
    when this job started, so the global batch changes, and --lr-scaling applies. With unequal shares, a rank of a new
    host gets their mean.
    """
    config, shares = job.run.config, job.run.plan.shares
    if balance is not None:
        shares = balance.shares(world)
    elif shares is not None and isinstance(world, ElasticCommunicator):
        mean = sum(shares) / len(shares)
        shares = tuple(shares[rank] if rank < len(shares) else mean for rank in world.view.ranks)
    batch = _global_batch(job, world.size)
    loader = job.loader.among(world.rank, world.size, batch, shares)
    plan = batch_plan.batch_plan(config, world.size, batch, loader.steps_per_epoch, shares)
    return loader, plan


def keep_division(folder: Path, world: Communicator, plan: BatchPlan) -> None:
    """Write into the manifest on each host how many ranks save checkpoints from now on, and their shares. Collective.

    The shares are in the order in which ranks are numbered at a start.
    """
    kept_plan: dict[str, Any] = {"ranks": world.size}
    if plan.shares is not None:
        numbers = world.gather(world.number)
        kept_plan["shares"] = [share for _, share in sorted(zip(numbers, plan.shares, strict=True))]
    for first in (True, False):  # rank 0 first, then hosts that do not share its folder
        if world.local_rank == 0 and first == (world.rank == 0):
            path = folder / manifest.NAME
            kept = records.read_document(path, records.Manifest)
            if kept.plan != kept.plan | kept_plan:
                updated = msgspec.structs.replace(kept, plan=kept.plan | kept_plan)
                records.write_document(path, records.as_json(updated))
        world.gather(None)


def records_number(world: Communicator, ranks: int) -> int:
    """Return the number of this rank's file of records. `ranks`: their number at the start of the run.

    If the former rank 0 comes back, its file belongs to the present rank 0. No other rank has the number `ranks`.
    """
    return world.number if world.number or not world.joining else ranks


def files_of_rank_0(folder: Path) -> dict[str, Any]:
    """Return what `copy_records` needs on a rank whose host has come back or is new, as JSON."""
    return {
        "lock": locks.job(),
        "manifest": json.loads((folder / manifest.NAME).read_text()),
        "metrics": (folder / "metrics" / "rank0000.jsonl").read_text(),
    }


def copy_records(folder: Path, number: int, of_rank_0: Mapping[str, Any]) -> None:
    """Give a rank the manifest and the records of rank 0, because its own records, if it has any, have a gap."""
    locks.join(of_rank_0["lock"])
    if not (folder / manifest.NAME).exists():
        records.write_document(folder / manifest.NAME, of_rank_0["manifest"])
    path = folder / "metrics" / f"rank{number:04d}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(of_rank_0["metrics"])
    except OSError as error:
        raise files.unwritable(path, error, "choose another --run-dir") from error


def take_over(folder: Path, rank: int) -> None:
    """Make a copy of the records of this process, which started as rank `rank`, the records of rank 0, which is lost.

    The records of the lost rank 0 are kept under another name. Raises Failure (73, 74).
    """
    if not locks.holds():  # rank 0 held the lock of a folder that all hosts share
        locks.take_over(folder, records.utc_now())
    first = folder / "metrics" / "rank0000.jsonl"
    own = first.with_name(f"rank{rank:04d}.jsonl")
    copy = first.with_name(f".rank0000-{os.getpid()}")
    try:
        shutil.copyfile(own, copy)
        if first.exists():
            first.rename(first.with_name(f"lost-{time.time_ns()}.jsonl"))
        copy.rename(first)
    except OSError as error:
        raise files.unwritable(first, error, "choose another --run-dir") from error


def view_record(world: ElasticCommunicator, at: Position, plan: BatchPlan, lost_s: float) -> records.View:
    return records.View(
        view=world.view.number,
        step=at.step,
        epoch=at.epoch,
        sample=at.consumed,
        members=list(world.view.hosts),
        ranks=world.size,
        hosts=len(set(world.view.hosts)),
        global_batch=plan.global_batch,
        shares=list(plan.shares or ()),
        reason=world.view.reason,
        unix_s=time.time(),
        lost_s=lost_s,
    )


def described(view: records.View, plan: BatchPlan) -> str:
    """Describe a view and its batch for people."""
    return (
        f"view {view.view}         {view.hosts} hosts, {view.ranks} ranks from step {view.step} on, "
        f"{view.lost_s:.1f} s after the change; {plan.global_batch} samples per step, learning rate {plan.base_lr:g}"
        + (f", shares {':'.join(f'{share:g}' for share in view.shares)}" if view.shares else "")
    )
