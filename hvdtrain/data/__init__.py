"""Data sets as plain NumPy arrays, the same for every framework.

    dataset = load("digits", (32, 32))                          # bundled, no download
    dataset = load("fish", None)                                # a folder made by `hvdtrain data images`
    loader = Loader(dataset.train, global_batch=512, rank=0, size=4, seed=1)   # hvdtrain.data.loader
    for batch in loader.epoch(0): ...

A batch of images holds them as float32 in 0..1, laid out (samples, height, width, channels), and labels as int64; one
of captions (hvdtrain.captions.dataset) holds what the model sees of their pictures, and tokens.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

MAX_PIXELS = 89_478_485
"""Of a picture: Pillow's own bound for a decompression bomb, 256 MiB of RGB"""
SPLIT_SEED = 0
"""Of how data sets without parts of their own are cut: no seed of a run changes it, so accuracies of runs compare"""


class Split(Protocol):
    """One part of a data set, as a loader needs it."""

    def __len__(self) -> int:
        """Items that batches are made of: images, or captions."""

    def order(self, stream: np.random.Generator, borders: Sequence[int]) -> NDArray[np.int64]:
        """A permutation of all items for one epoch, drawn from `stream` alone; order[borders[k] : borders[k + 1]] is
        the global batch of step k (the last of which a loader may cut in another way)."""
        return stream.permutation(len(self))

    def batch(self, mine: NDArray[np.int64], everyones: NDArray[np.int64], key: int | None) -> Batch:
        """The items `mine` of a step whose items on all ranks are `everyones`. From `key`, 64 bits, a model draws what
        is random in this rank's step; None in evaluation."""


@dataclass(frozen=True, kw_only=True)
class ImageSplit(Split):
    """Images and their classes; see `Split`."""

    samples: NDArray[Any]
    """(N, height, width, channels); uint8 in 0..255, or float16 or float32 in 0..1. May be a memory map."""
    labels: NDArray[np.int64]
    """(N,), the index of each sample's class."""
    rows: NDArray[np.int64] | None = None
    """Those of the samples that are in this part; None: all."""
    size: tuple[int, int] | None = None
    """(width, height) that gray uint8 samples are resized to when a batch is made; None: they are as they should be."""

    def __len__(self) -> int:
        return len(self.labels if self.rows is None else self.rows)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels) of every image."""
        _, height, width, channels = self.samples.shape
        return (height, width, channels) if self.size is None else (*self.size[::-1], channels)

    def labels_only(self) -> ImageSplit:
        """The same items without pixels, for a rank whose part of the model does not see them."""
        return dataclasses.replace(self, samples=np.empty((len(self.labels), 0, 0, 0), np.float32), size=None)

    def batch(self, mine: NDArray[np.int64], everyones: NDArray[np.int64], key: int | None) -> Batch:
        images = np.empty((len(mine), *self.image_shape), np.float32)
        rows = mine if self.rows is None else self.rows[mine]
        (gather if self.size is None else _resize)(self.samples, rows, images)
        return Batch(arrays=(images, self.labels[rows]), weight=len(mine), total_weight=len(everyones))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set cut into its three parts; each sample is in exactly one."""

    name: str
    classes: tuple[str, ...]
    """Class names; a label is an index into them."""
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit
    fingerprint: str
    """SHA-256 that changes whenever a sample, a label, a class name or the cut does."""

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
    """What one rank works on in one step."""

    arrays: tuple[NDArray[Any], ...]
    """What the model's loss is called with. Of images: float32 (n, height, width, channels) in 0..1, and labels, int64
    (n,); of captions see `hvdtrain.captions.dataset`."""
    weight: int
    """Samples of this rank in this step: images (n), or tokens to be predicted."""
    total_weight: int
    """Samples of all ranks in this step: a sum of losses divided by it, summed over ranks, is the exact mean."""
    parts: tuple[Batch, ...] = ()
    """The micro-batches that this batch is cut into, which then hold its arrays; empty: it is whole."""


def halves(key: int | None) -> NDArray[np.int64]:
    """A step's 64-bit key as two halves of 32 bits, int64 (2,), zeros without a key: what a model draws from."""
    return np.array([0, 0] if key is None else divmod(key, 2**32), np.int64)


def load(name: str, image_size: tuple[int, int] | None = None, *, verify: bool = False) -> Dataset:
    """The data set called `name`: 'digits', 'fashion-mnist', 'idx:DIR' (see `idx`), or the path of a folder made by
    `hvdtrain data images`.

    `image_size` is (width, height) in pixels; None means 32x32 for digits and otherwise the size that pictures have.
    `verify` reads a folder's large array too, though this host has done so before, and compares its SHA-256.
    Raises Failure: BAD_DATA for a folder that is missing, foreign or damaged, BAD_CONFIG for a size it does not have.
    """
    if name == "digits":
        from hvdtrain.data import digits

        return digits.load(image_size or digits.DEFAULT_SIZE)

    if name == "fashion-mnist" or name.startswith("idx:"):
        from hvdtrain.data import idx

        return idx.load(name, image_size)

    from hvdtrain.data.prepared import open_images

    if not Path(name).is_dir():
        known = "'digits', 'fashion-mnist', 'idx:DIR' or a folder made by `hvdtrain data images`"
        raise Failure(f"no data set '{name}': name {known}", BAD_DATA)
    dataset = open_images(name, verify=verify)
    height, width, _ = dataset.image_shape
    if image_size not in (None, (width, height)):
        asked = "{}x{}".format(*image_size)
        raise Failure(
            f"{name} holds images of {width}x{height}, and {asked} is asked for (--image-size, a --config file, or "
            f"HVDTRAIN_IMAGE_SIZE): add --image-size {width}x{height} to train on them as they are, or prepare them "
            f"anew with `hvdtrain data images PICTURES {name}-{asked} --size {asked}`",
            BAD_CONFIG,
        )
    return dataset


