"""Convert folders of images to memory-mapped arrays: `hvdtrain data images SRC DST --size 197x148 --gray`.

**Input**: one folder per class, with images anywhere below it; or such folders in folders of parts (`train`, `val` and
`test`, or such a word in the name), without regard to --split. See `hvdtrain/data/tree.py`.

**Output**: DST with `samples.npy` (N, height, width, channels), `labels.npy` (N,) int64 and `index.json`. Rows are in
the order train | validation | test, with the classes of a part mixed. A file's position depends on the seed and its own
name, so other files in the tree hardly move it.

**Conversion** of an image to a row:
  1. Decode the first frame and rotate it by its EXIF orientation.
  2. Convert to RGB, or with `--gray` to luma by ITU-R 601-2, L = (299 R + 587 G + 114 B) / 1000 (Pillow's 'L').
     16-bit gray is scaled, and 16-bit colour keeps its high byte. Transparency is dropped.
  3. Resize to --size with Pillow's bilinear filter (antialiased when shrinking), whatever the aspect ratio.
  4. Normalize: v / 255 in 0..1, rounded to float16 or float32. `--dtype uint8` stores 0..255, divided in batches.

**Bad samples** are unusable files, and links that leave the tree. Hidden files and those of macOS and Windows
(`__MACOSX`, `Thumbs.db`) are ignored and counted.

**Interruptions** are safe at any time: DST appears when everything is on disk. Workers write rows to the file and not
to a memory map, where a full disk would kill them with SIGBUS.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
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
from hvdtrain.data import MAX_PIXELS
from hvdtrain.data.making import check_destination, making, seal
from hvdtrain.data.pixels import Bad, Chunk, convert, npy_header, workers
from hvdtrain.data.prepared import FILES, PARTS, SCHEMA
from hvdtrain.data.tree import Tree, find, report_ignored
from hvdtrain.observe.progress import Progress
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

SUMMARY = "hvdtrain.data.images/1"
CHUNK_BYTES = 4 * 2**20  # size of the rows in one worker task


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options of every command that prepares images."""

    source: str
    """Folder with the images."""
    destination: str
    """Folder to create; must not exist."""
    size: str
    """Width x height of the prepared images in pixels, e.g. 197x148"""
    split: str
    """Shares of train/validation/test."""
    seed: int = bounded(0, least=0)
    """Decides the position of each sample; the same seed gives the same bytes."""
    on_bad_sample: Literal["fail", "skip"] = "fail"
    """How to handle an unusable file: stop and name it, or skip and list it."""
    max_bad_samples: int = bounded(100, least=0)
    """With skip: stop if there are more bad samples than this."""
    workers: int = bounded(0, least=0)
    """Number of processes; 0 uses all cores."""
    dry_run: bool = False
    """Only report the result; write nothing."""
    gray = False
    dtype = "uint8"

    def __post_init__(self) -> None:
        if wrong := problem(self, flag):
            raise Failure(wrong, BAD_CONFIG)
        if len(sides := counts(self.size, "x")) != 2 or math.prod(sides) > MAX_PIXELS:
            message = f"--size {self.size} is not WIDTHxHEIGHT with at most {MAX_PIXELS:,} pixels"
            raise Failure(f"{message}; hint: for example --size 197x148", BAD_CONFIG)
        try:
            shares = self.shares
        except (ValueError, ZeroDivisionError):
            shares = ()
        if len(shares) != 3 or min(shares) < 0 or shares[0] == 0:
            message = f"--split {self.split} is not TRAIN/VALIDATION/TEST, three numbers in proportion to the parts"
            raise Failure(f"{message}; hint: for example --split 85/2/13", BAD_CONFIG)

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of a prepared image."""
        width, height = counts(self.size, "x")
        return height, width, 1 if self.gray else 3

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Shares of train, validation and test, exact."""
        parts = [Fraction(part) for part in self.split.split("/")]
        return tuple(part / sum(parts) for part in parts)


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(ImageOptions):
    """Options of `hvdtrain data images`."""

    source: str
    """Folder with one folder of images per class."""
    split: str = "85/2/13"
    """Shares of train/validation/test, of each class, for a source without folders of these parts."""
    gray: bool = False
    """Keep luma only (ITU-R 601-2): one channel instead of three."""
    dtype: Literal["uint8", "float16", "float32"] = "float16"
    """How values are stored; uint8 takes half the space of float16 without losing information."""


# --- 1. convert images to rows ----------------------------------------------------------------------------------------


def prepare(config: ImagesConfig) -> dict[str, Any]:
    """Prepares the data and returns a summary fit for JSON.

    Raises Failure: BAD_DATA for an unusable source or image, NO_PERMISSION for an unreadable folder, CANNOT_WRITE if
    the destination exists, IO_ERROR if the disk is full.
    """
    check_destination(config.source, config.destination)
    tree = find(Path(config.source), config.seed, config.shares)

    def describe() -> dict[str, Any]:
        _, table = tree.split(np.arange(len(tree.files)), config.shares)
        return _describe(config, tree, table, {})

    made = make(config, tree, describe, functools.partial(_finish, config, tree))
    return {**made, "schema": SUMMARY}


