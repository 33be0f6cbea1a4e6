"""Runs in an MLflow tracking store, a SQLite file.

Parameters are the settings of a run. Metrics are the numbers of its records (`step/loss`, at its step) and of the data
frame (`run/train_s`). The experiment is the workload. A later export of the same run folder replaces the run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdtrain.observe import tensorboard
from hvdtrain.results import groups
from hvdtrain.results.export import names
from hvdtrain.results.read import frame, steps
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.read.run import metrics_file
from hvdtrain.results.scores import all_columns
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

FOLDER = "hvdtrain.run_dir"
"""Tag with the absolute path of the run folder"""
BATCH = 1000
"""Most metrics of a request"""
LONGEST_PARAMETER = 6000


def write(loaded: Loaded, path: Path) -> None:
    """Writes every run that can be read into the SQLite file. Raises Failure (65, 69, 73, 74)."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_LOGGING_LEVEL": "WARNING"}
    try:
        import alembic  # noqa: F401 (MLflow says something unrelated if this is missing)
        import sqlalchemy.exc
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        what = f"--to mlflow: the package {(error.name or 'mlflow').partition('.')[0]} is missing"
        raise Failure(f"{what}; hint: pip install mlflow-skinny sqlalchemy alembic", exits.UNREACHABLE) from None
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            files.open_plain(target).close()
        with target.open("ab"):  # SQLAlchemy would retry for a minute
            pass
    except OSError as error:
        raise files.unwritable(path, error, "name a writable file") from error
    from mlflow.exceptions import MlflowException

    try:
        client = MlflowClient(tracking_uri=f"sqlite:///{target}")
        rows = [row for row in loaded.runs.to_dict("records") if row["state"] != "refused"]
        named = names.of_runs([row["run_dir"] for row in rows])
        for row in rows:
            _write(client, row, named[row["run_dir"]], loaded)
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError) as error:
        hint = "name a new file, or one that this version of MLflow has written"
        raise Failure(f"{path}: {str(error).splitlines()[0]}; hint: {hint}", exits.BAD_DATA) from error


def _write(client: Any, row: Mapping[Any, Any], name: str, loaded: Loaded) -> None:
    known = client.get_experiment_by_name(row["workload"])
    experiment = known.experiment_id if known else client.create_experiment(row["workload"])
    folder = os.path.realpath(row["run_dir"])
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    for earlier in client.search_runs([experiment], f"tags.`{FOLDER}` = '{quoted}'"):
        client.delete_run(earlier.info.run_id)
    started_unix_s = steps.unix_time_s(row["started_utc"]) or 0.0
    tags = {FOLDER: folder, "hvdtrain.state": row["state"]}
    made = client.create_run(experiment, int(1000 * started_unix_s), tags, name)
    last_ms, metrics = int(1000 * started_unix_s), _metrics(row, started_unix_s, loaded)
    while batch := list(itertools.islice(metrics, BATCH)):
        last_ms = batch[-1].timestamp
        client.log_batch(made.info.run_id, metrics=batch)
    client.log_batch(made.info.run_id, params=_parameters(row))
    if row["state"] == "complete":
        client.set_terminated(made.info.run_id, "FINISHED", last_ms)


def _metrics(row: Mapping[Any, Any], started_unix_s: float, loaded: Loaded) -> Iterator[Any]:
    """The numbers of the records that count, then the numbers of the data frame."""
    from mlflow.entities import Metric

    time_ms, step, path = int(1000 * started_unix_s), 0, metrics_file(row["run_dir"])
    for unix_s, record in steps.timed(path, started_unix_s) if path.exists() else ():
        time_ms, step = int(1000 * unix_s), tensorboard.step_of(record)
        for name, value in tensorboard.numbers(record).items():
            yield Metric(name, value, time_ms, step)
    for name, column in all_columns(loaded.runs).items():
        if column.kind == "number" and not groups.is_missing(row[name]):
            yield Metric(f"run/{name}", float(row[name]), time_ms, step)


def _parameters(row: Mapping[Any, Any]) -> list[Any]:
    """The run's config, without values that are not set."""
    from mlflow.entities import Param

    config = frame.manifest(row["run_dir"]).config
    return [Param(name, str(value)[:LONGEST_PARAMETER]) for name, value in config.items() if value is not None]
