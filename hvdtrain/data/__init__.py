"""Data sets as plain NumPy arrays, equal for every framework.

    dataset = load("digits", (32, 32))                          # bundled, no download
    dataset = load("fish", None)                                # a folder made by `hvdtrain data images`
    loader = Loader(dataset.train, global_batch=512, rank=0, size=4, seed=1)   # hvdtrain.data.loader
    for batch in loader.epoch(0): ...

Image batches are float32 in 0..1, laid out (samples, height, width, channels), with int64 labels. Caption batches hold
images or their features, and tokens; see hvdtrain.captions.dataset.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

SHIPPED = Path(__file__).parent / "files"
"""Folder with the data sets that come with hvdtrain"""
MAX_PIXELS = 89_478_485
"""Limit for an image: Pillow's own for decompression bombs, 256 MiB of RGB"""
SPLIT_SEED = 0
"""Seed of the splits of data sets without a split. It is not the run's seed, so accuracies of runs are comparable."""


class Split(Protocol):
    """One part of a data set: the interface that the loader needs."""

    def __len__(self) -> int:
        """The number of items that batches are made of: images, captions, rows ..."""

    def order(self, stream: np.random.Generator, borders: Sequence[int]) -> NDArray[np.int64]:
        """A permutation of all items for one epoch, a function of `stream` alone.

        order[borders[k] : borders[k + 1]] is the global batch of step k; a loader may divide the last one differently.
        """
        return stream.permutation(len(self))

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        """This rank's `items` of a step whose items over all ranks are `global_items`.

        A model derives the step's random numbers on this rank from `key`, 64 bits; it is None in evaluation.
        """


class Request(NamedTuple):
    """The arguments of `Split.batch`."""

    items: NDArray[np.int64]
    global_items: NDArray[np.int64]
    key: int | None


@dataclass(frozen=True, kw_only=True)
class ImageSplit(Split):
    """Images and their classes."""

    samples: NDArray[Any]
    """(N, height, width, channels); uint8 in 0..255, or float16 or float32 in 0..1. May be a memory map."""
    labels: NDArray[np.int64]
    """(N,), class of each sample."""
    rows: NDArray[np.int64] | None = None
    """Indices of the samples in this split; None: all samples."""
    size: tuple[int, int] | None = None
    """(width, height) to which gray uint8 samples are resized when a batch is made; None: no resizing."""

    def __len__(self) -> int:
        return len(self.labels if self.rows is None else self.rows)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""
        _, height, width, channels = self.samples.shape
        return (height, width, channels) if self.size is None else (*self.size[::-1], channels)

    def labels_only(self) -> ImageSplit:
        """The same items without pixels, for a rank whose pipeline stage does not need them."""
        return dataclasses.replace(self, samples=np.empty((len(self.labels), 0, 0, 0), np.float32), size=None)

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        images = np.empty((len(items), *self.image_shape), np.float32)
        rows = items if self.rows is None else self.rows[items]
        (gather if self.size is None else _resize)(self.samples, rows, images)
        return Batch(arrays=(images, self.labels[rows]), weight=len(items), total_weight=len(global_items))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set split into three disjoint parts."""

    name: str
    classes: tuple[str, ...]
    """Class names; a label is an index into them."""
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit
    fingerprint: str
    """SHA-256 that changes if a sample, a label, a class name or the split changes."""

    def labels_only(self) -> Dataset:
        """See `ImageSplit.labels_only`."""
        splits = {name: getattr(self, name).labels_only() for name in ("train", "validation", "test")}
        return dataclasses.replace(self, **splits)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""
        return self.train.image_shape


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's batch of a step."""

    arrays: tuple[NDArray[Any], ...]
    """Arguments of the model's loss. For images: float32 (n, height, width, channels) in 0..1, and int64 labels (n,).
    For captions see `hvdtrain.captions.dataset`."""
    weight: int
    """This rank's samples in this step: n images, or the number of tokens to predict."""
    total_weight: int
    """All ranks' samples in this step. Losses summed over all ranks and divided by it are the exact mean."""
    parts: tuple[Batch, ...] = ()
    """Micro-batches, which hold the arrays instead of this batch; empty if the batch is not split."""


def halves(key: int | None) -> NDArray[np.int64]:
    """A step's 64-bit key as two 32-bit halves, int64 (2,); zeros without a key. Models seed their random numbers with
    it."""
    return np.array([0, 0] if key is None else divmod(key, 2**32), np.int64)


