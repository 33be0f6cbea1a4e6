"""Images in IDX files, the format of MNIST and its successors: `--data fashion-mnist`, or `--data idx:DIR`.

DIR contains train-images-idx3-ubyte, train-labels-idx1-ubyte and the corresponding t10k files, with or without .gz. The
t10k images are the test part. 10 % of each class of the others are for validation; the split is fixed. All images stay
in memory as bytes, and another --image-size is made batch by batch.

Fashion-MNIST: 60,000 + 10,000 gray images of 28x28 in 10 classes (Xiao, Rasul, Vollgraf, arXiv:1708.07747; MIT).
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import math
import zlib
from fractions import Fraction
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import SPLIT_SEED, Dataset, ImageSplit, drawn_lots, listed, stratify
from hvdtrain.system import files
from hvdtrain.system.exits import BAD_DATA, Failure

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist"""
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SHARES = (Fraction(90, 100), Fraction(10, 100))
MOST_BYTES = 4 << 30


def load(name: str, image_size: tuple[int, int] | None = None) -> Dataset:
    """'fashion-mnist' or 'idx:DIR', resized to `image_size` (width, height) if given. Raises Failure (BAD_DATA;
    NO_PERMISSION) with the file's name."""
    fashion = name == "fashion-mnist"
    folder = FASHION if fashion else Path(name.removeprefix("idx:"))
    if not folder.is_dir():
        hint = listed.how_to_get(name) if fashion else "give a folder with four files in the format of MNIST"
        raise Failure(f"{name}: {folder} is not a folder; hint: {hint}", BAD_DATA)
    (images, labels), (test_images, test_labels) = _part(folder, "train"), _part(folder, "t10k")
    if images.shape[1:] != test_images.shape[1:]:
        message = "training images of {}x{}, but test images of {}x{}".format(
            *images.shape[2:0:-1], *test_images.shape[2:0:-1]
        )
        raise Failure(f"{folder}: {message}", BAD_DATA)
    count = int(max(labels.max(), test_labels.max())) + 1
    order, table = stratify(labels, drawn_lots(len(labels)), count, SHARES)
    digest = hashlib.sha256(str((image_size, SHARES, SPLIT_SEED)).encode())
    for array in (images, labels, test_images, test_labels):
        digest.update(array.data)
    size = None if image_size == images.shape[2:0:-1] else image_size
    border = int(table[:, 0].sum())
    return Dataset(
        name=name if fashion else folder.name,
        classes=CLASSES if fashion else tuple(map(str, range(count))),
        train=ImageSplit(samples=images, labels=labels, rows=order[:border], size=size),
        validation=ImageSplit(samples=images, labels=labels, rows=order[border:], size=size),
        test=ImageSplit(samples=test_images, labels=test_labels, size=size),
        fingerprint=digest.hexdigest(),
    )


def _part(folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, height, width, 1) and their classes (n,)."""
    images = read(_found(folder / f"{part}-images-idx3-ubyte"), 3)
    labels = read(_found(folder / f"{part}-labels-idx1-ubyte"), 1)
    if len(images) != len(labels) or not images.size:
        message = f"{len(images)} images and {len(labels)} labels for {part}"
        raise Failure(f"{folder}: {message}; hint: their numbers must be equal and positive", BAD_DATA)
    return images[..., np.newaxis], labels.astype(np.int64)


def _found(path: Path) -> Path:
    compressed = path.with_name(f"{path.name}.gz")
    if not path.exists() and not compressed.exists():
        raise Failure(f"{path} and {path}.gz do not exist; hint: give four files in the format of MNIST", BAD_DATA)
    return path if path.exists() else compressed


def read(path: Path, axes: int) -> NDArray[np.uint8]:
    """The bytes of an IDX file with this number of axes. Raises Failure (65, 77) with the file's name."""
    with contextlib.ExitStack() as stack:
        try:
            file: IO[bytes] = stack.enter_context(files.open_plain(path))
            if path.suffix == ".gz":
                file = cast(IO[bytes], stack.enter_context(gzip.open(file)))
            head = file.read(4 * (1 + axes))
            numbers = np.frombuffer(head[: len(head) // 4 * 4], ">u4").tolist()
            if len(numbers) <= axes or numbers[0] != 0x800 + axes:
                message = f"not an IDX file of bytes with {axes} axes (first bytes: {head[:4].hex() or 'none'})"
                raise Failure(f"{path}: {message}", BAD_DATA)
            shape = tuple(numbers[1:])
            size = math.prod(shape)
            if size > MOST_BYTES:
                raise Failure(f"{path}: {size:,} bytes of data exceed the limit of {MOST_BYTES >> 30} GiB", BAD_DATA)
            data = file.read(size)
            if len(data) < size or file.read(1):
                what = "shorter" if len(data) < size else "longer"
                raise Failure(f"{path} is {what} than the {size:,} bytes in its header; hint: copy it again", BAD_DATA)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Failure(f"{path} is damaged or truncated ({error}); hint: copy it again", BAD_DATA) from None
        except OSError as error:
            raise files.refused(path, error, BAD_DATA, "copy it again") from None
    return np.frombuffer(data, np.uint8).reshape(shape)
