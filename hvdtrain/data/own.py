"""Data that a script brings, as splits: arrays, a map-style PyTorch `Dataset`, or a finite `tf.data.Dataset`.

Every rank is given the whole of it in the same order; the loader shares it out. Of what a sample consists (in tuples,
however nested) the last part is its target. A `tf.data.Dataset` is read into memory once, because only arrays can be
taken in any order; a `Dataset` is asked for its samples by the loader's thread, while the step computes.
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
"""Of an array, for the fingerprint: of a longer one evenly spaced rows"""
KINDS = "arrays as (inputs, targets), a torch Dataset with len() and [], or a finite tf.data.Dataset"


class OwnSplit(Split):
    """See `Split`. A batch's arrays are the inputs, the targets and the step's key (see `data.halves`): float64 becomes
    float32, and whole numbers as targets become int64, which is what frameworks train on."""

    @abc.abstractmethod
    def rows(self, mine: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Each part of these samples, as one array."""

    @abc.abstractmethod
    def told(self) -> Iterator[bytes]:
        """What makes its fingerprint."""

    def batch(self, mine: NDArray[np.int64], everyones: NDArray[np.int64], key: int | None) -> Batch:
        *inputs, targets = [_float32(array) for array in self.rows(mine)]
        targets = targets.astype(np.int64, copy=False) if targets.dtype.kind in "iu" else targets
        return Batch(arrays=(*inputs, targets, halves(key)), weight=len(mine), total_weight=len(everyones))


class Arrays(OwnSplit):
    """Inputs and targets, whose first axis is the sample's."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays[-1]) if self._arrays else 0  # an empty tf.data.Dataset has no parts

    def rows(self, mine: NDArray[np.int64]) -> list[NDArray[Any]]:
        return [array[mine] for array in self._arrays]

    def told(self) -> Iterator[bytes]:
        for array in self._arrays:
            yield f"{array.shape} {array.dtype}".encode()
            yield np.ascontiguousarray(array[:: 1 + array.nbytes // HASHED_BYTES]).tobytes()


class Items(OwnSplit):
    """A map-style Dataset: samples are asked for one by one, or together if it has `__getitems__`."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def rows(self, mine: NDArray[np.int64]) -> list[NDArray[Any]]:
        together = getattr(self._items, "__getitems__", None)
        found = together(mine.tolist()) if together else [self._items[each] for each in mine.tolist()]
        return _stacked(map(parts, found))

    def told(self) -> Iterator[bytes]:
        """Its samples are not read for that, since they may be drawn anew each time."""
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
        """SHA-256 of all parts, or of what tells them apart where reading them would take long."""
        digest = hashlib.sha256()
        for split in (self.train, self.validation, self.test):
            for told in split.told():
                digest.update(told)
        return digest.hexdigest()


def opened(train: Any, validation: Any, test: Any) -> Own:
    """The three parts, of which validation and test may be None. Raises Failure (65) for data that is no such."""
    made = Own(train=_split("train", train), validation=_split("validation", validation), test=_split("test", test))
    known = sample(made.train, "train")
    for name, split in {"validation": made.validation, "test": made.test}.items():
        if len(split) and (other := sample(split, name)) != known:
            raise Failure(f"{name}= has samples of {other}, and train= of {known}: give the same", BAD_DATA)
    return made


def sample(split: Split, name: str) -> str:
    """Shapes and types of a sample's inputs and target, for people. Raises Failure (65) if it has none."""
    if not len(split):
        raise Failure(f"{name}= holds no sample: give it some", BAD_DATA)
    first = np.zeros(1, np.int64)
    *arrays, _ = split.batch(first, first, None).arrays
    if len(arrays) < 2:
        raise Failure(f"a sample of {name}= has one part: give its inputs and its target, (x, y)", BAD_DATA)
    if arrays[-1].dtype.kind not in "biuf":
        raise Failure(f"{name}= has targets of {arrays[-1].dtype}: give numbers, classes from 0 on", BAD_DATA)
    return ", ".join(f"{array.dtype} {'x'.join(map(str, array.shape[1:])) or 'number'}" for array in arrays)


def parts(sample: Any) -> list[Any]:
    """A sample's inputs and its target: `((a, b), y)` and `(a, b, y)` are the same. Raises Failure (65) for names."""
    if isinstance(sample, dict):
        raise Failure(f"a sample has the parts {', '.join(map(str, sample))} by name: give them as a tuple", BAD_DATA)
    if isinstance(sample, tuple | list):
        return [part for each in sample for part in (parts(each) if isinstance(each, tuple | dict) else [each])]
    return [sample]


def _split(name: str, given: Any) -> OwnSplit:
    if given is None:
        return Arrays([np.empty(0), np.empty(0)])
    kinds = [each.__name__ for each in type(given).__mro__]
    try:
        if hasattr(given, "element_spec"):
            return Arrays(_read(given))
        if isinstance(given, tuple | list | dict):
            arrays = [np.asarray(each) for each in parts(given)]
        elif "IterableDataset" in kinds or not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
            raise ValueError("which cannot be shared out between ranks")
        elif hasattr(given, "shape"):
            raise ValueError("which has inputs or targets only")
        else:
            return Items(given)
        if len({len(array) for array in arrays}) > 1:
            lengths = ", ".join(str(len(array)) for array in arrays)
            raise Failure(f"{name}= holds arrays of {lengths} samples: give as many targets as inputs", BAD_DATA)
        if any(array.dtype == object for array in arrays):
            raise ValueError("with rows of unequal shape, or other values than numbers")
    except (ValueError, TypeError) as error:
        hint = "its dataset=" if "DataLoader" in kinds else KINDS
        raise Failure(f"{name}= is a {kinds[0]} {error}: give {hint}", BAD_DATA) from error
    return Arrays(arrays)


def _read(dataset: Any) -> list[NDArray[Any]]:
    """All of a tf.data.Dataset. Its elements are taken for batches where all their parts have a first axis of unknown
    length. Raises ValueError if it never ends, or its elements have unequal shapes."""
    if int(dataset.cardinality()) == -1:
        raise ValueError("without an end")
    batched = all(spec.shape.rank and spec.shape[0] is None for spec in parts(dataset.element_spec))
    found = map(parts, dataset.as_numpy_iterator())
    return [np.concatenate(column) for column in zip(*found, strict=True)] if batched else _stacked(found)


def _stacked(samples: Iterator[list[Any]]) -> list[NDArray[Any]]:
    return [np.stack([np.asarray(each) for each in column]) for column in zip(*samples, strict=True)]


def _float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float64 else array
