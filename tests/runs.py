"""Writes run folders as the training loop, the monitors and a sweep do, and reads the records of real ones."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import records
from hvdtrain.records.metrics import Accuracy
from hvdtrain.results.__main__ import main

BEGAN_UNIX_S = 1_790_000_000.0
MADE = itertools.count()
CONFIG: dict[str, Any] = {
    "framework": "torch",
    "strategy": "allreduce",
    "epochs": 2,
    "batch_size": None,
    "global_batch_size": None,
    "lr": 0.05,
    "precision": "fp32",
    "device": "auto",
    "seed": 0,
    "run_dir": None,
    "width": 0.25,
    "image_size": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A run to write. The defaults are a small run on one host; times are in seconds."""

    hosts: int = 1
    ranks_per_host: int = 1
    rate_mbit: float | None = None
    framework: str = "torch"
    strategy: str = "allreduce"
    device: str = "cpu"
    cores: float | None = 1.0
    threads: int | None = 1
    cpu: str = "A processor, 4 cores"
    backend: str | None = None
    parameters: int = 1000
    shapes: Sequence[Sequence[int]] = ((40, 25),)
    rank_batch: int = 32
    epochs: int = 2
    steps_per_epoch: int = 5
    fingerprint: str = "da4c"
    """SHA-256 of the data set"""
    seed: int = 0
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    exchange: dict[str, Any] = dataclasses.field(default_factory=dict)
    argv: Sequence[str] = ()
    data_s: float = 0.01
    compute_s: float = 0.5
    communication_s: float | None = 0.2
    train_s: float | None = None
    """None: sum of the steps"""
    validation_s: float = 0.1
    """Per epoch"""
    test_s: float = 0.2
    checkpoint_s: float = 0.05
    """After each epoch"""
    accuracies: Sequence[float | None] | None = None
    """Validation accuracy after each epoch; None: rises to test_accuracy"""
    test_accuracy: float | None = 0.9
    network_bytes_per_step: float | None = None
    """None: 1.05 times the limit of an all-reduce"""
    energy_w: dict[str, float] | None = None
    """Power of each device of a host; None: no monitors"""
    used: Sequence[str] = ("cpu0", "gpu0")
    interval_s: float = 0.5
    kind: str | None = None
    """If set, there is an experiment.json"""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the experiment, in addition to hosts"""
    sweep: str = "made"
    marked: str | None = None
    complete: bool = True

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        return self.rank_batch * self.ranks * self.steps_per_epoch

    @property
    def step_s(self) -> float:
        return self.data_s + self.compute_s + (self.communication_s or 0.0)

    @property
    def epoch_s(self) -> float:
        return self.step_s * self.steps_per_epoch if self.train_s is None else self.train_s / self.epochs

    @property
    def limit_bytes(self) -> float:
        return 2 * (self.hosts - 1) / self.hosts * 4 * self.parameters


def make(folder: Path, run: Made | None = None, **changes: Any) -> Path:
    """Writes the run into the new folder `folder`, and returns it."""
    run = dataclasses.replace(run or Made(), **changes)
    folder.mkdir(parents=True)
    records.write_document(folder / "manifest.json", records.as_json(manifest(run)))
    if run.kind is not None:
        records.write_document(folder / "experiment.json", records.as_json(experiment(run)))
    writer = records.Writer(folder / "metrics" / "rank0000.jsonl")
    for record in metrics(run, folder):
        writer.write(record)
    writer.close()
    if run.energy_w is not None:
        for host in range(run.hosts):
            monitor(folder / "monitors" / f"h{host}.jsonl", run, f"h{host}")
    if run.complete:
        records.write_document(folder / "COMPLETE", {"schema": records.SCHEMA})
    return folder


def results(*words: object) -> Any:
    """The JSON document that `hvdtrain results` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*map(str, words), "--format", "json"]) == 0
    return json.loads(out.getvalue(), parse_constant=pytest.fail)


