"""The folder that `hvdtrain data images` makes, as a reader sees it."""

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
INDEX_BYTES = 64 * files.MIB  # it lists bad samples
TOLD_BYTES = 10**9  # verifying more than this takes seconds, so the user is told
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
CHUNK_BYTES = 1 << 20  # small enough to be hashed from the processor's cache
ONE = {"float16": (np.uint16, 0x3C00), "float32": (np.uint32, 0x3F800000)}
"""The bits of 1.0 as an unsigned integer. A float from 0 to 1 has no larger bits; negatives, infinity and NaN have."""


def cache_folder(kind: str) -> Path:
    """This host's cache folder for data of one `kind`: below $XDG_CACHE_HOME or ~/.cache, free to be removed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain" / kind


@contextmanager
def caching(folder: Path) -> Iterator[None]:
    """Makes a folder of the cache. Raises Failure (73, 74), which says what to do, if the system refuses anything."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError):
            raise  # another rank is gone
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        hint = f"{'make room, or ' if full else ''}set XDG_CACHE_HOME to another folder"
        told = f"{error.filename or folder}: {error.strerror}: {hint}"
        raise Failure(told, IO_ERROR if full else CANNOT_WRITE) from None


@contextmanager
def opening(folder: Path, command: str, schema: str) -> Iterator[dict[str, Any]]:
    """The index of a folder that `command` made; whatever is wrong with the folder inside is one line (BAD_DATA)."""
    path = folder / "index.json"
    try:
        index = files.from_json(files.read(path, INDEX_BYTES))
        if index["schema"] != schema:
            raise Failure(
                f"{path}: schema {index['schema']!r:.80}, not {schema}: prepare it with `{command}`", BAD_DATA
            )
        yield index
    except FileNotFoundError as error:
        hint = f"not a folder made by `{command}`, or an incomplete copy of one"
        raise Failure(f"{error.filename} is missing: {hint}", BAD_DATA) from None
    except OSError as error:
        denied = isinstance(error, PermissionError)
        raise Failure(f"{error.filename}: {error.strerror}", NO_PERMISSION if denied else BAD_DATA) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Failure(f"{path} is damaged ({error}): copy or prepare it again", BAD_DATA) from None


def open_images(folder: str | Path, *, verify: bool = False) -> Dataset:
    """The data set in a folder made by `prepare`; samples stay a memory map.

    Small files are checked whole, the large one by its size and head, and whole too when this host sees it for the
    first time or with `verify` (see `open_array`).
    Raises Failure (BAD_DATA; NO_PERMISSION), which names the file, if anything is not as the index says.
    """
    folder = Path(folder)
    with opening(folder, "hvdtrain data images", SCHEMA) as index:
        table = np.array([whole_numbers(index["counts"][part]) for part in PARTS], np.int64).T
        classes, stated = texts(index["classes"]), index["files"]
        shape = whole_numbers([index[name] for name in ("samples", "height", "width", "channels")])
        labels = open_array(folder / "labels.npy", stated["labels.npy"], shape[:1], "int64", verify=True)
        samples = open_array(folder / "samples.npy", stated["samples.npy"], shape, index["dtype"], verify=verify)
        digests = {name: stated[name]["sha256"] for name in FILES}
        if len(set(classes)) < len(classes):
            raise ValueError("its classes name one twice")
        if len(table) != len(classes) or table.sum() != len(labels):
            raise ValueError("its counts are not those of its classes and samples")
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(classes):
        raise Failure(f"{folder / 'labels.npy'} names classes that the index has not: prepare it again", BAD_DATA)
    parts = cut(samples, labels, table)
    if any(
        not np.array_equal(np.bincount(part.labels, minlength=len(classes)), column)
        for part, column in zip(parts.values(), table.T, strict=True)
    ):
        raise Failure(f"{folder / 'index.json'}: its counts are not those of labels.npy: prepare it again", BAD_DATA)
    content = json.dumps([classes, table.tolist(), digests])
    return Dataset(
        name=folder.name,
        classes=classes,
        fingerprint=hashlib.sha256(content.encode()).hexdigest(),
        **parts,
    )


