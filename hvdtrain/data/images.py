"""Folders of pictures -> memory-mapped arrays: `hvdtrain data images SRC DST --size 197x148 --gray`.

**In**: one folder per class, with JPEG, PNG, GIF, BMP, TIFF or WebP files anywhere below it. Names that begin with a
dot and files beside the class folders are left alone.

**Out**: DST with `samples.npy` (N, height, width, channels), `labels.npy` (N,) int64 and `index.json`. Rows are in the
order train | validation | test; each part has its share of every class and mixes the classes. A file's place depends
on the seed and its own name, so what else is in the tree hardly moves it.

**A picture becomes a row** in this order:
  1. decoded, first frame only, and turned upright as its EXIF orientation says;
  2. converted to RGB, or with `--gray` to luma by ITU-R 601-2, L = (299 R + 587 G + 114 B) / 1000 (Pillow's 'L').
     16-bit gray is scaled, round(255 v / 65535); of 16-bit colour Pillow keeps the high byte; CMYK goes by way of RGB;
     transparency is dropped;
  3. resized to the size given, the aspect ratio not kept, by Pillow's bilinear filter (antialiased when it shrinks);
  4. normalised: v / 255 in 0..1, rounded to the nearest float16 or float32. With `--dtype uint8` it is kept as 0..255
     and divided when a batch is made: the same information in half of float16's bytes.

**Bad samples** (not an image, cut off, empty, one pixel wide, too large to be honest, unreadable, a link that leaves
the tree ...) end the work with the file's name, or are skipped, counted and listed in the index.

**Safe at any moment**: the work is done in `.DST.unfinished` beside DST, which is renamed when everything in it is on
disk. Killed half way, the same command continues where it was and makes the same bytes as an uninterrupted run.
Workers write rows straight into the file, not into a memory map, where a full disk would kill them by SIGBUS.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
from numpy.typing import NDArray

from hvdtrain import __version__
from hvdtrain.config.constraints import bounded, counts, problem
from hvdtrain.config.parser import flag
from hvdtrain.data import MAX_PIXELS, stratify
from hvdtrain.data.pixels import Bad, Chunk, convert, npy_header, workers
from hvdtrain.data.prepared import FILES, INDEX_BYTES, PARTS, SCHEMA, whole_numbers
from hvdtrain.data.tree import Tree, find
from hvdtrain.observe.progress import Progress
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, CANNOT_WRITE, IO_ERROR, RESUMABLE, Failure

SUMMARY = "hvdtrain.data.images/1"
CHUNK_BYTES = 4 * 2**20  # of rows that a worker prepares at a time
COMMIT_S = 1.0  # at most this much work is done again after a kill


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """What `hvdtrain data images` does."""

    source: str
    """Folder with one folder of pictures per class."""
    destination: str
    """Folder to make; must not exist."""
    size: str
    """WxH: width and height of the prepared images in pixels, for example --size 36x24"""
    gray: bool = False
    """Keep luma only (ITU-R 601-2): one channel in place of three."""
    dtype: Literal["uint8", "float16", "float32"] = "float16"
    """How values are stored; uint8 takes half the room of float16 and loses nothing."""
    split: str = "85/2/13"
    """Percent of each class for train/validation/test; must sum to 100."""
    seed: int = bounded(0, least=0)
    """Which samples go where; the same seed gives the same bytes."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """What to do about a file that is no usable picture: stop and name it, or leave it out and list it."""
    max_bad_samples: int = bounded(100, least=0)
    """With skip: stop when there are more than this many."""
    fast_jpeg: bool = False
    """Decode large JPEGs at 1/2, 1/4 or 1/8: several times faster, values differ slightly from the exact way."""
    workers: int = bounded(0, least=0)
    """Processes; 0 takes all cores."""
    dry_run: bool = False
    """Only list what would be made."""

    def __post_init__(self) -> None:
        if wrong := problem(self, flag):
            raise Failure(wrong, BAD_CONFIG)
        if len(sides := counts(self.size, "x")) != 2 or math.prod(sides) > MAX_PIXELS:
            what = f"--size {self.size}: expected WIDTHxHEIGHT in pixels, for example 197x148, with at most"
            raise Failure(f"{what} {MAX_PIXELS:,} pixels", BAD_CONFIG)
        try:
            shares = self.shares
        except (ValueError, ZeroDivisionError):
            shares = ()
        if len(shares) != 3 or sum(shares) != 1 or min(shares) < 0 or shares[0] == 0:
            raise Failure(
                f"--split {self.split}: expected TRAIN/VALIDATION/TEST in percent that sum to 100, for example 85/2/13",
                BAD_CONFIG,
            )

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of a prepared image."""
        width, height = counts(self.size, "x")
        return height, width, 1 if self.gray else 3

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.row_shape)) * np.dtype(self.dtype).itemsize

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Shares of train, validation and test, exact."""
        return tuple(Fraction(part) / 100 for part in self.split.split("/"))


# 1. Turn pictures into rows, and save how far the work is.


@dataclass(kw_only=True)
class State:
    """What `.DST.unfinished` holds; on disk as its `state.json`."""

    settings: dict[str, Any]
    """The settings that the result's bytes depend on."""
    pictures: str
    """Digest of the source."""
    rows: int = 0
    """Rows that are known to be on disk."""
    bad: Bad
    """The bad samples among these rows."""


