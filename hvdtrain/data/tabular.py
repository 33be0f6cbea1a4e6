"""A CSV file as a data set for a classifier: split into three parts and standardized by the training part.

Each class is split separately: 70 % training, 15 % validation, 15 % test. The split does not depend on the run's seed.
With `--missing mean` a missing value becomes the training part's mean, which is 0 after standardization.

A file of more than 4 MiB is parsed once per host and then memory-mapped from `hvdtrain/tables` in the user's cache
folder, 8 bytes per number. Only the class and the position of each row are held in memory.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import SHIPPED, Batch, Split, csv_rows, drawn_lots, stratify
from hvdtrain.data.csv_rows import Missing
from hvdtrain.data.prepared import PARTS, cache_folder, caching
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

NAMES = ("breast-cancer", "iris", "wine")
"""Data sets shipped with hvdtrain"""
SHARES = (Fraction(70, 100), Fraction(15, 100), Fraction(15, 100))
IN_MEMORY_BYTES = 4 * files.MIB
MOST_CLASSES = 256
"""More classes look like a numeric target; 256 already add a confusion matrix of 256 KiB to the sums of each step"""
CLASS_NAMES = {"class", "label", "target"}
"""Names of a column that cannot be a feature"""
COLUMNS_FILE = "columns.json"
"""Name of the file in the run folder that holds `Columns`"""
SCHEMA = "hvdtrain.table/1"
PARSER = 3
"""Version of the rules of `csv_rows`; tables that were cached by other rules are parsed again"""
INDEX_BYTES = 16 * files.MIB
BLOCK_BYTES = 1 << 20


class ColumnsDocument(msgspec.Struct):
    """Contents of COLUMNS_FILE."""

    schema: Literal["hvdtrain.table/1"]
    names: tuple[str, ...] | None
    classes: tuple[str, ...]
    missing: Missing
    mean: list[Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]]
    scale: list[Annotated[float, msgspec.Meta(gt=0, le=1e300)]]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Everything about the columns that is needed to use a trained model; saved in the run folder."""

    names: tuple[str, ...] | None
    """Names of the features; None if the file has no header"""
    classes: tuple[str, ...]
    mean: NDArray[np.float64]
    """(features,), mean of the training part"""
    scale: NDArray[np.float64]
    """(features,), standard deviation of the training part; 1 for a constant feature"""
    missing: Missing

    def standardize(self, features: NDArray[np.float64]) -> NDArray[np.float32]:
        """Features (n, features) as the model expects them."""
        values = (features - self.mean) / self.scale
        values[np.isnan(values)] = 0
        return values.astype(np.float32)

    def as_json(self) -> dict[str, Any]:
        about = {"names": self.names, "classes": self.classes, "missing": self.missing}
        return {"schema": SCHEMA, **about, "mean": self.mean.tolist(), "scale": self.scale.tolist()}

    @classmethod
    def from_json(cls, value: Any) -> Columns:
        """The inverse of `as_json`. Raises ValueError for any other value."""
        it = msgspec.convert(value, ColumnsDocument)
        if len({len(it.mean), len(it.scale), len(it.mean if it.names is None else it.names)}) > 1:
            raise ValueError("names, mean and scale are not of the same columns")
        mean, scale = np.array(it.mean), np.array(it.scale)
        return cls(names=it.names, classes=it.classes, mean=mean, scale=scale, missing=it.missing)


@dataclass(frozen=True, kw_only=True)
class TableSplit(Split):
    """See `data.Split`. A batch is float32 (n, features) and int64 (n,)."""

    features: NDArray[np.float64]
    """Features of all rows of the file"""
    labels: NDArray[np.int64]
    """Classes of all rows of the file"""
    rows: NDArray[np.int64]
    """Rows of this split"""
    columns: Columns

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        rows = self.rows[items]
        arrays = self.columns.standardize(self.features[rows]), self.labels[rows]
        return Batch(arrays=arrays, weight=len(items), total_weight=len(global_items))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A CSV file as a data set."""

    name: str
    columns: Columns
    train: TableSplit
    validation: TableSplit
    test: TableSplit
    file_format: str
    """How the file is written, for people"""
    fingerprint: str
    """SHA-256 of the features, the classes and the treatment of missing values"""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The contents of a file except for its features."""

    columns: Columns
    labels: NDArray[np.int64]
    file_format: str
    digest: str
    """SHA-256 of features and classes"""