def whole_numbers(values: Any) -> tuple[int, ...]:
    """A document's list of counts or sizes. Raises ValueError for anything but whole numbers of 0 or more."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 48 for value in values):
        raise ValueError(f"{values!r:.80} where whole numbers of 0 or more belong")
    return tuple(values)


def texts(values: Any) -> tuple[str, ...]:
    """A document's list of texts. Raises ValueError for anything else, and for control characters, which a terminal
    would obey."""
    if not isinstance(values, list) or not all(isinstance(each, str) and not CONTROL.search(each) for each in values):
        raise ValueError(f"{values!r:.80} where a list of texts without control characters belongs")
    return tuple(values)


def open_array(
    path: Path, stated: dict[str, Any], shape: tuple[int, ...], dtype: str, *, verify: bool, shares: bool = True
) -> NDArray[Any]:
    """A read-only map of an .npy file that is as its index says: size, head, and SHA-256 over all of it.

    The last is compared with `verify`, or if this host has not compared it since the file last changed; that floats lie
    in 0..1, where they are `shares`, is seen then, too. Raises Failure (BAD_DATA) or what `opening` expects.
    """
    if dtype not in ("uint8", "int64", *ONE):
        raise ValueError(f"dtype {dtype!r:.80}")
    with files.open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != stated["bytes"]:
            raise Failure(f"{path} has {size} bytes, not {stated['bytes']!r:.40}: copy or prepare it again", BAD_DATA)
        try:
            found, in_columns, kind = arrays_file.read_npy_head(file)
        except ValueError as error:
            raise Failure(f"{path} is no array ({error}): copy or prepare it again", BAD_DATA) from None
        start = file.tell()
        if (found, in_columns, kind) != (shape, False, np.dtype(dtype)):
            raise Failure(f"{path} holds {kind!s:.80} {found!s:.80}, not {dtype} {shape}: prepare it again", BAD_DATA)
        if size != start + math.prod(shape) * kind.itemsize:
            raise Failure(f"{path} ends before or after its array of {found}: copy or prepare it again", BAD_DATA)
        with _remembered(path, file, stated["sha256"]) as known:
            if verify or not known:
                _verify(path, file, start, stated["sha256"], dtype if shares else None)
        if not math.prod(shape):
            return np.empty(shape, dtype)  # there is nothing to map
        return np.asarray(np.memmap(file, dtype, "r", start, shape))  # without np.memmap's cost for each index


def _verify(path: Path, file: BufferedReader, start: int, stated: str, dtype: str | None) -> None:
    """Compares the SHA-256 of the whole file and the range of its values, if of a type. Raises Failure (BAD_DATA)."""
    size = os.fstat(file.fileno()).st_size
    if size > TOLD_BYTES:
        print(f"hvdtrain: verifying {path} ({size / 1e9:.1f} GB), once on this host", file=sys.stderr, flush=True)
    file.seek(0)
    sha256 = hashlib.sha256(file.read(start))
    while data := file.read(CHUNK_BYTES):
        sha256.update(data)
        if dtype in ONE:
            bits, one = ONE[dtype]
            if np.frombuffer(data, bits).max() > one:
                what = "holds values outside 0..1 (negative, infinite or NaN, too)"
                raise Failure(f"{path} {what}: prepare it again", BAD_DATA)
    if sha256.hexdigest() != stated:
        raise Failure(f"{path} is damaged (its SHA-256 is not the index's): copy or prepare it again", BAD_DATA)


@contextmanager
def _remembered(path: Path, file: BufferedReader, sha256: str) -> Iterator[bool]:
    """Whether this host has verified the open file since it last changed; if not, that is noted when the block ends.

    The note is a lock, too: processes of one host that start together wait for the first of them. Where none can be
    written, each verifies for itself.
    """
    about = os.fstat(file.fileno())
    place = json.dumps([os.uname().nodename, os.path.realpath(path)])
    text = json.dumps([place, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, sha256]).encode()
    home = cache_folder("verified")
    with contextlib.ExitStack() as stack:
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            note = stack.enter_context(files.locked(home / hashlib.sha256(place.encode()).hexdigest()[:32]))
        except OSError:
            yield False
            return
        known = os.fstat(note).st_uid == os.geteuid() and os.pread(note, len(text) + 1, 0) == text
        yield known
        if not known:
            with contextlib.suppress(OSError):  # a full disk, or another user's
                os.ftruncate(note, 0)
                os.pwrite(note, text, 0)
