"""The state of one run, complete or not, from its records: what `hvdtrain watch` shows."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from hvdtrain import records
from hvdtrain.records import metrics
from hvdtrain.records.metrics import Score
from hvdtrain.results.read import values
from hvdtrain.results.read.folders import exists
from hvdtrain.results.read.follow import Follower
from hvdtrain.system import exits, locks
from hvdtrain.system.exits import Failure, printable

WINDOW = 50
"""Steps that current rates and times are computed from"""
TAIL_BYTES = 1 << 16
"""How much of the other ranks' files is read at first: more than WINDOW steps"""
State = Literal["running", "complete", "stopped", "unknown"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The latest sample of a host's monitor. Values are None if they were not measured."""

    host: str
    unix_s: float | None = None
    """End of the sample, by the host's clock"""
    cpu_percent: float | None = None
    """100: all cores of the host are busy"""
    cores: float | None = None
    ram_used_bytes: int | None = None
    ram_bytes: float | None = None
    """Of the machine"""
    ranks_rss_bytes: float | None = None
    """Resident memory of the run's ranks on this host"""
    sent_mbit: float | None = None
    received_mbit: float | None = None
    """Over all NICs except loopback, in Mbit/s"""
    gpu_percent: float | None = None
    """Mean over the GPUs"""
    power_w: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """The run at one moment. Values are None if the records do not contain them."""

    run_dir: str
    workload: str
    framework: str | None
    strategy: str | None
    ranks: int
    hosts: list[Host]
    members: str | None
    """In an elastic job whose hosts have changed: the present ones, since when, and why"""
    state: State
    """stopped: its process on this host has ended before the run was complete. unknown: it runs on another host"""
    updated_unix_s: float | None
    """Last write to a rank's records, by the clock of their file system"""
    step: int
    """Steps done"""
    steps: int | None
    epoch: int
    """Epochs done"""
    epochs: int | None
    eta_s: float | None
    """Estimated training and validation that is left; None if the run does not train"""
    loss: float | None
    """Of the last step"""
    train_loss: float | None
    """Of the last epoch"""
    validation_loss: float | None
    metric: str | None
    """Label of the primary metric"""
    unit: str | None
    train_score: float | None
    validation_score: float | None
    """After the last epoch"""
    best_validation_score: float | None
    test_score: float | None
    samples_per_s: float | None
    """Over all ranks: of the whole run if it is complete, otherwise of the last WINDOW steps"""
    step_s: float | None
    """Mean over the last WINDOW steps and the ranks: data_s + compute_s + exchange_s"""
    data_s: float | None
    compute_s: float | None
    exchange_s: float | None

    def as_json(self) -> dict[str, Any]:
        return {"schema": records.SCHEMA, **dataclasses.asdict(self)}


class LiveRun:
    """Follows the records of one run folder, which may be written on other hosts."""

    def __init__(self, folder: Path | str) -> None:
        """Raises Failure (65, 74, 77) if its manifest cannot be read."""
        self._folder = folder = Path(folder)
        path = folder / "manifest.json"
        self._manifest = records.read_document(path, records.Manifest)
        self._primary, self._scores = "", dict[str, Score]()
        if self._manifest.metric:
            try:
                self._primary, self._scores = metrics.read(self._manifest.metric)
            except ValueError as error:
                raise Failure(f"{path}: its declaration of scores is damaged: {error}", exits.BAD_DATA) from error
        self._followers: dict[Path, Follower] = {}
        self._recent: dict[Path, collections.deque[records.Step]] = {}
        self._sensors: dict[Path, records.Sensors] = {}
        self._samples: dict[Path, records.Sample] = {}
        self._step = 0
        self._epochs: list[records.Epoch] = []
        self._choices: list[records.Chosen] = []
        self._view: records.View | None = None
        self._summary: records.Summary | None = None

    def frame(self) -> Frame:
        """Read the new records and return the run's present state. Raises Failure (65, 74, 77)."""
        complete = exists(self._folder / "COMPLETE")  # read before the summary, which is written earlier
        first = self._folder / "metrics" / "rank0000.jsonl"
        for path in sorted({first, *self._folder.glob("metrics/rank*.jsonl")}):
            for record in self._new(path, None if path == first else TAIL_BYTES):
                self._add(path, record, leads=path == first)
        for path in sorted(self._folder.glob("monitors/*.jsonl")):
            for record in self._new(path, None):
                if isinstance(record, records.Sensors):
                    self._sensors[path] = record
                elif isinstance(record, records.Sample):
                    self._samples[path] = record
        return self._made(self._state(complete))

    def _new(self, path: Path, last_bytes: int | None) -> Iterator[records.Record]:
        return self._followers.setdefault(path, Follower(path, last_bytes)).new()

    def _add(self, path: Path, record: records.Record, *, leads: bool) -> None:
        recent = self._recent.setdefault(path, collections.deque(maxlen=WINDOW))
        match record:
            case records.Step():
                if recent and record.step <= recent[-1].step:  # the run was started again
                    recent.clear()
                recent.append(record)
                if leads:
                    self._step, self._summary = record.step + 1, None
                    self._epochs = [epoch for epoch in self._epochs if epoch.epoch < record.epoch]
            case records.View() if leads:
                self._view = record
            case records.Chosen() if leads:
                self._choices.append(record)
            case records.Resumed() if leads:
                self._choices = [each for each in self._choices if each.step <= record.step]
                self._step, self._summary, self._view = record.step, None, None
                self._epochs = [epoch for epoch in self._epochs if epoch.step <= record.step]
            case records.Epoch() if leads:
                self._epochs.append(record)
            case records.Summary() if leads:
                self._summary = record

    def _state(self, complete: bool) -> State:
        if complete and self._summary is not None:
            return "complete"
        held = locks.held(self._folder)
        return "unknown" if held is None else "running" if held else "stopped"

    def _made(self, state: State) -> Frame:
        manifest, summary = self._manifest, self._summary
        last = self._epochs[-1] if self._epochs else None
        latest = self._recent.get(self._folder / "metrics" / "rank0000.jsonl")
        score = self._scores.get(self._primary)
        validated = [epoch.validation_scores[self._primary] for epoch in self._epochs if self._has_score(epoch)]
        steps, epochs = values.number(manifest.plan.get("steps")), values.number(manifest.config.get("epochs"))
        spent = self._spent()
        changed = (each.changed_unix_s for each in (self._followers[path] for path in self._recent))
        return Frame(
            run_dir=str(self._folder),
            workload=printable(manifest.workload),
            framework=values.text(manifest.config.get("framework")),
            strategy=values.text(self._choices[-1].strategy if self._choices else manifest.config.get("strategy")),
            ranks=summary.ranks if summary else self._view.ranks if self._view else len(manifest.ranks),
            hosts=self._hosts(),
            members=self._members(),
            state=state,
            updated_unix_s=max((each for each in changed if each is not None), default=None),
            step=self._step,
            steps=None if steps is None else int(steps),
            epoch=len(self._epochs),
            epochs=None if epochs is None else int(epochs),
            eta_s=self._eta_s(steps, epochs) if state in ("running", "unknown") else None,
            loss=latest[-1].loss if latest else None,
            train_loss=last.train_loss if last else None,
            validation_loss=last.validation_loss if last else None,
            metric=printable(score.label) if score else None,
            unit=printable(score.unit) if score else None,
            train_score=last.train_scores.get(self._primary) if last else None,
            validation_score=last.validation_scores.get(self._primary) if last else None,
            best_validation_score=max(validated, key=score.merit) if score and validated else None,
            test_score=summary.test_scores.get(self._primary) if summary else None,
            samples_per_s=summary.samples_per_s if summary else self._samples_per_s(),
            **spent,
        )

    def _has_score(self, epoch: records.Epoch) -> bool:
        return self._primary in epoch.validation_scores

    def _timed(self) -> list[list[records.Step]]:
        """Each present rank's recent steps without warm-up."""
        since = self._view.step if self._view else 0
        timed = (
            [step for step in recent if not step.warmup and step.step >= since] for recent in self._recent.values()
        )
        return [steps for steps in timed if steps]

    def _spent(self) -> dict[str, float | None]:
        """Mean seconds of a step, of all ranks whose records are here."""
        timed = self._timed()
        parts = {name: _mean_of_ranks(timed, name) for name in ("data_s", "compute_s", "communication_s")}
        step_s = math.fsum(each or 0.0 for each in parts.values()) if timed else None
        return {"step_s": step_s, "exchange_s": parts.pop("communication_s"), **parts}

    def _samples_per_s(self) -> float | None:
        timed, batch = self._timed(), values.number(self._manifest.plan.get("global_batch"))
        if self._view:
            batch = self._view.global_batch
        if not timed or (batch is None and len(timed) < len(self._manifest.ranks)):
            return None
        if batch is not None:
            step_s = self._spent()["step_s"]
            return batch / step_s if step_s else None
        rates = [_rate(steps) for steps in timed]  # of a script, whose batch only its steps contain
        return math.fsum(rate for rate in rates if rate is not None) if None not in rates else None

    def _eta_s(self, steps: float | None, epochs: float | None) -> float | None:
        step_s = self._spent()["step_s"]
        if steps is None or step_s is None or self._summary is not None:
            return None
        validations = max(0.0, (epochs or 0) - len(self._epochs))
        validation_s = self._epochs[-1].validation_s if self._epochs else 0.0
        return max(0.0, steps - self._step) * step_s + validations * validation_s

    def _members(self) -> str | None:
        if self._view is None:
            return None
        names = ", ".join(dict.fromkeys(self._view.members))
        return printable(f"{names} since step {self._view.step}: {self._view.reason}")

    def _hosts(self) -> list[Host]:
        """The run's hosts in the order of their ranks, with the latest sample of each monitor."""
        measured = {sensors.host: _host(sensors, self._samples.get(path)) for path, sensors in self._sensors.items()}
        names = dict.fromkeys([*self._manifest.hosts, *measured])
        return [measured.get(name) or Host(host=printable(name)) for name in names]


def _host(sensors: records.Sensors, sample: records.Sample | None) -> Host:
    cores, ram = (values.number(sensors.resources.get(key)) for key in ("cores", "ram_bytes"))
    known = Host(host=printable(sensors.host), cores=cores, ram_bytes=ram)
    if sample is None or not sample.seconds:
        return known
    mbit_per_byte = 8e-6 / sample.seconds
    sent, received = (_sum(nic.get(f"{way}_bytes") for nic in sample.nics) for way in ("sent", "received"))
    gpus = values.numbers(gpu.get("utilisation_percent") for gpu in sample.gpus)
    return dataclasses.replace(
        known,
        unix_s=sample.unix_s,
        cpu_percent=sample.cpu_percent,
        ram_used_bytes=sample.ram_used_bytes,
        ranks_rss_bytes=_sum(rank.get("rss_bytes") for rank in sample.ranks),
        sent_mbit=None if sent is None else sent * mbit_per_byte,
        received_mbit=None if received is None else received * mbit_per_byte,
        gpu_percent=values.mean(gpus),
        power_w=math.fsum(sample.energy_j.values()) / sample.seconds if sample.energy_j else None,
    )


def _sum(parts: Iterator[Any]) -> float | None:
    known = values.numbers(parts)
    return math.fsum(known) if known else None


def _mean_of_ranks(ranks: Sequence[Sequence[records.Step]], name: str) -> float | None:
    """Mean over the ranks of the mean of a field over their steps; None if any step has no value."""
    means = [values.mean(getattr(step, name) for step in steps) for steps in ranks]
    return values.mean(means)


def _rate(steps: Sequence[records.Step]) -> float | None:
    samples = _sum(step.samples for step in steps)
    seconds = math.fsum((step.data_s or 0.0) + step.compute_s + (step.communication_s or 0.0) for step in steps)
    return samples / seconds if samples is not None and seconds else None
