"""`hvdtrain results list`, `show`, `table` and `phases`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hvdtrain.results import groups, scores
from hvdtrain.results.columns import RUNS, Column
from hvdtrain.results.groups import short
from hvdtrain.results.read import frame
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.tables.columns import SPREAD_NOTE, N, cells, group_notes, grouped, key_column, score_columns
from hvdtrain.results.tables.model import Table, number
from hvdtrain.system.exits import printable


def listing(loaded: Loaded) -> Table:
    """All runs, including those that do not count, and why not."""
    names = ["strategy", "hosts", "ranks", "rate_mbit", "workload", "framework", "kind"]
    shown = [dataclasses.replace(one, of=None) for one in (RUNS["train_s"], *score_columns(loaded.runs))]
    columns = [Column("run", "run"), Column("state", "state"), *shown]
    columns += [Column("started_utc", "started", role="detail"), *map(key_column, names)]
    runs = loaded.runs.sort_values(["started_utc", "run_dir"], na_position="last")
    rows = []
    for values in runs[[*(one.key for one in columns), "marked"]].to_dict("records"):
        row = {str(key): None if groups.is_missing(value) else short(str(key), value) for key, value in values.items()}
        row["state"] = f"{row['state']}, marked" if row["marked"] and row["state"] == "complete" else row["state"]
        rows.append(row)
    notes = [f"{row['run']} is marked: {row['marked']}" for row in rows if row["marked"]]
    return Table("list", f"{len(rows)} runs", columns, rows, notes, apart=())


def overview(loaded: Loaded, group_by: Sequence[str] | None = None) -> Table:
    """The main measurements of each group of repeats."""
    experiments, settings = grouped(loaded.runs, group_by)
    end_to_end = dataclasses.replace(RUNS["end_to_end_s"], spread=False)  # to fit a terminal
    figures = [RUNS["train_s"], *score_columns(groups.usable(loaded.runs)), RUNS["samples_per_s"]]
    figures += [RUNS["communication_share"], end_to_end, RUNS["energy_j"]]
    rows = [cells(group, [one.key for one in settings], figures) for group in experiments]
    notes = [SPREAD_NOTE, *group_notes(loaded.runs, experiments)]
    return Table("table", f"{len(experiments)} groups of runs", [N, *figures, *settings], rows, notes)


def phases(loaded: Loaded, group_by: Sequence[str] | None = None) -> Table:
    """The phases of a run, and the parts of a step."""
    experiments, settings = grouped(loaded.runs, group_by)
    names = ("train_s", "compute_s", "communication_s", "data_s", "validation_s", "test_s", "checkpoint_s")
    figures, keys = [RUNS[name] for name in names], [one.key for one in settings]
    rows = [cells(group, keys, figures) | {"n": len(group.values("train_s"))} for group in experiments]
    notes = [SPREAD_NOTE, *group_notes(loaded.runs, experiments)]
    return Table("phases", "Where the time goes", [N, *figures, *settings], rows, notes)


def run_facts(loaded: Loaded) -> Table:
    """Every column of a single run, with unit and meaning."""
    run = loaded.runs.iloc[0]
    known = scores.all_columns(loaded.runs)
    rows: list[dict[str, Any]] = [
        {"what": name, "value": _text(run[name], column.base), "meaning": column.meaning}
        for name, column in known.items()
        if not groups.is_missing(run[name]) and name not in ("settings", "scores") and column.kind != "object"
    ]
    rows += [
        {"what": name, "value": "null" if value is None else str(value), "meaning": "setting"}
        for name, value in groups.settings(run["settings"]).items()
    ]
    rows += [
        {"what": f"energy of {device}", "value": _text(joules, "J"), "meaning": "over the whole run"}
        for device, joules in (run["energy_by_device"] or {}).items()
    ]
    rows += [
        {"what": f"inference of {samples} samples", "value": _text(seconds, "s"), "meaning": RUNS["inference"].meaning}
        for samples, seconds in (run["inference"] or {}).items()
    ]
    columns = [Column("what", "what"), Column("value", "value", prose=True)]
    columns.append(Column("meaning", "meaning", prose=True, role="detail"))
    missing = [name for name, column in known.items() if column.kind == "number" and groups.is_missing(run[name])]
    notes = [f"not measured: {', '.join(missing)}"] if missing else []
    return Table("show", str(run["run"]), columns, rows, notes)


def _text(value: Any, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    return f"{number(float(value))} {unit}".strip()


def run_epochs(loaded: Loaded) -> Table:
    """The epochs of a single run that count, in order."""
    columns = [
        Column("epoch", "epoch"),
        Column("train_s", "train", "s"),
        Column("train_loss", "train loss", role="detail"),
        Column("elapsed_s", "elapsed", "s", role="detail"),
    ]
    table = Table("epochs", "Epochs", columns, [])
    epochs = frame.epochs(loaded, str(loaded.runs.iloc[0]["run_dir"]))
    for part in ("validation", "train"):
        names = [name for name in scores.shown(loaded.runs) if f"{part}_{name}" in epochs]
        made = score_columns(loaded.runs, part, names) if names else []
        table.columns[1:1] = [dataclasses.replace(one, of=None) for one in made]
    for values in epochs.to_dict("records"):
        row = {str(name): None if groups.is_missing(value) else value for name, value in values.items()}
        table.rows.append(row | {"epoch": int(values["epoch"]) + 1})
    table.notes = ["elapsed: training, validation and checkpoints until the end of the epoch's validation"]
    return table
