"""Run folders -> a data frame with one row per run, and the epochs and samples of one run when they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hvdtrain import records
from hvdtrain.results import folders, metrics, power, runs, scores
from hvdtrain.results.columns import RUNS, Column
from hvdtrain.results.folders import Problem

IDENTITY = (
    *("started_utc", "workload", "framework", "strategy", "hosts", "rate_mbit", "seed", "steps"),
    *("train_s", "test_s"),
)
"""Two runs that are equal in these to the last digit are one run and its copy"""


@dataclasses.dataclass
class Loaded:
    """All runs below some roots."""

    roots: list[Path]
    runs: pd.DataFrame
    """One row per run folder; columns and units are those of `columns.RUNS`. What was not measured is NaN or None"""
    problems: list[Problem]
    where: str | None = None
    """The expression that chose these runs of those below the roots"""
    judged: str | None = None
    """The score that --target names, by which all runs are judged"""

    @property
    def complete(self) -> pd.DataFrame:
        """The runs that may enter figures."""
        return self.runs[self.runs["state"] == "complete"]


def load(roots: Sequence[Path]) -> Loaded:
    """Reads every run below the roots, line by line. Raises Failure (2) for a root that is no folder."""
    problems: list[Problem] = []
    rows = [runs.row(folder, problems) for folder in folders.find(roots, problems)]
    _refuse_copies(rows, problems)
    return Loaded(list(roots), frame(rows), problems)


def frame(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    """The data frame of such rows, with all columns."""
    told = pd.DataFrame({"scores": _series(rows, "scores", RUNS["scores"])})
    return pd.DataFrame({name: _series(rows, name, column) for name, column in scores.all_columns(told).items()})


def _series(rows: Sequence[dict[str, object]], name: str, column: Column) -> pd.Series:
    values = [each.get(name) for each in rows]
    if column.kind == "number":
        return pd.Series([np.nan if value is None else value for value in values], dtype=float)
    return pd.Series(values, dtype=object)


def _refuse_copies(rows: list[dict[str, object]], problems: list[Problem]) -> None:
    """A copied run folder is no repeat: equal to the last digit, it would make the spread look small."""
    seen: dict[tuple[object, ...], object] = {}
    for each in rows:
        if each["state"] != "complete" or not each["train_s"]:
            continue
        key = tuple(each[name] for name in IDENTITY)
        first = seen.setdefault(key, each["run_dir"])
        if first != each["run_dir"]:
            each["state"] = "refused"
            problems.append(Problem(str(each["run_dir"]), None, f"a copy of {first}: left out"))


# --- of one run, on demand --------------------------------------------------------------------------------------------


def manifest(run_dir: Path | str) -> records.Manifest:
    return records.read_document(Path(run_dir) / "manifest.json", records.Manifest)


def point(run_dir: Path | str) -> records.Point | None:
    """What a sweep asked of the run; None for a run that was started by hand."""
    path = Path(run_dir) / "point.json"
    return records.read_document(path, records.Point) if folders.there(path) else None


def metrics_file(run_dir: Path | str) -> Path:
    """The file of rank 0's records."""
    return Path(run_dir) / "metrics" / "rank0000.jsonl"


def epochs(run_dir: Path | str) -> pd.DataFrame:
    """The epochs that count: the fields of records.Epoch, each score as a column (`validation_accuracy`), and as
    `elapsed_s` the seconds from the loop's start to the end of the epoch's validation, checkpoints before included."""
    rows: list[dict[str, Any]] = [
        vars(timed.epoch) | records.by_score(timed.epoch) | {"elapsed_s": timed.elapsed_s}
        for timed in metrics.epochs(metrics_file(run_dir))
    ]
    names = [*(field.name for field in dataclasses.fields(records.Epoch)), "elapsed_s"]
    names += [name for row in rows for name in row]
    shown = [name for name in dict.fromkeys(names) if name not in ("train_scores", "validation_scores")]
    return pd.DataFrame(rows, columns=shown, dtype=float)


def samples(run_dir: Path | str) -> pd.DataFrame:
    """Energy by interval and device: host, unix_s, seconds, device, energy_j."""
    rows = [
        (host, sample.unix_s, sample.seconds, device, energy_j)
        for path in sorted((Path(run_dir) / "monitors").glob("*.jsonl"))
        for host, sample in power.samples(path)
        for device, energy_j in sample.energy_j.items()
    ]
    return pd.DataFrame(rows, columns=["host", "unix_s", "seconds", "device", "energy_j"])


def resources(run_dir: Path | str) -> pd.DataFrame:
    """Use by interval and host: host, unix_s, seconds, cpu_percent, ram_used_bytes, gpu_percent (mean of the GPUs),
    nic_sent_bytes and nic_received_bytes (over all NICs). What was not measured is NaN."""
    rows = []
    for path in sorted((Path(run_dir) / "monitors").glob("*.jsonl")):
        for host, sample in power.samples(path):
            gpus = runs.numbers(gpu.get("utilisation_percent") for gpu in sample.gpus)
            nics = (runs.numbers(nic.get(key) for nic in sample.nics) for key in ("sent_bytes", "received_bytes"))
            figures = [sample.unix_s, sample.seconds, sample.cpu_percent, sample.ram_used_bytes]
            rows.append(
                (host, *figures, sum(gpus) / len(gpus) if gpus else None, *(sum(nic) if nic else None for nic in nics))
            )
    names = ["unix_s", "seconds", "cpu_percent", "ram_used_bytes"]
    names += ["gpu_percent", "nic_sent_bytes", "nic_received_bytes"]
    found = pd.DataFrame(rows, columns=["host", *names])
    return found.astype(dict.fromkeys(names, float))