def prepare(config: ImagesConfig) -> dict[str, Any]:
    """Prepares the data and returns a summary fit for JSON.

    Raises Failure: BAD_DATA for a source or a picture that is unusable, NO_PERMISSION for a folder that cannot be
    read, CANNOT_WRITE if the destination exists, IO_ERROR for a full disk, RESUMABLE when interrupted.
    """
    check_destination(config.source, config.destination)
    tree = find(Path(config.source), config.seed, config.shares)

    def describe() -> dict[str, Any]:
        _, table = stratify(tree.labels, tree.lots, len(tree.classes), config.shares)
        return _describe(config, tree, table, {})

    made = make(config, tree, describe, functools.partial(_finish, config, tree))
    return {**made, "schema": SUMMARY}


def check_destination(source: str, folder: str) -> None:
    """Raises Failure for a destination that exists, or lies in the source."""
    destination = Path(folder).absolute()
    if Path(os.path.realpath(destination)).is_relative_to(os.path.realpath(source)):
        raise Failure(f"{destination} lies in the source: choose another place", BAD_CONFIG)
    if destination.exists():
        raise Failure(f"{destination} exists: remove it, or choose another destination", CANNOT_WRITE)


def make(
    config: ImagesConfig,
    tree: Tree,
    describe: Callable[[], dict[str, Any]],
    finish: Callable[[Path, Bad], dict[str, Any]],
) -> dict[str, Any]:
    """Turns the tree's pictures into `samples.npy`; `finish` adds the rest in that folder and returns its index, and
    the folder becomes the destination. A dry run tells what `describe` returns. Raises Failure as `prepare` does."""
    began_s, destination = time.monotonic(), Path(config.destination).absolute()
    judge(config, tree, {})
    if config.dry_run:
        return {**describe(), "destination": str(destination), "dry_run": True}
    with making(destination) as unfinished:
        result = unfinished / "result"
        state = resume(config, tree, unfinished)
        before = state.rows
        convert_all(config, tree, result / "samples.npy", state)
        index = finish(result, state.bad)
    took_s = time.monotonic() - began_s
    speed = {"seconds": round(took_s, 3), "images_per_s": round((state.rows - before) / took_s, 1)}
    return {**index, "destination": str(destination), **speed, "resumed_rows": before}


def judge(config: ImagesConfig, tree: Tree, bad: Bad) -> None:
    """Raises Failure if there are more bad samples than the config allows."""
    count = len(tree.bad) + len(bad)
    if count == 0 or (config.on_bad_sample == "skip" and count <= config.max_bad_samples):
        return
    name, reason = next(iter(named(tree, bad).items()))
    if config.on_bad_sample == "fail":
        hint = "mend or remove it, or leave such files out with --on-bad-sample skip"
        raise Failure(f"{tree.root / name}: {reason}: {hint}", BAD_DATA)
    cap = f"more than --max-bad-samples {config.max_bad_samples}"
    raise Failure(f"{count} bad samples, {cap}; the first is {tree.root / name}: {reason}", BAD_DATA)


