"""`hvdtrain results export`: a table of runs for other programs, with every column of the data frame, in base units."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pandas as pd

from hvdtrain.results import groups
from hvdtrain.results.columns import RUNS
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scores import all_columns
from hvdtrain.results.text import SCHEMA, harmless
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure


def export(loaded: Loaded, to: str, path: Path | None) -> None:
    """Writes to the path; csv and json without a path to standard output.

    Raises Failure (2, 69, 73, 74), also if the package of a format is missing.
    """
    if to == "parquet":
        if path is None:
            raise Failure("parquet cannot be printed; hint: name a file, as in -o runs.parquet", exits.USAGE)
        write(path, _parquet(loaded.runs))
    else:
        text = _csv(loaded.runs) if to == "csv" else _json(loaded.runs)
        if path is None:
            sys.stdout.write(text)
        else:
            write(path, text.encode())


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically. Raises Failure (73)."""
    files.put(Path(os.path.realpath(path)), content, "name a writable folder")


def _csv(runs: pd.DataFrame) -> str:
    flat = _flat(runs)
    for name, column in all_columns(runs).items():
        if column.kind == "text":
            flat[name] = flat[name].map(harmless)
    return str(flat.to_csv(index=False, lineterminator="\n"))


def _flat(runs: pd.DataFrame) -> pd.DataFrame:
    """The frame with dictionaries and lists as JSON text."""
    flat = runs.copy()
    for name in (name for name, column in RUNS.items() if column.kind == "object"):
        flat[name] = [json.dumps(value) if value else None for value in flat[name]]
    return flat


def _json(runs: pd.DataFrame) -> str:
    rows = [
        {str(name): None if groups.is_missing(value) else value for name, value in row.items()}
        for row in runs.to_dict("records")
    ]
    columns = {name: {"unit": column.base, "meaning": column.meaning} for name, column in all_columns(runs).items()}
    return json.dumps({"schema": SCHEMA, "columns": columns, "rows": rows}, indent=2) + "\n"


def _parquet(runs: pd.DataFrame) -> bytes:
    if importlib.util.find_spec("pyarrow") is None:
        raise Failure("--to parquet needs the package pyarrow; hint: pip install pyarrow", exits.UNREACHABLE)
    flat = _flat(runs)
    for name, column in all_columns(runs).items():
        if column.kind in ("text", "object"):
            flat[name] = flat[name].astype("string")
        elif column.kind == "flag":
            flat[name] = flat[name].astype("boolean")
    return flat.to_parquet(index=False, engine="pyarrow")
