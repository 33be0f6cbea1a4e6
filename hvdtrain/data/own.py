"""Data sets of users' scripts: arrays, a map-style PyTorch `Dataset`, or a finite `tf.data.Dataset`.

Every rank receives the whole data set in the same order, and the loader shards it. A sample is a tuple, possibly
nested, and its last part is the target. A `tf.data.Dataset` is read into memory once, for random access.
"""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Batch, Split, halves
from hvdtrain.system.exits import BAD_DATA, Failure

HASHED_BYTES = 256 << 20
"""Bytes of an array that enter the fingerprint; a longer array contributes evenly spaced rows"""
KINDS = "arrays as (inputs, targets), a torch Dataset with len() and [], or a finite tf.data.Dataset"


class OwnSplit(Split):
    """A batch's arrays are the inputs, the targets and the step's key (see `data.halves`). float64 becomes float32 and
    integer targets become int64, the types that frameworks train with."""

    @abc.abstractmethod
    def rows(self, items: NDArray[np.int64]) -> list[NDArray[Any]]:
        """One array for each part of these samples."""

    @abc.abstractmethod
    def content(self) -> Iterator[bytes]:
        """Bytes that identify the data, for the fingerprint."""

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        *inputs, targets = [_float32(array) for array in self.rows(items)]
        targets = targets.astype(np.int64, copy=False) if targets.dtype.kind in "iu" else targets
        return Batch(arrays=(*inputs, targets, halves(key)), weight=len(items), total_weight=len(global_items))


class Arrays(OwnSplit):
    """Inputs and targets as arrays whose first axis counts samples."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[-1]) if self._arrays else 0  # an empty tf.data.Dataset has no parts

    def rows(self, items: NDArray[np.int64]) -> list[NDArray[Any]]:
        return [array[items] for array in self._arrays]

    def content(self) -> Iterator[bytes]:
        for array in self._arrays:
            yield f"{array.shape} {array.dtype}".encode()
            yield np.ascontiguousarray(array[:: 1 + array.nbytes // HASHED_BYTES]).tobytes()


class Items(OwnSplit):
    """A map-style Dataset, read sample by sample, or in batches if it has `__getitems__`."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, items: NDArray[np.int64]) -> list[NDArray[Any]]:
        get_many = getattr(self._items, "__getitems__", None)
        samples = get_many(items.tolist()) if get_many else [self._items[item] for item in items.tolist()]
        return _stacked(map(parts, samples))

    def content(self) -> Iterator[bytes]:
        """Only the type and the length, since samples may be random."""
        yield f"{type(self._items).__qualname__} {len(self)}".encode()


@dataclass(frozen=True, kw_only=True)
class Own:
    """A script's data."""

    train: OwnSplit
    validation: OwnSplit
    test: OwnSplit
    name = "own"

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the contents of all splits (see `OwnSplit.content`)."""
        digest = hashlib.sha256()
        for split in (self.train, self.validation, self.test):
            for content in split.content():
                digest.update(content)
        return digest.hexdigest()


def opened(train: Any, validation: Any, test: Any) -> Own:
    """The three splits; validation and test may be None. Raises Failure (65) for unsupported or inconsistent data."""
    data = Own(train=_split("train", train), validation=_split("validation", validation), test=_split("test", test))
    expected = sample(data.train, "train")
    for name, split in {"validation": data.validation, "test": data.test}.items():
        if len(split) and (other := sample(split, name)) != expected:
            message = f"{name}= has samples of {other}, but train= of {expected}"
            raise Failure(f"{message}; hint: give both the same shapes and types", BAD_DATA)
    return data


def sample(split: Split, name: str) -> str:
    """Shapes and types of a sample's inputs and target, for people. Raises Failure (65) if the split has no samples."""
    if not len(split):
        raise Failure(f"{name}= has no samples", BAD_DATA)
    first = np.zeros(1, np.int64)
    *arrays, _ = split.batch(first, first, None).arrays
    if len(arrays) < 2:
        raise Failure(f"a sample of {name}= has only one part; hint: give inputs and target, (x, y)", BAD_DATA)
    if arrays[-1].dtype.kind not in "biuf":
        message = f"{name}= has targets of {arrays[-1].dtype}"
        raise Failure(f"{message}; hint: give numbers; classes count from 0", BAD_DATA)
    return ", ".join(f"{array.dtype} {'x'.join(map(str, array.shape[1:])) or 'number'}" for array in arrays)


def parts(sample: Any) -> list[Any]:
    """A sample's inputs and its target: `((a, b), y)` and `(a, b, y)` are the same. Raises Failure (65) for a dict."""
    if isinstance(sample, dict):
        message = f"a sample is a dict with the keys {', '.join(map(str, sample))}"
        raise Failure(f"{message}; hint: give the parts as a tuple", BAD_DATA)
    if isinstance(sample, tuple | list):
        return [part for item in sample for part in (parts(item) if isinstance(item, tuple | dict) else [item])]
    return [sample]


def _split(name: str, given: Any) -> OwnSplit:
    if given is None:
        return Arrays([np.empty(0), np.empty(0)])
    kinds = [kind.__name__ for kind in type(given).__mro__]
    try:
        if hasattr(given, "element_spec"):
            return Arrays(_read(given))
        if isinstance(given, tuple | list | dict):
            arrays = [np.asarray(part) for part in parts(given)]
        elif "IterableDataset" in kinds or not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
            raise ValueError("that has no random access and cannot be sharded")
        elif hasattr(given, "shape"):
            raise ValueError("with inputs or targets only")
        else:
            return Items(given)
        if len({len(array) for array in arrays}) > 1:
            lengths = ", ".join(str(len(array)) for array in arrays)
            raise Failure(f"{name}= holds arrays of {lengths} samples; hint: give as many targets as inputs", BAD_DATA)
        if any(array.dtype == object for array in arrays):
            raise ValueError("with rows of unequal shape or values that are not numbers")
    except (ValueError, TypeError) as error:
        hint = "its dataset=" if "DataLoader" in kinds else KINDS
        raise Failure(f"{name}= is a {kinds[0]} {error}; hint: give {hint}", BAD_DATA) from error
    return Arrays(arrays)


def _read(dataset: Any) -> list[NDArray[Any]]:
    """All elements of a tf.data.Dataset, as arrays. Elements are batches if all their parts have a first axis of
    unknown length. Raises ValueError if the data set is infinite or its elements differ in shape."""
    if int(dataset.cardinality()) == -1:
        raise ValueError("that never ends")
    batched = all(spec.shape.rank and spec.shape[0] is None for spec in parts(dataset.element_spec))
    elements = map(parts, dataset.as_numpy_iterator())
    return [np.concatenate(column) for column in zip(*elements, strict=True)] if batched else _stacked(elements)


def _stacked(samples: Iterator[list[Any]]) -> list[NDArray[Any]]:
    return [np.stack([np.asarray(part) for part in column]) for column in zip(*samples, strict=True)]


def _float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float64 else array
