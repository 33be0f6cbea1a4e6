"""A CSV file as a data set for a classifier: cut into three parts, standardised as its training part is.

    table = load("measured.csv", "refuse")        # features first, the class last: see hvdtrain.data.csv_rows

Rows are cut class by class, 70 % for training, 15 % for validation, 15 % for the test, by lots of a fixed seed, so that
scores of different runs compare. A feature is standardised by mean and deviation of the training part alone; a missing
value (`mean`) is that mean, which is 0 then.

A file of more than 4 MiB is parsed once per host, into `hvdtrain/tables` of the user's cache, and mapped from there:
8 bytes per number on disk. Only what belongs to a row as a whole (class, lot, place in the order) is held in memory.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Batch, Split, csv_rows, drawn_lots, packaged, stratify
from hvdtrain.data.csv_rows import Missing
from hvdtrain.data.prepared import PARTS, cache_folder, caching
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

OURS = {"breast-cancer": "breast_cancer.csv", "iris": "iris.csv", "wine": "wine_data.csv"}
"""Data sets of the UCI Machine Learning Repository (CC BY 4.0) that scikit-learn brings: name -> file"""
SHARES = (Fraction(70, 100), Fraction(15, 100), Fraction(15, 100))
IN_MEMORY_BYTES = 4 * files.MIB
MOST_CLASSES = 256
"""A confusion matrix of 256 KiB in every step's sums; more look like a number, which is no class"""
KEPT = "columns.json"
"""The file of a run's folder that holds `Columns`"""
SCHEMA = "hvdtrain.table/1"
INDEX_BYTES = 16 * files.MIB
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a model must know of the columns to be used: kept with the run."""

    names: tuple[str, ...] | None
    """Of the features, if the file named them"""
    classes: tuple[str, ...]
    mean: NDArray[np.float64]
    """(features,), of the training part"""
    scale: NDArray[np.float64]
    """(features,), its standard deviation; 1 where that is 0"""
    missing: Missing

    def standard(self, features: NDArray[np.float64]) -> NDArray[np.float32]:
        """(n, features) as the model takes them."""
        values = (features - self.mean) / self.scale
        values[np.isnan(values)] = 0
        return values.astype(np.float32)

    def as_json(self) -> dict[str, Any]:
        kept = {"names": self.names, "classes": self.classes, "missing": self.missing}
        return {"schema": SCHEMA, **kept, "mean": self.mean.tolist(), "scale": self.scale.tolist()}

    @classmethod
    def from_json(cls, value: Any) -> Columns:
        """Raises ValueError for anything but what `as_json` made."""
        try:
            mean, scale = (np.array(value[name], np.float64) for name in ("mean", "scale"))
            names, classes = value["names"], tuple(map(str, value["classes"]))
            if value["schema"] != SCHEMA or value["missing"] not in ("refuse", "mean", "drop"):
                raise ValueError(f"schema {value['schema']!r:.80}, missing {value['missing']!r:.80}")
            if mean.ndim != 1 or mean.shape != scale.shape or not (np.isfinite(mean) & (scale > 0)).all():
                raise ValueError("mean and scale are not those of columns")
            names = None if names is None else tuple(map(str, names))
            if names is not None and len(names) != len(mean):
                raise ValueError("not as many names as columns")
        except (KeyError, TypeError) as error:
            raise ValueError(f"no {error}") from None
        return cls(names=names, classes=classes, mean=mean, scale=scale, missing=value["missing"])


@dataclass(frozen=True, kw_only=True)
class TableSplit(Split):
    """See `data.Split`. A batch is (n, features) float32 and (n,) int64."""

    features: NDArray[np.float64]
    """Of all rows of the file"""
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]
    """Those of this part"""
    columns: Columns

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, mine: NDArray[np.int64], everyones: NDArray[np.int64], key: int | None) -> Batch:
        rows = self.rows[mine]
        arrays = self.columns.standard(self.features[rows]), self.labels[rows]
        return Batch(arrays=arrays, weight=len(mine), total_weight=len(everyones))


@dataclass(frozen=True, kw_only=True)
class Table:
    """A CSV file as a data set."""

    name: str
    columns: Columns
    train: TableSplit
    validation: TableSplit
    test: TableSplit
    words: str
    """How the file is written, for people"""
    fingerprint: str
    """SHA-256 of features, classes and what was made of missing values"""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """All of a file but its features."""

    columns: Columns
    labels: NDArray[np.int64]
    words: str
    digest: str
    """SHA-256 of features and classes"""


def load(name: str, missing: Missing = "refuse") -> Table:
    """The data set of OURS, or the CSV file, called `name`. Raises Failure: BAD_DATA (65) for what is wrong with the
    file, NO_PERMISSION (77); CANNOT_WRITE (73), IO_ERROR (74) for the cache."""
    path = _ours(name) if name in OURS else Path(name)
    if not path.exists():
        raise Failure(f"no data set '{name}': name {', '.join(OURS)}, or a CSV file", BAD_DATA)
    if path.stat().st_size <= IN_MEMORY_BYTES:
        target = io.BytesIO()
        parsed = _parse(path, missing, target.write, lambda: np.frombuffer(target.getbuffer()))
        features = np.frombuffer(target.getbuffer()).reshape(len(parsed.labels), -1)
    else:
        features, parsed = _cached(path, missing)
    parts = {
        part: TableSplit(features=features, labels=parsed.labels, rows=rows, columns=parsed.columns)
        for part, rows in zip(PARTS, _parts(path, parsed.labels, parsed.columns.classes), strict=True)
    }
    return Table(
        name=name if name in OURS else path.stem,
        columns=parsed.columns,
        words=parsed.words,
        fingerprint=hashlib.sha256(f"{parsed.digest} {missing}".encode()).hexdigest(),
        **parts,
    )


def _ours(name: str) -> Path:
    if (path := packaged("sklearn", f"datasets/data/{OURS[name]}")) is not None:
        return path
    raise Failure(f"{name} comes with scikit-learn, which is not installed: pip install scikit-learn", BAD_DATA)


def _parse(
    path: Path, missing: Missing, write: Callable[[Any], Any], written: Callable[[], NDArray[np.float64]]
) -> Parsed:
    """Gives all features, float64 row after row, to `write`; `written` are they all. Raises Failure (65, 77)."""
    form = csv_rows.form(path)
    if form.columns < 2:
        raise Failure(f"{path}:{form.first}: one column; give features, and the class in the last one", BAD_DATA)
    known: dict[str, int] = {}
    digest, labels, rows = hashlib.sha256(), [np.empty(0, np.int64)], 0
    for block in csv_rows.rows(path, form, missing):
        data = np.ascontiguousarray(block.features).data
        digest.update(data)
        write(data)
        labels.append(np.array([known.setdefault(name, len(known)) for name in block.classes], np.int64))
        rows = int(block.lines[-1]) if len(block.lines) else rows
        if len(known) > MOST_CLASSES:
            told = f"{path}:{rows}: more than {MOST_CLASSES} classes in the last column"
            raise Failure(f"{told}; is it a number? This is a classifier", BAD_DATA)
    if len(known) < 2:
        told = f"has one class, {next(iter(known))!r}" if known else "has no row"
        raise Failure(f"{path}: {told}; give rows of two classes or more, the class in the last column", BAD_DATA)
    classes = sorted(known, key=_by_number)
    places = np.argsort([known[name] for name in classes])
    every = places[np.concatenate(labels)]
    digest.update(every.data)
    digest.update(json.dumps(classes).encode())
    features = written().reshape(len(every), -1)
    mean, scale = _statistics(features, _parts(path, every, classes)[0])
    names = form.names and form.names[:-1]
    columns = Columns(names=names, classes=tuple(classes), mean=mean, scale=scale, missing=missing)
    return Parsed(columns=columns, labels=every, words=str(form), digest=digest.hexdigest())


def _by_number(name: str) -> tuple[float, str]:
    """Classes that are numbers in their order, others behind in that of the alphabet."""
    return (int(name) if name.isdecimal() else float("inf")), name


def _parts(path: Path, labels: NDArray[np.int64], classes: Sequence[str]) -> list[NDArray[np.int64]]:
    """The rows of the training, validation and test part. Raises Failure (65) for a class too rare to be learnt."""
    order, table = stratify(labels, drawn_lots(len(labels)), len(classes), SHARES)
    for label in np.flatnonzero(table[:, 0] == 0).tolist():
        told = f"{path}: class {classes[label]!r} has {table[label].sum()} rows, and none fell to the training part"
        raise Failure(f"{told}; give it more, or leave it out", BAD_DATA)
    return np.split(order, table.sum(axis=0).cumsum()[:2])


def _statistics(features: NDArray[np.float64], training: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mean and standard deviation of the training rows, block by block (Chan, Golub, LeVeque 1979), NaN left out."""
    count, mean, squares = np.zeros((3, features.shape[1]))
    chosen = np.zeros(len(features), bool)
    chosen[training] = True
    step = max(1, BLOCK_BYTES // features[0].nbytes)
    for start in range(0, len(features), step):
        block = features[start : start + step][chosen[start : start + step]]
        here = np.sum(~np.isnan(block), axis=0)
        its_mean = np.nansum(block, axis=0) / np.maximum(here, 1)
        off, share = its_mean - mean, here / np.maximum(count + here, 1)
        squares += np.nansum((block - its_mean) ** 2, axis=0) + off**2 * count * share
        mean += off * share
        count += here
    scale = np.sqrt(squares / np.maximum(count, 1))
    return mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)  # a column may be constant, but for rounding


