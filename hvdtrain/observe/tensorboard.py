"""Writes TensorBoard scalars: the number FIELD of a record of type TYPE becomes the scalar TYPE/FIELD.

`step/loss` is `Step.loss` of records/types.py, for example. Steps count from 0 over the whole run, and an epoch's point
is at its last step. A resumed run opens a new event file that starts at its first step. TensorBoard then ignores later
points of older files.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain import records
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

TYPES = (records.Step, records.Epoch, records.Saved, records.Summary)
# Numbers that identify a record or are equal in all records.
LEFT_OUT = {"step", "epoch", "samples", "warmup", "best", "unix_s", "began_unix_s", "ended_unix_s"}
LEFT_OUT |= {"ranks", "hosts", "parameters", "global_batch", "epochs", "steps"}


def check() -> None:
    """Raises Failure (78) if the tensorboard package is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise Failure("--tensorboard: the package is missing; hint: pip install tensorboard", exits.BAD_CONFIG)


class Scalars(records.Writer):
    """Writes records to `path`, and their numbers to a new event file in `folder`."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Raises Failure (73, 74)."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__(path)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._session = event_pb2.SessionLog
        self._folder, self._started = folder, False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
            self._events = (folder / name).open("wb")
            self._out = RecordWriter(self._events)
            self._put(0, file_version="brain.Event:2")
        except OSError as error:
            raise Failure(f"{folder}: {error.strerror}; hint: choose another --run-dir", exits.CANNOT_WRITE) from error

    def write(self, record: records.Record) -> None:
        super().write(record)
        try:
            if not self._started:  # TensorBoard then ignores the points of older files from this step on
                self._put(step_of(record), session_log=self._session(status=self._session.START))
                self._started = True
            if points := numbers(record):
                values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
                self._put(step_of(record), summary=self._summary(value=values))
            self._out.flush()
        except OSError as error:
            raise Failure(f"{self._folder}: {error.strerror}; hint: free space and --resume", exits.IO_ERROR) from error

    def close(self) -> None:
        super().close()
        self._events.close()

    def _put(self, step: int, **content: Any) -> None:
        self._out.write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())


def numbers(record: records.Record) -> dict[str, float]:
    """Return a record's points by tag."""
    if not isinstance(record, TYPES):
        return {}
    fields = {name: value for name, value in msgspec.structs.asdict(record).items() if name not in LEFT_OUT}
    fields |= records.by_score(record)
    return {f"{record.type}/{name}": float(value) for name, value in fields.items() if isinstance(value, int | float)}


def step_of(record: Any) -> int:
    """Return the step of a record's points."""
    if isinstance(record, records.Step | records.Resumed):
        return record.step
    # other records have the number of finished steps
    done: int = record.steps if isinstance(record, records.Summary) else record.step
    return max(0, done - 1)