def packaged(package: str, file: str) -> Path | None:
    """A file of an installed package, which is not imported; None if it is not there."""
    spec = importlib.util.find_spec(package)
    places = (spec and spec.submodule_search_locations) or []
    return next((path for place in places if (path := Path(place, file)).is_file()), None)


def drawn_lots(count: int) -> NDArray[np.uint64]:
    """The lots of so many samples in `stratify`, by SPLIT_SEED."""
    return np.random.Generator(np.random.PCG64(SPLIT_SEED)).integers(2**63, size=count, dtype=np.uint64)


def apportion(counts: Sequence[int], shares: Sequence[Fraction]) -> NDArray[np.int64]:
    """Cuts each class into parts: how many of its `counts[c]` samples go to each part, as (classes, parts).

    `shares` are fractions that sum to 1. What rounding owes a part in one class it gets back in the next ones, so that
    a part's total is never two or more away from its share of all samples, and is exact where that share is whole:
    2 % of 50 classes with 10 samples each are 10 samples, not 0.
    """
    scale = math.lcm(*(share.denominator for share in shares))
    owed = [0] * len(shares)  # in 1/scale of a sample, exact
    table = np.zeros((len(counts), len(shares)), np.int64)
    for row, count in zip(table, counts, strict=True):
        owed = [debt + count * int(share * scale) for debt, share in zip(owed, shares, strict=True)]
        # Most of the samples at once, the last few one by one to the part that is owed most.
        row[:] = [max(0, debt // scale - len(shares)) for debt in owed]
        owed = [debt - int(given) * scale for debt, given in zip(owed, row, strict=True)]
        for _ in range(count - int(row.sum())):
            part = owed.index(max(owed))
            row[part] += 1
            owed[part] -= scale
    return table


def stratify(
    labels: NDArray[np.int64], lots: NDArray[np.uint64], classes: int, shares: Sequence[Fraction]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cuts samples into parts, class by class, by the lots they drew; returns (order, table).

    `order` lists the samples part after part, and within a part by lot, so classes are mixed there;
    `table` is `apportion`'s, (classes, parts). Each sample's lot is its own, so a sample that is taken out moves no
    others except across the borders of parts.
    """
    table = apportion(np.bincount(labels, minlength=classes).tolist(), shares)
    by_class = np.lexsort((lots, labels))
    part = np.concatenate([np.repeat(np.arange(len(shares)), row) for row in table])
    return by_class[np.lexsort((lots[by_class], part))], table


def cut(samples: NDArray[Any], labels: NDArray[np.int64], table: NDArray[np.int64]) -> dict[str, ImageSplit]:
    """Train, validation and test as views of arrays that are already in `stratify`'s order."""
    first, second = table.sum(axis=0).cumsum()[:2]
    parts = {"train": slice(None, first), "validation": slice(first, second), "test": slice(second, None)}
    return {name: ImageSplit(samples=samples[part], labels=labels[part]) for name, part in parts.items()}


def _resize(samples: NDArray[np.uint8], indices: NDArray[np.int64], images: NDArray[np.float32]) -> None:
    """As `gather`, by Pillow's bilinear filter."""
    from PIL import Image

    for image, index in zip(images[..., 0], indices, strict=True):
        resized = Image.fromarray(samples[index, ..., 0]).resize(image.shape[::-1], Image.Resampling.BILINEAR)
        np.multiply(np.asarray(resized), np.float32(1 / 255), out=image)


def gather(samples: NDArray[Any], indices: NDArray[np.int64], images: NDArray[np.float32]) -> None:
    """Copies and converts sample by sample, which stays in the cache and needs no second array."""
    if samples.dtype == np.uint8:
        for image, index in zip(images, indices, strict=True):
            np.multiply(samples[index], np.float32(1 / 255), out=image)
    elif samples.dtype == np.float16:
        # A half that is not negative becomes a float by a shift of its bits and a change of the exponent's bias
        # (15 to 127): exact for 0..1, and 2.5 times as fast as NumPy's conversion.
        halves, bits = samples.view(np.uint16), images.view(np.uint32)
        for image, word, index in zip(images, bits, indices, strict=True):
            word[...] = halves[index]
            word <<= 13
            image *= np.float32(2.0**112)
    else:
        for image, index in zip(images, indices, strict=True):
            image[...] = samples[index]