# --- files that are too large to be parsed at every start -------------------------------------------------------------


def _cached(path: Path, missing: Missing) -> tuple[NDArray[np.float64], Parsed]:
    """Features as a memory map, and the rest: parsed by the first process of the host that asks, when it first asks or
    when the file has changed. The others wait for it."""
    home = cache_folder("tables")
    place = [os.uname().nodename, os.path.realpath(path), missing]  # hosts may share the cache, and not the file
    key = hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]
    with caching(home), files.locked(home / f"{key}.lock"):
        about = path.stat()
        state = {"schema": SCHEMA, "bytes": about.st_size, "mtime_ns": about.st_mtime_ns}
        if (found := _open(home / key, state)) is None:
            print(f"{path}: parsing it once, into {home / key}", file=sys.stderr, flush=True)
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
                rest = {"words": parsed.words, "digest": parsed.digest, "columns": parsed.columns.as_json()}
                (unfinished / "index.json").write_text(json.dumps(state | rest))
                unfinished.rename(home / key)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
            found = _mapped(home / key).reshape(len(parsed.labels), -1), parsed
    return found


def _mapped(folder: Path) -> NDArray[np.float64]:
    return np.asarray(np.memmap(folder / "features", np.float64, "r"))


def _open(folder: Path, state: dict[str, Any]) -> tuple[NDArray[np.float64], Parsed] | None:
    """What is in the folder; None if that is nothing whole, or not of the file as it is now."""
    try:
        index = files.from_json(files.read(folder / "index.json", INDEX_BYTES))
        if {name: index[name] for name in state} != state:
            return None
        columns = Columns.from_json(index["columns"])
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        features = _mapped(folder).reshape(len(labels), len(columns.mean))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return features, Parsed(columns=columns, labels=labels, words=index["words"], digest=index["digest"])