def make(
    config: ImageOptions,
    tree: Tree,
    describe: Callable[[], dict[str, Any]],
    finish: Callable[[Path, Bad], dict[str, Any]],
) -> dict[str, Any]:
    """Writes the tree's images to `samples.npy`, and then the destination folder.

    `finish` adds the other files to the folder and returns the index. A dry run returns `describe()` instead. Raises
    Failure like `prepare`.
    """
    began_s, destination = time.monotonic(), Path(config.destination).absolute()
    report_ignored(tree.ignored)
    check_bad_samples(config, tree, {})
    if config.dry_run:
        return {**describe(), "destination": str(destination), "dry_run": True}
    with making(destination) as result:
        index = finish(result, convert_all(config, tree, result / "samples.npy"))
    took_s = time.monotonic() - began_s
    speed = {"seconds": round(took_s, 3), "images_per_s": round(len(tree.files) / took_s, 1)}
    return {**index, "destination": str(destination), **speed}


def check_bad_samples(config: ImageOptions, tree: Tree, bad: Bad) -> None:
    """Raises Failure if there are more bad samples than the options allow."""
    count = len(tree.bad) + len(bad)
    if count == 0 or (config.on_bad_sample == "skip" and count <= config.max_bad_samples):
        return
    name, reason = next(iter(named(tree, bad).items()))
    if config.on_bad_sample == "fail":
        hint = "fix or remove the file, or skip bad samples with --on-bad-sample skip"
        raise Failure(f"{tree.root / name}: {reason}; hint: {hint}", BAD_DATA)
    limit = f"more than --max-bad-samples {config.max_bad_samples}"
    raise Failure(f"{count} bad samples, {limit}; the first is {tree.root / name}: {reason}", BAD_DATA)


def named(tree: Tree, bad: Bad) -> dict[str, str]:
    return tree.bad | {tree.files[row]: reason for row, reason in bad.items()}


def convert_all(config: ImageOptions, tree: Tree, array: Path) -> Bad:
    """Writes all rows. Returns the bad samples among them."""
    head, bad = npy_header(len(tree.files), config.row_shape, config.dtype), Bad()
    with array.open("wb") as file:
        file.write(head)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, len(head) + len(tree.files) * config.row_bytes)
    step = max(1, min(64, CHUNK_BYTES // config.row_bytes))
    chunks = [
        Chunk(
            array=str(array),
            first=first,
            files=[str(tree.root / file) for file in tree.files[first : first + step]],
            shape=config.row_shape,
            dtype=config.dtype,
        )
        for first in range(0, len(tree.files), step)
    ]
    with Progress("preparing", len(tree.files), "images") as progress, workers(config.workers) as spread:
        for chunk, wrong in zip(chunks, spread(convert, chunks), strict=True):
            bad |= wrong
            check_bad_samples(config, tree, bad)
            progress.advance(len(chunk.files), f"{len(bad)} bad" if bad else "")
    return bad


# --- 2. remove bad rows, add labels and index -------------------------------------------------------------------------


def _finish(config: ImagesConfig, tree: Tree, result: Path, bad: Bad) -> dict[str, Any]:
    good = np.setdiff1d(np.arange(len(tree.files)), list(bad))
    empty = set(range(len(tree.classes))) - set(tree.labels[good].tolist())
    if empty:
        raise Failure(f"{tree.root / tree.classes[min(empty)]} contains no usable image; hint: remove it", BAD_DATA)
    order, table = tree.split(good, config.shares)
    drop_bad_rows(result / "samples.npy", config, good[order])
    np.save(result / "labels.npy", tree.labels[good][order])
    return seal(result, {"schema": SCHEMA, **_describe(config, tree, table, bad)}, FILES)


def drop_bad_rows(array: Path, config: ImageOptions, rows: NDArray[np.int64]) -> None:
    """Rewrites the array with only `rows`, in this order; does nothing if no row is bad."""
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
    """Contents of the index. Nothing in it depends on the time or speed of the work."""
    height, width, channels = config.row_shape
    return {
        "made_by": f"hvdtrain {__version__}, Pillow {PIL.__version__}",
        "classes": tree.classes,
        "samples": int(table.sum()),
        "counts": {part: table[:, i].tolist() for i, part in enumerate(PARTS)},
        "split": "the source's" if tree.parts is not None else {"shares": config.split, "seed": config.seed},
        "width": width,
        "height": height,
        "channels": channels,
        "dtype": config.dtype,
        "colour": "luma, ITU-R 601-2 (Pillow's L)" if config.gray else "RGB",
        "resize": "Pillow bilinear",
        "normalisation": "0..255, divide by 255" if config.dtype == "uint8" else "v / 255, in 0..1",
        "source": {"folder": config.source, "files": len(tree.files) + len(tree.bad)},
        "bad_samples": [{"file": name, "reason": reason} for name, reason in named(tree, bad).items()],
    }
