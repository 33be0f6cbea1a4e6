"""Convert images to rows of an array, on all cores. `hvdtrain.data.images` describes the conversion."""

from __future__ import annotations

import io
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from hvdtrain.data import MAX_PIXELS
from hvdtrain.system import cgroup

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")  # never PostScript, which Pillow passes to Ghostscript

Bad = dict[int, str]  # row -> reason why its file is unusable


def pixels(path: str, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """The image at `path` as uint8 (height, width, channels = 1 or 3). Raises any exception for an unusable file."""
    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    with Image.open(path, formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels exceed {MAX_PIXELS:,}: a decompression bomb?")
        if min(image.size) < 2:
            raise ValueError(f"{image.width}x{image.height} pixels are too small for an image")
        ImageOps.exif_transpose(image, in_place=True)
        small = _eight_bit(image, mode).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(small).reshape(shape)


def scaled(images: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Images as a model sees them, float32 in 0..1, if its data set stored pixels as this type."""
    if dtype == "uint8":  # scaled batch by batch
        return images * np.float32(1 / 255)
    return (images / 255).astype(dtype).astype(np.float32)


def _eight_bit(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255.
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("32 bits per pixel, whose white level is undefined")
    elif image.mode == "CMYK":
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows, the next task of one worker."""

    array: str
    first: int
    files: list[str]
    shape: tuple[int, int, int]
    dtype: str


def convert(chunk: Chunk) -> Bad:
    """Fills the chunk's rows in the array file; a bad row stays zero."""
    values = np.arange(256)
    table = values.astype(np.uint8) if chunk.dtype == "uint8" else (values / 255).astype(chunk.dtype)
    rows = np.zeros((len(chunk.files), *chunk.shape), chunk.dtype)
    bad: Bad = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about metadata, and about bombs, which `pixels` rejects
        for number, file in enumerate(chunk.files):
            try:
                rows[number] = table[pixels(file, chunk.shape)]
            except Exception as error:  # Pillow raises almost any exception for a damaged file
                bad[chunk.first + number] = reason(error, file)
    start = len(npy_header(0, chunk.shape, chunk.dtype)) + chunk.first * rows[:1].nbytes
    with open(chunk.array, "r+b", buffering=0) as array:  # noqa: PTH123  (a plain string is cheaper to send)
        array.seek(start)
        left = rows.data.cast("B")
        while left:
            left = left[array.write(left) :]
    return bad


def reason(error: Exception, file: str) -> str:
    """One line that says why `file` is unusable."""
    if isinstance(error, UnidentifiedImageError):
        return "empty file" if Path(file).stat().st_size == 0 else "not a JPEG, PNG, GIF, BMP, TIFF or WebP image"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())[:200]


def npy_header(rows: int, shape: tuple[int, ...], dtype: str) -> bytes:
    """The header of an .npy file. NumPy pads it to the same length for any number of rows."""
    head = io.BytesIO()
    description = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (rows, *shape)}
    np.lib.format.write_array_header_1_0(head, description)
    return head.getvalue()


@contextmanager
def workers(count: int) -> Iterator[Callable[[Callable[[Chunk], Bad], Iterable[Chunk]], Iterator[Bad]]]:
    """A `map` over `count` processes (0: one per core, 1: this one) with ordered results; leaving cancels the rest."""
    count = count or max(1, int(cgroup.process_cores()))
    if count == 1:
        yield map
        return
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ignores Ctrl-C, which the parent handles, and ends the worker if its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
