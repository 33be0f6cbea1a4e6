"""TensorBoard event files from the records of runs, as `--tensorboard` writes them during a run."""

from __future__ import annotations

import os
from pathlib import Path

from hvdtrain.observe import tensorboard
from hvdtrain.results.export import names
from hvdtrain.results.read import steps
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.read.run import metrics_file
from hvdtrain.system import files

NAME = "events.out.tfevents.0000000000.hvdtrain"
"""Of every exported file, so that a later export replaces it"""


def write(loaded: Loaded, folder: Path) -> None:
    """Writes an event file for each run into a folder with the run's name.

    Raises Failure (73, 74, 78), also if the tensorboard package is missing.
    """
    tensorboard.check("--to tensorboard")
    rows = [row for row in loaded.runs.to_dict("records") if row["state"] != "refused"]
    named = names.of_runs([row["run_dir"] for row in rows])
    for row in rows:
        path = folder / named[row["run_dir"]] / NAME
        part = path.with_name(f".part.{os.getpid()}")  # a name that TensorBoard does not read
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(part, Path(row["run_dir"]), steps.unix_time_s(row["started_utc"]) or 0.0)
            part.replace(path)
        except OSError as error:
            raise files.unwritable(path, error, "name a writable folder") from error
        finally:
            part.unlink(missing_ok=True)


def _write(path: Path, run: Path, started_unix_s: float) -> None:
    events = tensorboard.Events(path, started_unix_s)
    try:
        records = metrics_file(run)
        for unix_s, record in steps.timed(records, started_unix_s) if records.exists() else ():
            events.add(record, unix_s)
        events.flush()
    finally:
        events.close()
