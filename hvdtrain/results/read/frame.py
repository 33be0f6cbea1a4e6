"""Reads all runs below some folders into a data frame with one row per run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hvdtrain import records
from hvdtrain.config import workloads
from hvdtrain.results import scores
from hvdtrain.results.columns import RUNS
from hvdtrain.results.read import folders, run, steps
from hvdtrain.results.read.folders import Problem
from hvdtrain.system.redaction import without_secrets

IDENTITY = (
    *("started_utc", "workload", "framework", "strategy", "hosts", "rate_mbit", "seed", "steps"),
    *("train_s", "test_s"),
)
"""Two runs that agree in these to the last digit are a run and its copy"""


@dataclasses.dataclass
class Loaded:
    """All runs below some folders."""

    roots: list[Path]
    runs: pd.DataFrame
    """One row per run folder, with the columns of `columns.RUNS`. Missing values are NaN or None"""
    problems: list[Problem]
    where: str | None = None
    """The expression that selected these runs"""
    epochs: dict[str, list[steps.TimedEpoch]] = dataclasses.field(default_factory=dict)
    """Folder of a run -> its epochs that count, in order"""

    @property
    def complete(self) -> pd.DataFrame:
        return self.runs[self.runs["state"] == "complete"]


def load(roots: Sequence[Path]) -> Loaded:
    """Reads every file of the runs below the roots once, line by line. Raises Failure (2) if a root is not a folder."""
    loaded = Loaded(list(roots), pd.DataFrame(), [])
    rows = [run.row(folder, loaded.problems, loaded.epochs) for folder in folders.find(roots, loaded.problems)]
    _refuse_copies(rows, loaded.problems)
    return dataclasses.replace(loaded, runs=frame(rows))


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The data frame of such rows, with all columns."""
    declared = scores.all_columns(pd.DataFrame(rows, columns=[*RUNS], dtype=object))
    table = pd.DataFrame(rows, columns=[*declared], dtype=object)
    table = table.where(table.notna(), None)
    return table.astype({name: float for name, column in declared.items() if column.kind == "number"})


def _refuse_copies(rows: list[dict[str, Any]], problems: list[Problem]) -> None:
    """A copied run folder is not a repeat: it would make the spread look smaller."""
    seen: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        if row["state"] != "complete" or not row["train_s"]:
            continue
        key = tuple(row[name] for name in IDENTITY)
        first = seen.setdefault(key, row["run_dir"])
        if first != row["run_dir"]:
            row["state"] = "refused"
            problems.append(Problem(str(row["run_dir"]), None, f"ignored as a copy of {first}"))


# --- details of a single run ------------------------------------------------------------------------------------------


def manifest(run_dir: Path | str) -> records.Manifest:
    return records.read_document(Path(run_dir) / "manifest.json", records.Manifest)


def experiment(run_dir: Path | str) -> records.Experiment | None:
    """The record of the sweep; None for a run that was started by hand."""
    path = Path(run_dir) / "experiment.json"
    return records.read_document(path, records.Experiment) if folders.exists(path) else None


def program(run_dir: Path | str) -> list[str]:
    """The command of each rank, without its run folder and secrets."""
    about = manifest(run_dir)
    words, skip = [], False
    for word in about.argv[1:]:
        if not skip and word.partition("=")[0] != "--run-dir":
            words.append(word)
        skip = not skip and word == "--run-dir"
    return without_secrets(["python", *workloads.program(about.workload, about.argv), *words])


def epochs(loaded: Loaded, run_dir: str) -> pd.DataFrame:
    """The epochs that count: fields of records.Epoch, each score as a column (`validation_accuracy`), and `elapsed_s`,
    the seconds from the loop's start to the end of the epoch's validation, including earlier checkpoints."""
    rows: list[dict[str, Any]] = [
        records.as_json(timed.epoch) | records.by_score(timed.epoch) | {"elapsed_s": timed.elapsed_s}
        for timed in loaded.epochs.get(run_dir, ())
    ]
    names = dict.fromkeys([*records.Epoch.__struct_fields__, "elapsed_s", *(name for row in rows for name in row)])
    shown = [name for name in names if name not in ("type", "train_scores", "validation_scores", "shares")]
    return pd.DataFrame(rows, columns=shown, dtype=float)
