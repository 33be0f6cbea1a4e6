"""`hvdtrain results export`: every column of the data frame of runs, in base units, for other programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pandas as pd

from hvdtrain.results import groups
from hvdtrain.results.scores import all_columns
from hvdtrain.results.text import SCHEMA, harmless
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure


def export(runs: pd.DataFrame, form: str, path: Path | None) -> None:
    """Writes csv, json or parquet to the path, or csv and json to standard output. Raises Failure (2, 73)."""
    if form == "parquet":
        if path is None:
            raise Failure("parquet is binary; hint: name a file, as in -o runs.parquet", exits.USAGE)
        write(path, _parquet(runs))
        return
    text = _csv(runs) if form == "csv" else _json(runs)
    if path is None:
        sys.stdout.write(text)
    else:
        write(path, text.encode())


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically. Raises Failure (73)."""
    files.put(Path(os.path.realpath(path)), content, "hint: name a writable folder")


def _csv(runs: pd.DataFrame) -> str:
    flat = _flat(runs)
    for name, column in all_columns(runs).items():
        if column.kind == "text":
            flat[name] = flat[name].map(harmless)
    return str(flat.to_csv(index=False, lineterminator="\n"))


def _flat(runs: pd.DataFrame) -> pd.DataFrame:
    """The frame with dictionaries as JSON text."""
    flat = runs.copy()
    for name in ("energy_by_device", "inference"):
        flat[name] = [json.dumps(value) if value else None for value in flat[name]]
    return flat


def _json(runs: pd.DataFrame) -> str:
    rows = [
        {str(name): None if groups.is_missing(value) else value for name, value in row.items()}
        for row in runs.to_dict("records")
    ]
    columns = {name: {"unit": column.unit, "meaning": column.meaning} for name, column in all_columns(runs).items()}
    return json.dumps({"schema": SCHEMA, "columns": columns, "rows": rows}, indent=2) + "\n"


def _parquet(runs: pd.DataFrame) -> bytes:
    flat = _flat(runs)
    for name, column in all_columns(runs).items():
        if column.kind in ("text", "object"):
            flat[name] = flat[name].astype("string")
        elif column.kind == "flag":
            flat[name] = flat[name].astype("boolean")
    return flat.to_parquet(index=False, engine="pyarrow")