def named(tree: Tree, bad: Bad) -> dict[str, str]:
    return tree.bad | {tree.files[row]: reason for row, reason in bad.items()}


@contextmanager
def explained(destination: Path) -> Iterator[None]:
    """Turns an error of the system into one line that says what to do."""
    again = "the same command continues"
    try:
        yield
    except KeyboardInterrupt:
        raise Failure(f"{destination}: interrupted; {again}", RESUMABLE) from None
    except BrokenProcessPool:
        raise Failure(
            f"a worker process was killed (out of memory?); {again}, try fewer --workers", RESUMABLE
        ) from None
    except OSError as error:
        where = error.filename or destination
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise Failure(f"{where}: {error.strerror}: choose another destination", CANNOT_WRITE) from None
        cure = "make room; " if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        raise Failure(f"{where}: {error.strerror}: {cure}{again}", IO_ERROR) from None


@contextmanager
def making(destination: Path) -> Iterator[Path]:
    """The working folder, locked (the system drops the lock of the killed); its `result` becomes the destination at the
    end of the block. An error leaves the folder if work is in it."""
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    with explained(destination), ExitStack() as stack:
        unfinished.mkdir(parents=True, exist_ok=True)
        if unfinished.is_symlink():
            raise Failure(f"{unfinished} is a link: remove it, or choose another destination", CANNOT_WRITE)
        if unfinished.stat().st_uid != os.geteuid():  # who may have put links into it
            raise Failure(f"{unfinished} is another user's: choose another destination", CANNOT_WRITE)
        try:
            stack.enter_context(files.locked(unfinished / "lock", wait=False))
        except BlockingIOError:
            raise Failure(f"{unfinished}: another process is at work there: wait for it", CANNOT_WRITE) from None
        except OSError as error:
            if error.errno not in files.UNSUPPORTED:
                raise
            print(f"hvdtrain: {unfinished}: {error.strerror}: nothing keeps another job out of it", file=sys.stderr)
        try:
            yield unfinished
            (unfinished / "result").rename(destination)
            files.sync(destination.parent)
            (unfinished / "state.json").unlink(missing_ok=True)
        finally:
            if not (unfinished / "state.json").exists():
                shutil.rmtree(unfinished)


def resume(config: ImagesConfig, tree: Tree, unfinished: Path) -> State:
    """The state of the work: as it was left if it is the same work, else new with all the room it needs."""
    settings = {
        **{name: getattr(config, name) for name in ("size", "gray", "dtype", "split", "seed", "fast_jpeg")},
        "pillow": PIL.__version__,
        "schema": SCHEMA,
    }
    array = unfinished / "result" / "samples.npy"
    saved = unfinished / "state.json"
    if saved.exists() and array.exists():
        hint = "remove that folder, or choose another destination"
        try:
            data = files.from_json(files.read(saved, INDEX_BYTES))
            old, (rows,) = data["settings"], whole_numbers([data["rows"]])
            bad = {int(row): str(why) for row, why in data["bad"].items()}
            differs = [f"{name} {old.get(name)}, not {new}" for name, new in settings.items() if old.get(name) != new]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Failure(f"{saved} is damaged ({error}): {hint}", CANNOT_WRITE) from None
        if differs:
            raise Failure(f"{unfinished} holds unfinished work with {', '.join(differs)}: {hint}", CANNOT_WRITE)
        if data["pictures"] == tree.digest and max(rows, *bad, 0) <= len(tree.files):
            return State(settings=settings, pictures=tree.digest, rows=rows, bad=bad)
    saved.unlink(missing_ok=True)  # it is of other pictures, or of an array that is gone
    array.parent.mkdir(exist_ok=True)
    head = npy_header(len(tree.files), config.row_shape, config.dtype)
    with array.open("wb") as file:
        file.write(head)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, len(head) + len(tree.files) * config.row_bytes)
    return State(settings=settings, pictures=tree.digest, bad={})