def load(name: str, missing: Missing = "refuse") -> Table:
    """The data set with this name: one of NAMES, or the path of a CSV file.

    Raises Failure: BAD_DATA (65) for a bad file, NO_PERMISSION (77) for an unreadable one, CANNOT_WRITE (73) and
    IO_ERROR (74) for the cache.
    """
    path = SHIPPED / f"{name}.csv" if name in NAMES else Path(name)
    if not path.exists():
        raise Failure(f"unknown data set '{name}'; hint: give {', '.join(NAMES)} or a CSV file", BAD_DATA)
    if path.stat().st_size <= IN_MEMORY_BYTES:
        buffer = io.BytesIO()
        parsed = _parse(path, missing, buffer.write, lambda: np.frombuffer(buffer.getbuffer()))
        features = np.frombuffer(buffer.getbuffer()).reshape(len(parsed.labels), -1)
    else:
        features, parsed = _cached(path, missing)
    splits = {
        part: TableSplit(features=features, labels=parsed.labels, rows=rows, columns=parsed.columns)
        for part, rows in zip(PARTS, _split(path, parsed.labels, parsed.columns.classes), strict=True)
    }
    return Table(
        name=name if name in NAMES else path.stem,
        columns=parsed.columns,
        file_format=parsed.file_format,
        fingerprint=hashlib.sha256(f"{parsed.digest} {missing}".encode()).hexdigest(),
        **splits,
    )


def _parse(
    path: Path, missing: Missing, write: Callable[[Any], Any], written: Callable[[], NDArray[np.float64]]
) -> Parsed:
    """Parses the file and passes its features to `write`, as float64 in row order.

    `written` returns all features that have been written. Raises Failure (65, 77).
    """
    form = csv_rows.detect(path)
    if form.columns < 2:
        raise Failure(f"{path}:{form.first}: only one column; hint: give features, then the class", BAD_DATA)
    lower = [name.lower() for name in form.names or ("",)]
    if lower[-1] not in CLASS_NAMES and (wrong := next((name for name in lower if name in CLASS_NAMES), None)):
        place = f"{path}:{form.first - 1}:{form.skipped + lower.index(wrong) + 1}"
        message = f"the column {wrong!r} is not the last one, so {lower[-1]!r} would be the class"
        raise Failure(f"{place}: {message}; hint: move it to the end", BAD_DATA)
    numbers: dict[str, int] = {}  # class -> number, in the order of appearance
    digest, labels, line = hashlib.sha256(), [np.empty(0, np.int64)], 0
    for block in csv_rows.rows(path, form, missing):
        data = np.ascontiguousarray(block.features).data
        digest.update(data)
        write(data)
        labels.append(np.array([numbers.setdefault(name, len(numbers)) for name in block.classes], np.int64))
        line = int(block.lines[-1]) if len(block.lines) else line
        if len(numbers) > MOST_CLASSES:
            message = f"{path}:{line}: more than {MOST_CLASSES} classes in the last column"
            raise Failure(f"{message}; hint: this workload is a classifier; the last column must be a class", BAD_DATA)
    if len(numbers) < 2:
        message = f"only one class, {next(iter(numbers))!r}" if numbers else "no rows"
        raise Failure(f"{path}: {message}; hint: give rows of two or more classes, the class last", BAD_DATA)
    classes = sorted(numbers, key=_numbers_first)
    final_number = np.argsort([numbers[name] for name in classes])
    all_labels = final_number[np.concatenate(labels)]
    digest.update(all_labels.data)
    digest.update(json.dumps(classes).encode())
    features = written().reshape(len(all_labels), -1)
    mean, scale = _statistics(features, _split(path, all_labels, classes)[0])
    names = form.names and form.names[:-1]
    columns = Columns(names=names, classes=tuple(classes), mean=mean, scale=scale, missing=missing)
    return Parsed(columns=columns, labels=all_labels, file_format=str(form), digest=digest.hexdigest())


