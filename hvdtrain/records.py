"""What a run leaves behind: the record types, and the JSONL files that hold them.

A run folder holds `manifest.json` (what was asked and where it ran), `metrics/rank0000.jsonl` (one line per record)
and, written last, `COMPLETE`. The loop writes only records and `hvdtrain results` reads only records; nobody scrapes a
log. Every line is one JSON object whose "type" is a key of RECORDS. Times are in seconds, sizes in bytes; `null` means
not measured, never 0. A resumed run appends: of two records for the same step or epoch the later one counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, get_args

from hvdtrain import exits
from hvdtrain.exits import Failure

SCHEMA = "hvdtrain/1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was asked and where it ran; `manifest.json`, written by rank 0 before step 0."""

    type: ClassVar[str] = "manifest"
    schema: str = SCHEMA
    workload: str
    started_utc: str
    argv: list[str]
    config: dict[str, Any]
    """The whole config, defaults included"""
    plan: dict[str, Any]
    """The batch arithmetic: ranks, rank_batch, global_batch, steps, base_lr ..."""
    data: dict[str, Any]
    """Name, classes, sample counts and fingerprint of the data set"""
    model: dict[str, Any]
    """Parameters, bytes and spec of the model"""
    ranks: list[dict[str, Any]]
    """For each rank: host, local_rank, device, threads"""
    collectives: str
    """What carries the collectives: none, gloo, mpi or nccl"""
    links: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each of several hosts: host, nic, address, speed_mbit (as the NIC negotiated), throttle (what was asked of
    `tools/throttle.sh` there, null without one), goodput_to and goodput_mbit (TCP payload this host could send to that
    one before step 0, while every host sent to its next), reason (why goodput is null). Empty on a single host"""
    versions: dict[str, str | None]
    git_commit: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of one rank."""

    type: ClassVar[str] = "step"
    step: int
    """Counted from 0 over the whole run"""
    epoch: int
    loss: float
    """Mean per sample over all ranks"""
    samples: int
    """Samples of this rank"""
    lr: float
    data_s: float
    """Waiting for the batch"""
    compute_s: float
    """Forward, backward and update; with an overlapped strategy also the part of the exchange that backward hides"""
    communication_s: float | None
    """Waiting for the exchange after backward; null where the framework runs both in one graph"""
    bytes_sent: int
    """Payload this rank gave to the exchange's algorithm (without headers)"""
    warmup: bool
    """One of the first steps since the start of the process, left out of rates"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch, written by rank 0. Accuracies are fractions of 1; validation is null if that split is empty."""

    type: ClassVar[str] = "epoch"
    epoch: int
    step: int
    """Steps done since the start of the run"""
    train_loss: float
    train_accuracy: float
    validation_loss: float | None
    validation_accuracy: float | None
    train_s: float
    validation_s: float
    samples: int
    """Training samples over all ranks"""
    samples_per_s: float | None
    """Over all ranks, warm-up steps left out; null if the epoch is warm-up only"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint is in place."""

    type: ClassVar[str] = "saved"
    step: int
    checkpoint_s: float
    best: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumed:
    """The process started again from a checkpoint; records after it supersede those of the same step."""

    type: ClassVar[str] = "resumed"
    step: int
    utc: str
    links: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """As in the manifest, measured at this start"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a complete run, written by rank 0: also the document of `--json`."""

    type: ClassVar[str] = "summary"
    schema: str = SCHEMA
    run_dir: str
    workload: str
    framework: str
    strategy: str
    ranks: int
    hosts: int
    parameters: int
    global_batch: int
    epochs: int
    steps: int
    test_accuracy: float | None
    test_loss: float | None
    validation_accuracy: list[float | None]
    """After each epoch"""
    train_s: float
    validation_s: float
    test_s: float
    checkpoint_s: float
    samples_per_s: float | None
    """Training samples per second over all ranks, warm-up steps left out"""
    samples_per_s_per_rank: float | None
    data_share: float | None
    """Share of the training time that rank 0 waited for data, warm-up steps left out"""
    bytes_sent: int
    """By rank 0, over the whole run"""
    first_step_s: float | None
    """From the start of the process to the end of its first step (rank 0); null if it made none"""
    peak_rss_bytes: int
    """Largest over the ranks"""
    nic_bytes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """For each of several hosts: host, nic, and sent_bytes and received_bytes over its link from the loop's start in
    this process to the end of the test evaluation, with headers and whatever else used the NIC. Empty on a single
    host"""


Record = Manifest | Step | Epoch | Saved | Resumed | Summary
RECORDS: dict[str, type[Record]] = {cls.type: cls for cls in get_args(Record)}


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def as_json(record: Record) -> dict[str, Any]:
    return {"type": record.type, **{f.name: getattr(record, f.name) for f in dataclasses.fields(record)}}


def from_json(value: Any, where: str) -> Any:
    """The record that `value` describes; raises Failure (65) naming `where` if it is none. Unknown keys are ignored."""
    cls = RECORDS.get(value.get("type", "")) if isinstance(value, dict) else None
    if cls is None:
        raise Failure(f"{where}: not a record of {SCHEMA}; known types: {', '.join(RECORDS)}", exits.BAD_DATA)
    names = [f.name for f in dataclasses.fields(cls)]
    missing = dataclasses.MISSING
    required = [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]
    if absent := [name for name in required if name not in value]:
        raise Failure(f"{where}: {cls.type} record without {absent[0]!r}", exits.BAD_DATA)
    return cls(**{name: value[name] for name in names if name in value})


class Writer:
    """Appends records to one JSONL file, one write per line, so that a crash tears at most the last line."""

    def __init__(self, path: Path) -> None:
        """Opens `path`, and ends a line that an earlier process left torn. Raises Failure (73, 74)."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except OSError as error:
            raise Failure(f"{path}: {error.strerror}; choose another --run-dir", exits.CANNOT_WRITE) from error
        self._path = path

    def write(self, record: Record) -> None:
        line = json.dumps(as_json(record), separators=(",", ":")).encode() + b"\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            raise Failure(f"{self._path}: {error.strerror}; free some space and --resume", exits.IO_ERROR) from error

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Any]:
    """The records of one JSONL file in order; a torn line (a crash's last one) is passed over.

    Raises Failure (65) with file:line for a whole line that is no record. Memory is that of one line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            yield from_json(value, f"{path}:{number}")


def write_document(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all. Raises Failure (73)."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w") as stream:
            json.dump(value, stream, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}; choose another --run-dir", exits.CANNOT_WRITE) from error