def convert_all(config: ImagesConfig, tree: Tree, array: Path, state: State) -> None:
    """Fills the rows that are missing."""
    judge(config, tree, state.bad)
    step = max(1, min(64, CHUNK_BYTES // config.row_bytes))
    chunks = [
        Chunk(
            array=str(array),
            first=first,
            files=[str(tree.root / file) for file in tree.files[first : first + step]],
            shape=config.row_shape,
            dtype=config.dtype,
            fast_jpeg=config.fast_jpeg,
        )
        for first in range(state.rows, len(tree.files), step)
    ]
    committed_s = time.monotonic()
    progress = Progress("preparing", len(tree.files), "images", done=state.rows)
    try:
        with progress, workers(config.workers) as spread:
            for chunk, bad in zip(chunks, spread(convert, chunks), strict=True):
                state.rows += len(chunk.files)
                state.bad |= bad
                judge(config, tree, state.bad)
                progress.advance(len(chunk.files), f"{len(state.bad)} bad" if state.bad else "")
                if time.monotonic() - committed_s >= COMMIT_S:
                    _commit(array, state)
                    committed_s = time.monotonic()
    finally:
        _commit(array, state)


def _commit(array: Path, state: State) -> None:
    """Writes the rows to disk, then the state that counts them."""
    files.sync(array)
    write_json(array.parent.parent / "state.json", vars(state))


# 2. Finish: drop the bad rows, add labels and index.


def _finish(config: ImagesConfig, tree: Tree, result: Path, bad: Bad) -> dict[str, Any]:
    """Every step may be done twice, so being killed here does no harm either."""
    good = np.setdiff1d(np.arange(len(tree.files)), list(bad))
    empty = set(range(len(tree.classes))) - set(tree.labels[good].tolist())
    if empty:
        raise Failure(f"{tree.root / tree.classes[min(empty)]} holds no good picture: remove the folder", BAD_DATA)
    order, table = stratify(tree.labels[good], tree.lots[good], len(tree.classes), config.shares)
    drop_bad_rows(result / "samples.npy", config, good[order])
    np.save(result / "labels.npy", tree.labels[good][order])
    return seal(result, {"schema": SCHEMA, **_describe(config, tree, table, bad)}, {name: name for name in FILES})


def seal(result: Path, about: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Writes the index: what there is to say, sizes and SHA-256 of the files; `names`: as listed -> as they are."""
    index: dict[str, Any] = {**about, "files": {}}
    for listed, name in names.items():
        with (result / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            index["files"][listed] = {"bytes": file.tell(), "sha256": digest}
        files.sync(result / name)
    write_json(result / "index.json", index)
    files.sync(result)
    return index


def drop_bad_rows(array: Path, config: ImagesConfig, rows: NDArray[np.int64]) -> None:
    """Rewrites the array so that it holds only `rows`, in this order; does nothing if no row is bad."""
    head = npy_header(len(rows), config.row_shape, config.dtype)
    if array.stat().st_size == len(head) + len(rows) * config.row_bytes:
        return
    shorter = array.with_suffix(".shorter")
    with array.open("rb") as old, shorter.open("wb") as new:
        new.write(head)
        for row in rows.tolist():
            new.write(os.pread(old.fileno(), config.row_bytes, len(head) + row * config.row_bytes))
    files.sync(shorter)
    shorter.replace(array)


def _describe(config: ImagesConfig, tree: Tree, table: NDArray[np.int64], bad: Bad) -> dict[str, Any]:
    """What the index says of the data; nothing in it depends on when or how fast it was made."""
    height, width, channels = config.row_shape
    return {
        "made_by": f"hvdtrain {__version__}, Pillow {PIL.__version__}",
        "classes": tree.classes,
        "samples": int(table.sum()),
        "counts": {part: table[:, i].tolist() for i, part in enumerate(PARTS)},
        "split": {"percent": config.split, "seed": config.seed},
        "width": width,
        "height": height,
        "channels": channels,
        "dtype": config.dtype,
        "colour": "luma, ITU-R 601-2 (Pillow's L)" if config.gray else "RGB",
        "resize": "Pillow bilinear" + (", after a JPEG draft" if config.fast_jpeg else ""),
        "normalisation": "0..255, divide by 255" if config.dtype == "uint8" else "v / 255, in 0..1",
        "source": {"folder": config.source, "files": len(tree.files) + len(tree.bad)},
        "bad_samples": [{"file": name, "reason": reason} for name, reason in named(tree, bad).items()],
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces the file in one go."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    files.sync(draft)
    draft.replace(path)