def _numbers_first(name: str) -> tuple[float, str]:
    """Sort key: whole numbers in numerical order, then other names in alphabetical order."""
    return (int(name) if name.isdecimal() else float("inf")), name


def _split(path: Path, labels: NDArray[np.int64], classes: Sequence[str]) -> list[NDArray[np.int64]]:
    """The rows of the training, validation and test part. Raises Failure (65) if a class has no training row."""
    order, table = stratify(labels, drawn_lots(len(labels)), len(classes), SHARES)
    for label in np.flatnonzero(table[:, 0] == 0).tolist():
        message = f"{path}: class {classes[label]!r} has {table[label].sum()} rows, none of them in the training part"
        raise Failure(f"{message}; hint: add rows of this class, or remove it", BAD_DATA)
    return np.split(order, table.sum(axis=0).cumsum()[:2])


def _statistics(features: NDArray[np.float64], training: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mean and standard deviation of the training rows without NaN, block by block (Chan, Golub, LeVeque 1979)."""
    count, mean, squares = np.zeros((3, features.shape[1]))
    chosen = np.zeros(len(features), bool)
    chosen[training] = True
    step = max(1, BLOCK_BYTES // features[0].nbytes)
    for start in range(0, len(features), step):
        block = features[start : start + step][chosen[start : start + step]]
        block_count = np.sum(~np.isnan(block), axis=0)
        block_mean = np.nansum(block, axis=0) / np.maximum(block_count, 1)
        difference, share = block_mean - mean, block_count / np.maximum(count + block_count, 1)
        squares += np.nansum((block - block_mean) ** 2, axis=0) + difference**2 * count * share
        mean += difference * share
        count += block_count
    scale = np.sqrt(squares / np.maximum(count, 1))
    return mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)  # a column may be constant except for rounding


# --- large files: parsed once, then memory-mapped ---------------------------------------------------------------------


def _cached(path: Path, missing: Missing) -> tuple[NDArray[np.float64], Parsed]:
    """The features as a memory map, and the rest of the file.

    The first process on this host parses the file, and again after the file has changed. Other processes wait.
    """
    home = cache_folder("tables")
    identity = [os.uname().nodename, os.path.realpath(path), missing, PARSER]  # hosts may share the cache, not the file
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    with caching(home), files.locked(home / f"{key}.lock"):
        status = path.stat()
        state = {"schema": SCHEMA, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        if (cached := _open(home / key, state)) is None:
            print(f"{path}: parsing once into {home / key}", file=sys.stderr, flush=True)
            shutil.rmtree(home / key, ignore_errors=True)
            unfinished = home / f".{key}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                with (unfinished / "features").open("wb") as file:

                    def written() -> NDArray[np.float64]:
                        file.flush()
                        return _mapped(unfinished)

                    parsed = _parse(path, missing, file.write, written)
                np.save(unfinished / "labels.npy", parsed.labels)
                rest = {"file_format": parsed.file_format, "digest": parsed.digest, "columns": parsed.columns.as_json()}
                (unfinished / "index.json").write_text(json.dumps(state | rest))
                unfinished.rename(home / key)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            cached = _mapped(home / key).reshape(len(parsed.labels), -1), parsed
    return cached


def _mapped(folder: Path) -> NDArray[np.float64]:
    return np.asarray(np.memmap(folder / "features", np.float64, "r"))


def _open(folder: Path, state: dict[str, Any]) -> tuple[NDArray[np.float64], Parsed] | None:
    """The cached table in this folder; None if it is missing, damaged or out of date."""
    try:
        index = files.from_json(files.read(folder / "index.json", INDEX_BYTES))
        if {name: index[name] for name in state} != state:
            return None
        columns = Columns.from_json(index["columns"])
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        features = _mapped(folder).reshape(len(labels), len(columns.mean))
        parsed = Parsed(columns=columns, labels=labels, file_format=index["file_format"], digest=index["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return features, parsed
