"""The folder that `hvdtrain data images` makes, as a reader sees it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Dataset, cut
from hvdtrain.exits import BAD_DATA, Failure

SCHEMA = "hvdtrain.images/1"
FILES = ("samples.npy", "labels.npy")
PARTS = ("train", "validation", "test")


def cache_folder(kind: str) -> Path:
    """Where this host keeps what can be made again: below $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / kind


@contextmanager
def opening(folder: Path, command: str, schema: str) -> Iterator[dict[str, Any]]:
    """The index of a folder that `command` made; whatever is wrong with the folder inside is one line (BAD_DATA)."""
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text())
        if index["schema"] != schema:
            raise Failure(f"{path}: schema {index['schema']!r}, not {schema}: prepare it with `{command}`", BAD_DATA)
        yield index
    except FileNotFoundError as error:
        hint = f"not a folder made by `{command}`, or an incomplete copy of one"
        raise Failure(f"{error.filename} is missing: {hint}", BAD_DATA) from None
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}", BAD_DATA) from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Failure(f"{path} is damaged ({error}): copy or prepare it again", BAD_DATA) from None


def open_images(folder: str | Path, *, verify: bool = False) -> Dataset:
    """The data set in a folder made by `prepare`; samples stay a memory map.

    Small files are checked whole, the large one by its size, head and, with `verify`, its SHA-256.
    Raises Failure (BAD_DATA), which names the file, if anything is not as the index says.
    """
    folder = Path(folder)
    with opening(folder, "hvdtrain data images", SCHEMA) as index:
        table = np.array([index["counts"][part] for part in PARTS], np.int64).T
        classes, files = tuple(map(str, index["classes"])), index["files"]
        shape = (index["samples"], index["height"], index["width"], index["channels"])
        labels = open_array(folder / "labels.npy", files["labels.npy"], shape[:1], "int64", verify=True)
        samples = open_array(folder / "samples.npy", files["samples.npy"], shape, index["dtype"], verify=verify)
        digests = {name: files[name]["sha256"] for name in FILES}
    parts = cut(samples, labels, table)
    if len(table) != len(classes) or any(
        not np.array_equal(np.bincount(part.labels, minlength=len(classes)), column)
        for part, column in zip(parts, table.T, strict=True)
    ):
        raise Failure(f"{folder / 'index.json'}: its counts are not those of labels.npy: prepare it again", BAD_DATA)
    content = json.dumps([classes, table.tolist(), digests])
    train, validation, test = parts
    return Dataset(
        name=folder.name,
        classes=classes,
        train=train,
        validation=validation,
        test=test,
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
    )


def open_array(path: Path, stated: dict[str, Any], shape: tuple[int, ...], dtype: str, *, verify: bool) -> NDArray[Any]:
    size = path.stat().st_size
    if size != stated["bytes"]:
        raise Failure(f"{path} has {size} bytes, not {stated['bytes']}: copy or prepare it again", BAD_DATA)
    if verify:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != stated["sha256"]:
                raise Failure(f"{path} is damaged (its SHA-256 is not the index's): copy or prepare it again", BAD_DATA)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise Failure(f"{path} is no array ({error}): copy or prepare it again", BAD_DATA) from None
    if (array.shape, array.dtype) != (shape, np.dtype(dtype)):
        raise Failure(f"{path} holds {array.dtype} {array.shape}, not {dtype} {shape}: prepare it again", BAD_DATA)
    return np.asarray(array)  # the same map without np.memmap's cost for each index
