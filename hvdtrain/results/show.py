"""`hvdtrain results show RUN`: one run, everything that is known of it."""

from __future__ import annotations

from typing import Any

from hvdtrain.results import groups, load, scores
from hvdtrain.results.folders import Problem
from hvdtrain.results.load import Loaded
from hvdtrain.results.table import Column, Table, number
from hvdtrain.system.exits import Failure, printable


def facts(loaded: Loaded) -> Table:
    """Every column of the run's row, with unit and meaning."""
    run = loaded.runs.iloc[0]
    rows: list[dict[str, Any]] = []
    known = scores.all_columns(loaded.runs)
    for name, column in known.items():
        value = run[name]
        if groups.is_missing(value) or name in ("settings", "scores", "energy_by_device", "inference"):
            continue
        rows.append({"what": name, "value": _text(value, column.unit), "meaning": column.meaning})
    rows += [
        {"what": name, "value": "null" if value is None else str(value), "meaning": "setting"}
        for name, value in groups.settings(run["settings"]).items()
    ]
    rows += [
        {"what": f"energy of {device}", "value": _text(joules, "J"), "meaning": "over the whole run"}
        for device, joules in (run["energy_by_device"] or {}).items()
    ]
    columns = [Column("what", "what"), Column("value", "value", prose=True), Column("meaning", "meaning", prose=True)]
    missing = [name for name, column in known.items() if column.kind == "number" and groups.is_missing(run[name])]
    notes = [f"not measured: {', '.join(missing)}"] if missing else []
    return Table("show", str(run["run"]), columns, rows, notes, spare=("meaning",))


def _text(value: Any, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    return f"{number(float(value))} {unit}".strip()


def epochs(loaded: Loaded) -> Table:
    """The run's epochs that count, in order."""
    columns = [
        Column("epoch", "epoch"),
        Column("train_loss", "train loss"),
        Column("train_s", "train", "s"),
        Column("elapsed_s", "elapsed", "s"),
    ]
    table = Table("epochs", "Epochs", columns, [], spare=("elapsed_s", "train_loss"))
    try:
        found = load.epochs(str(loaded.runs.iloc[0]["run_dir"]))
    except Failure as failure:
        loaded.problems.append(Problem(str(loaded.runs.iloc[0]["run_dir"]), None, str(failure)))
        return table
    for part in ("validation", "train"):
        names = [name for name in scores.shown(loaded.runs) if f"{part}_{name}" in found]
        table.columns[2:2] = scores.figures(loaded.runs, part, names) if names else []
    for values in found.to_dict("records"):
        row = {str(name): None if groups.is_missing(value) else value for name, value in values.items()}
        table.rows.append(row | {"epoch": int(values["epoch"]) + 1})
    table.notes = ["elapsed: training, validation and checkpoints until the end of the epoch's validation"]
    return table
