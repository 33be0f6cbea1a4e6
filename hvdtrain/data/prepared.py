"""Read the folders that `hvdtrain data` makes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Dataset, cut
from hvdtrain.records import arrays_file
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, CANNOT_WRITE, IO_ERROR, NO_PERMISSION, Failure

SCHEMA = "hvdtrain.images/1"
FILES = ("samples.npy", "labels.npy")
PARTS = ("train", "validation", "test")
INDEX_BYTES = 64 * files.MIB  # the index lists bad samples
NOTICE_BYTES = 10**9  # verifying more takes seconds, so it prints a notice
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters, which a terminal would obey"""
CHUNK_BYTES = 1 << 20  # small enough to be hashed from the processor's cache
ONE = {"float16": (np.uint16, 0x3C00), "float32": (np.uint32, 0x3F800000)}
"""The bits of 1.0 as an unsigned integer. Floats in 0..1 have no larger bits; negative, infinite and NaN values do."""
AGAIN = "copy or prepare it again"


def cache_folder(kind: str) -> Path:
    """This host's cache folder for one `kind` of data, see `files.cache_folder`. Users may delete it."""
    return files.cache_folder() / kind


@contextmanager
def caching(folder: Path) -> Iterator[None]:
    """Creates a cache folder. Raises Failure (73, 74) with a hint for any OSError in the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise  # another rank has failed
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        hint = f"{'free some space, or ' if full else ''}set XDG_CACHE_HOME to another folder"
        message = f"{error.filename or folder}: {error.strerror}; hint: {hint}"
        raise Failure(message, IO_ERROR if full else CANNOT_WRITE) from None


@contextmanager
def opening(folder: Path, command: str, schema: str) -> Iterator[dict[str, Any]]:
    """The index of a folder made by `command`. Any error about the folder in the block becomes one line (BAD_DATA)."""
    path = folder / "index.json"
    try:
        index = files.from_json(files.read(path, INDEX_BYTES))
        if index["schema"] != schema:
            message = f"{path}: schema {index['schema']!r:.80}, not {schema}"
            raise Failure(f"{message}; hint: prepare the data with `{command}`", BAD_DATA)
        yield index
    except FileNotFoundError as error:
        hint = f"give a complete folder made by `{command}`"
        raise Failure(f"{error.filename} does not exist; hint: {hint}", BAD_DATA) from None
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise Failure(f"{error.filename}: {error.strerror}", NO_PERMISSION if denied else BAD_DATA) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Failure(f"{path} is damaged ({error}); hint: copy or prepare it again", BAD_DATA) from None


def open_images(folder: str | Path) -> Dataset:
    """The data set in a folder made by `hvdtrain data images`; samples stay a memory map.

    Small files are verified completely. Of the large one, size and header are always checked, and its contents if this
    host has not checked them yet (see `open_array`). Raises Failure (BAD_DATA; NO_PERMISSION) with
    the file's name if anything differs from the index.
    """
    folder = Path(folder)
    with opening(folder, "hvdtrain data images", SCHEMA) as index:
        table = np.array([whole_numbers(index["counts"][part]) for part in PARTS], np.int64).T
        classes, stated = texts(index["classes"]), index["files"]
        shape = whole_numbers([index[name] for name in ("samples", "height", "width", "channels")])
        labels = open_array(folder / "labels.npy", stated["labels.npy"], shape[:1], "int64", verify=True)
        samples = open_array(folder / "samples.npy", stated["samples.npy"], shape, index["dtype"])
        digests = {name: stated[name]["sha256"] for name in FILES}
        if len(set(classes)) < len(classes):
            raise ValueError("it lists a class twice")
        if len(table) != len(classes) or table.sum() != len(labels):
            raise ValueError("its counts do not match its classes and samples")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise Failure(f"{folder / 'labels.npy'} has classes that the index does not; hint: prepare it again", BAD_DATA)
    parts = cut(samples, labels, table)
    if any(
        not np.array_equal(np.bincount(part.labels, minlength=len(classes)), column)
        for part, column in zip(parts.values(), table.T, strict=True)
    ):
        raise Failure(f"{folder / 'index.json'}: its counts do not match labels.npy; hint: prepare it again", BAD_DATA)
    content = json.dumps([classes, table.tolist(), digests])
    return Dataset(name=folder.name, classes=classes, fingerprint=hashlib.sha256(content.encode()).hexdigest(), **parts)


def whole_numbers(values: Any) -> tuple[int, ...]:
    """A list of counts or sizes from a document. Raises ValueError unless it contains only non-negative integers."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 48 for value in values):
        raise ValueError(f"{values!r:.80} is not a list of non-negative integers")
    return tuple(values)


