"""`hvdtrain results export`: a table of runs for other programs, with every column of the data frame, in base units."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pandas as pd

from hvdtrain.results import groups
from hvdtrain.results.read.frame import Loaded
from hvdtrain.results.scores import all_columns
from hvdtrain.results.text import SCHEMA, harmless
from hvdtrain.system import files


def export(loaded: Loaded, to: str, path: Path | None) -> None:
    """Writes csv or json to the path, or to standard output without one. Raises Failure (73, 74)."""
    text = _csv(loaded.runs) if to == "csv" else _json(loaded.runs)
    if path is None:
        sys.stdout.write(text)
    else:
        write(path, text.encode())


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically. Raises Failure (73)."""
    files.put(Path(os.path.realpath(path)), content, "name a writable folder")


def _csv(runs: pd.DataFrame) -> str:
    """Dictionaries and lists are JSON text."""
    flat = runs.copy()
    for name, column in all_columns(runs).items():
        if column.kind == "object":
            flat[name] = [json.dumps(value) if value else None for value in flat[name]]
        elif column.kind == "text":
            flat[name] = flat[name].map(harmless)
    return str(flat.to_csv(index=False, lineterminator="\n"))


def _json(runs: pd.DataFrame) -> str:
    rows = [
        {str(name): None if groups.is_missing(value) else value for name, value in row.items()}
        for row in runs.to_dict("records")
    ]
    columns = {name: {"unit": column.base, "meaning": column.meaning} for name, column in all_columns(runs).items()}
    return json.dumps({"schema": SCHEMA, "columns": columns, "rows": rows}, indent=2) + "\n"