@contextlib.contextmanager
def edited(path: Path) -> Iterator[Any]:
    """A JSON file's document, or the list of the records in a JSONL file, written back after the block."""
    if path.suffix == ".json":
        document = json.loads(path.read_text())
        yield document
        path.write_text(json.dumps(document))
    else:
        document = [json.loads(line) for line in path.read_text().splitlines()]
        yield document
        path.write_text("".join(json.dumps(record) + "\n" for record in document))


def read_run(folder: Path, rank: int = 0) -> dict[str, list[Any]]:
    """The records of one rank by type."""
    found: dict[str, list[Any]] = {name: [] for name in records.RECORDS}
    for record in records.read(folder / "metrics" / f"rank{rank:04d}.jsonl"):
        found[record.type].append(record)
    return found


def cut_off(folder: Path, copy: Path, step: int) -> None:
    """Copies a run folder, as if the run had been killed after the checkpoint of this step."""
    shutil.copytree(folder, copy)
    (copy / "COMPLETE").unlink()
    for checkpoint in (copy / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


def manifest(run: Made) -> records.Manifest:
    throttle = None if run.rate_mbit is None else {"up_mbit": run.rate_mbit, "down_mbit": run.rate_mbit}
    links = [
        {"host": f"h{host}", "nic": "eth0", "throttle": throttle, "goodput_mbit": 0.93 * (run.rate_mbit or 5000.0)}
        for host in range(run.hosts)
        if run.hosts > 1
    ]
    ranks = [
        {"host": f"h{host}", "local_rank": local, "device": run.device}
        | {"threads": run.threads, "cores": run.cores, "cpu": run.cpu}
        for host in range(run.hosts)
        for local in range(run.ranks_per_host)
    ]
    chosen = {"framework": run.framework, "strategy": run.strategy}
    return records.Manifest(
        workload="resnet",
        # Runs that agree in everything are treated as copies.
        started_utc=datetime.fromtimestamp(BEGAN_UNIX_S + next(MADE), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        argv=["hvdtrain/resnet.py", *run.argv],
        config=CONFIG | chosen | {"epochs": run.epochs, "seed": run.seed, "batch_size": run.rank_batch} | run.config,
        exchange=run.exchange,
        plan={"rank_batch": run.rank_batch, "global_batch": run.rank_batch * run.ranks, "steps": run.steps},
        data={"name": "digits", "classes": 10, "fingerprint": run.fingerprint, "train": run.samples_per_epoch},
        model={"name": "resnet34", "parameters": run.parameters},
        shapes=[list(shape) for shape in run.shapes],
        metric=Accuracy().as_json(),
        ranks=ranks,
        backend=run.backend or ("mpi" if run.ranks > 1 else "none"),
        links=links,
        versions={"python": "3.11.7", "torch": "2.13.0", "tensorflow": None},
        git_commit="f00d" * 10,
    )


def experiment(run: Made) -> records.Experiment:
    return records.Experiment(
        sweep=run.sweep,
        experiment=f"hosts{run.hosts}-rate{run.rate_mbit}",
        repeat=0,
        kind=run.kind or "timing",
        attempt=1,
        order=0,
        settings={"hosts": run.hosts} | run.settings,
        command=["launch/mpirun.sh"],
        rate_mbit=run.rate_mbit,
        rate_off_percent=None if run.rate_mbit is None else 0.1,
        marked=run.marked,
    )


def accuracy(run: Made, epoch: int) -> dict[str, float]:
    found = None if run.test_accuracy is None else run.test_accuracy * (epoch + 1) / run.epochs
    if run.accuracies is not None:
        found = run.accuracies[epoch]
    return {} if found is None else {"accuracy": found}


def metrics(run: Made, folder: Path) -> list[records.Record]:
    found: list[records.Record] = []
    clock_s = BEGAN_UNIX_S
    for epoch in range(run.epochs):
        found += [step(run, epoch * run.steps_per_epoch + i, epoch) for i in range(run.steps_per_epoch)]
        clock_s += run.epoch_s + run.validation_s
        found.append(epoch_record(run, epoch, clock_s))
        clock_s += run.checkpoint_s
        done = (epoch + 1) * run.steps_per_epoch
        found.append(records.Saved(step=done, checkpoint_s=run.checkpoint_s, best=True))
    return [*found, summary(run, folder, clock_s + run.test_s)] if run.complete else found


def step(run: Made, number: int, epoch: int) -> records.Step:
    return records.Step(
        step=number,
        epoch=epoch,
        loss=2.0 / (number + 1),
        samples=run.rank_batch,
        lr=0.05,
        data_s=run.data_s,
        compute_s=run.compute_s,
        communication_s=run.communication_s,
        bytes_sent=2 * (run.ranks - 1) * 4 * run.parameters // run.ranks,
        warmup=number < 2,
    )


def epoch_record(run: Made, epoch: int, unix_s: float) -> records.Epoch:
    return records.Epoch(
        epoch=epoch,
        step=(epoch + 1) * run.steps_per_epoch,
        train_loss=2.0 / (epoch + 1),
        train_scores={"accuracy": (epoch + 1) / (run.epochs + 1)},
        validation_loss=2.0 / (epoch + 1),
        validation_scores=accuracy(run, epoch),
        train_s=run.epoch_s,
        validation_s=run.validation_s,
        samples=run.samples_per_epoch,
        samples_per_s=run.samples_per_epoch / run.epoch_s if run.epoch_s else None,
        unix_s=unix_s,
    )


def summary(run: Made, folder: Path, ended_unix_s: float) -> records.Summary:
    given = run.network_bytes_per_step
    nic_bytes = round((1.05 * run.limit_bytes if given is None else given) * run.steps)
    train_s = run.epoch_s * run.epochs
    rate = run.rank_batch * run.ranks * run.steps / train_s if train_s else None
    return records.Summary(
        run_dir=str(folder),
        workload="resnet",
        framework=run.framework,
        strategy=run.strategy,
        ranks=run.ranks,
        hosts=run.hosts,
        parameters=run.parameters,
        global_batch=run.rank_batch * run.ranks,
        epochs=run.epochs,
        steps=run.steps,
        test_scores={} if run.test_accuracy is None else {"accuracy": run.test_accuracy},
        test_loss=None if run.test_accuracy is None else 0.5,
        validation_scores=[accuracy(run, epoch) for epoch in range(run.epochs)],
        train_s=train_s,
        validation_s=run.validation_s * run.epochs,
        test_s=run.test_s,
        checkpoint_s=run.checkpoint_s * run.epochs,
        samples_per_s=rate,
        samples_per_s_per_rank=rate and rate / run.ranks,
        data_share=0.01,
        bytes_sent=2 * (run.ranks - 1) * 4 * run.parameters // run.ranks * run.steps,
        first_step_s=3.0,
        peak_rss_bytes=300_000_000,
        step_shares={}
        if run.communication_s is None
        else {
            "data": run.data_s / run.step_s,
            "compute": run.compute_s / run.step_s,
            "exchange": run.communication_s / run.step_s,
            "exchange_least": run.communication_s / run.step_s,
        },
        nic_bytes=[{"host": f"h{host}", "sent_bytes": nic_bytes - host} for host in range(run.hosts) if run.hosts > 1],
        began_unix_s=BEGAN_UNIX_S,
        ended_unix_s=ended_unix_s,
    )


def monitor(path: Path, run: Made, host: str) -> None:
    """Constant power from the start of the loop to the end of the test evaluation."""
    power_w = run.energy_w or {}
    devices = [
        {"device": name, "name": name, "source": "rapl", "reason": None, "used": name in run.used} for name in power_w
    ]
    writer = records.Writer(path)
    writer.write(
        records.Sensors(
            host=host, unix_s=BEGAN_UNIX_S, interval_s=run.interval_s, monitors=["power", "resources"], devices=devices
        )
    )
    left_s = run.epochs * (run.epoch_s + run.validation_s + run.checkpoint_s) + run.test_s
    unix_s = BEGAN_UNIX_S
    while left_s > 1e-9:
        seconds = min(run.interval_s, left_s)
        left_s -= seconds
        unix_s += seconds
        writer.write(
            records.Sample(
                unix_s=unix_s, seconds=seconds, energy_j={name: watts * seconds for name, watts in power_w.items()}
            )
        )
    writer.close()