def load(name: str, image_size: tuple[int, int] | None = None) -> Dataset:
    """The data set with this name: 'digits', 'fashion-mnist', 'idx:DIR' (see `idx`), or the path of a folder made by
    `hvdtrain data images`.

    `image_size` is (width, height) in pixels; None means 32x32 for the digits, and otherwise the images' own size.
    Raises Failure: BAD_DATA for an unusable folder, BAD_CONFIG if a folder has images of another size.
    """
    from hvdtrain.data import digits, idx
    from hvdtrain.data.prepared import open_images

    if name == "digits":
        return digits.load(image_size or digits.DEFAULT_SIZE)
    if name == "fashion-mnist" or name.startswith("idx:"):
        return idx.load(name, image_size)
    if not Path(name).is_dir():
        known = "'digits', 'fashion-mnist', 'idx:DIR' or a folder made by `hvdtrain data images`"
        raise Failure(f"unknown data set '{name}'; hint: give {known}", BAD_DATA)
    dataset = open_images(name)
    height, width, _ = dataset.image_shape
    if image_size not in (None, (width, height)):
        asked = "{}x{}".format(*image_size)
        raise Failure(
            f"{name} contains images of {width}x{height}, not {asked} (--image-size, --config or HVDTRAIN_IMAGE_SIZE); "
            f"hint: use --image-size {width}x{height}, or prepare them again with "
            f"`hvdtrain data images SOURCE {name}-{asked} --size {asked}`",
            BAD_CONFIG,
        )
    return dataset


def packaged(package: str, file: str) -> Path | None:
    """Path of a file in an installed package, without importing the package; None if it does not exist."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    return next((path for folder in folders if (path := Path(folder, file)).is_file()), None)


def drawn_lots(count: int) -> NDArray[np.uint64]:
    """Random numbers for `stratify`, one per sample; a function of SPLIT_SEED."""
    return np.random.Generator(np.random.PCG64(SPLIT_SEED)).integers(2**63, size=count, dtype=np.uint64)


def apportion(counts: Sequence[int], shares: Sequence[Fraction]) -> NDArray[np.int64]:
    """Splits each class: how many of its `counts[c]` samples go to each part, as (classes, parts).

    `shares` are fractions with the sum 1. Rounding errors of one class are compensated in the next ones. A part's total
    is therefore less than two samples away from its share, and exact if the share is a whole number: 2 % of 50 classes
    with 10 samples each are 10 samples, not 0.
    """
    scale = math.lcm(*(share.denominator for share in shares))
    owed = [0] * len(shares)  # in units of 1/scale samples, exact
    table = np.zeros((len(counts), len(shares)), np.int64)
    for row, count in zip(table, counts, strict=True):
        owed = [debt + count * int(share * scale) for debt, share in zip(owed, shares, strict=True)]
        # Assign most samples at once, then the last few one by one to the part that is owed most.
        row[:] = [max(0, debt // scale - len(shares)) for debt in owed]
        owed = [debt - int(assigned) * scale for debt, assigned in zip(owed, row, strict=True)]
        for _ in range(count - int(row.sum())):
            part = owed.index(max(owed))
            row[part] += 1
            owed[part] -= scale
    return table


def stratify(
    labels: NDArray[np.int64], lots: NDArray[np.uint64], classes: int, shares: Sequence[Fraction]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Splits the samples of each class into parts by their random numbers `lots`; returns (order, table).

    `order` lists the samples part by part, sorted by lot within a part, so that classes are mixed. `table` is the
    result of `apportion`, (classes, parts). Lots belong to samples: removing a sample moves others only between
    neighbouring parts.
    """
    table = apportion(np.bincount(labels, minlength=classes).tolist(), shares)
    by_class = np.lexsort((lots, labels))
    part = np.concatenate([np.repeat(np.arange(len(shares)), row) for row in table])
    return by_class[np.lexsort((lots[by_class], part))], table


def cut(samples: NDArray[Any], labels: NDArray[np.int64], table: NDArray[np.int64]) -> dict[str, ImageSplit]:
    """Train, validation and test split as views of arrays that are in the order of `stratify`."""
    first, second = table.sum(axis=0).cumsum()[:2]
    parts = {"train": slice(None, first), "validation": slice(first, second), "test": slice(second, None)}
    return {name: ImageSplit(samples=samples[part], labels=labels[part]) for name, part in parts.items()}


def _resize(samples: NDArray[np.uint8], indices: NDArray[np.int64], images: NDArray[np.float32]) -> None:
    """Like `gather`, with Pillow's bilinear filter."""
    from PIL import Image

    for image, index in zip(images[..., 0], indices, strict=True):
        resized = Image.fromarray(samples[index, ..., 0]).resize(image.shape[::-1], Image.Resampling.BILINEAR)
        np.multiply(np.asarray(resized), np.float32(1 / 255), out=image)


def gather(samples: NDArray[Any], indices: NDArray[np.int64], images: NDArray[np.float32]) -> None:
    """Copies and converts sample by sample, which stays in the processor's cache and needs no second array."""
    if samples.dtype == np.uint8:
        for image, index in zip(images, indices, strict=True):
            np.multiply(samples[index], np.float32(1 / 255), out=image)
    elif samples.dtype == np.float16:
        # Shift the bits and change the exponent's bias from 15 to 127. This is exact for 0..1, and 2.5 times as fast as
        # NumPy's conversion.
        halves, bits = samples.view(np.uint16), images.view(np.uint32)
        for image, word, index in zip(images, bits, indices, strict=True):
            word[...] = halves[index]
            word <<= 13
            image *= np.float32(2.0**112)
    else:
        for image, index in zip(images, indices, strict=True):
            image[...] = samples[index]