def texts(values: Any) -> tuple[str, ...]:
    """A list of texts from a document. Raises ValueError for anything else, and for control characters."""
    if not isinstance(values, list) or not all(isinstance(text, str) and not CONTROL.search(text) for text in values):
        raise ValueError(f"{values!r:.80} is not a list of texts without control characters")
    return tuple(values)


def open_array(
    path: Path, stated: dict[str, Any], shape: tuple[int, ...], dtype: str, *, verify: bool = False, shares: bool = True
) -> NDArray[Any]:
    """A read-only memory map of an .npy file whose size, header and SHA-256 match the index.

    The SHA-256 is checked with `verify`, and if this host has not checked it since the file last changed. The same pass
    checks that floats lie in 0..1 if they are `shares`. Raises Failure (BAD_DATA) or what `opening` handles.
    """
    if dtype not in ("uint8", "int64", *ONE):
        raise ValueError(f"dtype {dtype!r:.80}")
    with files.open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != stated["bytes"]:
            raise Failure(f"{path} has {size} bytes, not {stated['bytes']!r:.40}; hint: {AGAIN}", BAD_DATA)
        try:
            array_shape, in_columns, kind = arrays_file.read_npy_head(file)
        except ValueError as error:
            raise Failure(f"{path} is not an array ({error}); hint: {AGAIN}", BAD_DATA) from None
        start = file.tell()
        if (array_shape, in_columns, kind) != (shape, False, np.dtype(dtype)):
            message = f"{path} contains {kind!s:.80} {array_shape!s:.80}, not {dtype} {shape}"
            raise Failure(f"{message}; hint: prepare it again", BAD_DATA)
        if size != start + math.prod(shape) * kind.itemsize:
            raise Failure(f"{path} is shorter or longer than its array of {shape}; hint: {AGAIN}", BAD_DATA)
        with _verified_before(path, file, stated["sha256"]) as verified:
            if verify or not verified:
                _verify(path, file, start, stated["sha256"], dtype if shares else None)
        if not math.prod(shape):
            return np.empty(shape, dtype)  # an empty file cannot be mapped
        return np.asarray(np.memmap(file, dtype, "r", start, shape))  # a plain array indexes faster than np.memmap


def _verify(path: Path, file: BufferedReader, start: int, stated: str, dtype: str | None) -> None:
    """Checks the SHA-256 of the whole file, and the range of its values if `dtype` is given. Raises Failure
    (BAD_DATA)."""
    size = os.fstat(file.fileno()).st_size
    if size > NOTICE_BYTES:
        print(f"hvdtrain: verifying {path} ({size / 1e9:.1f} GB), once on this host", file=sys.stderr, flush=True)
    file.seek(0)
    sha256 = hashlib.sha256(file.read(start))
    while data := file.read(CHUNK_BYTES):
        sha256.update(data)
        if dtype in ONE:
            bits, one = ONE[dtype]
            if np.frombuffer(data, bits).max() > one:
                message = f"{path} contains values outside 0..1 (negative, infinite or NaN)"
                raise Failure(f"{message}; hint: prepare it again", BAD_DATA)
    if sha256.hexdigest() != stated:
        raise Failure(f"{path} is damaged (its SHA-256 differs from the index); hint: {AGAIN}", BAD_DATA)


@contextmanager
def _verified_before(path: Path, file: BufferedReader, sha256: str) -> Iterator[bool]:
    """Whether this host has verified the open file since it last changed. If not, this is recorded at the block's end.

    The record is a lock, too: processes that start together on a host wait for the first one. If no record can be
    written, each process verifies the file.
    """
    about = os.fstat(file.fileno())
    place = json.dumps([os.uname().nodename, os.path.realpath(path)])
    text = json.dumps([place, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, sha256]).encode()
    with contextlib.ExitStack() as stack:
        try:
            home = cache_folder("verified")
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            note = stack.enter_context(files.locked(home / hashlib.sha256(place.encode()).hexdigest()[:32]))
        except (OSError, Failure):
            yield False
            return
        known = os.fstat(note).st_uid == os.geteuid() and os.pread(note, len(text) + 1, 0) == text
        yield known
        if not known:
            with contextlib.suppress(OSError):  # a full disk, or another user's
                os.ftruncate(note, 0)
                os.pwrite(note, text, 0)
