"""Splits of users' scripts: arrays and map-style data sets, whose samples can be read in any order.

A sample is a tuple, possibly nested, whose last part is the target; or a tuple of a dict of inputs and the target; or a
dict of which one key, of `TARGETS`, is the target.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Batch, Request, Split, halves
from hvdtrain.system.exits import BAD_DATA, Failure

HASHED_BYTES = 256 << 20
"""Bytes of an array that enter the fingerprint; a longer array contributes evenly spaced rows"""
TARGETS = ("target", "targets", "label", "labels", "y")
"""Keys of a dict's target"""

Columns = tuple[tuple[str, ...], list[NDArray[Any]]]
"""Names of the inputs, in alphabetical order; empty if they have none. Then one array for each input and the target,
whose first axis counts samples"""


class OwnSplit(Split):
    """A batch's arrays are the inputs, the targets and the step's key (see `data.halves`). float64 becomes float32 and
    integer targets become int64, the types that frameworks train with."""

    names: tuple[str, ...] | None = None
    """Names of the inputs, in the order of the arrays; empty if they have none, None before the first batch"""
    varying = False
    """Whether shapes may differ between batches, because a collate_fn pads them"""
    streamed = False
    """Whether samples are read in the order of the source"""

    @abc.abstractmethod
    def columns(self, items: NDArray[np.int64]) -> Columns:
        """These samples."""

    @abc.abstractmethod
    def content(self) -> Iterator[bytes]:
        """Bytes that identify the data, for the fingerprint."""

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        return self.made(self.columns(items), Request(items, global_items, key))

    def made(self, columns: Columns, request: Request) -> Batch:
        """The batch of these samples. Raises Failure (65) if they do not have the inputs of the first batch."""
        names, (*inputs, targets) = columns[0], [_float32(array) for array in columns[1]]
        if self.names is None:
            self.names = names
        if names != self.names:
            message = f"a sample has the inputs {', '.join(names)}, but the first one {', '.join(self.names)}"
            raise Failure(f"{message}; hint: give all samples the same keys", BAD_DATA)
        targets = targets.astype(np.int64, copy=False) if targets.dtype.kind in "iu" else targets
        weight, total_weight = len(request.items), len(request.global_items)
        return Batch(arrays=(*inputs, targets, halves(request.key)), weight=weight, total_weight=total_weight)


class Arrays(OwnSplit):
    """Inputs and targets as arrays."""

    def __init__(self, columns: Columns) -> None:
        self._names, self._arrays = columns

    def __len__(self) -> int:
        return len(self._arrays[-1]) if self._arrays else 0  # an empty tf.data.Dataset has no parts

    def columns(self, items: NDArray[np.int64]) -> Columns:
        return self._names, [array[items] for array in self._arrays]

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

    def samples(self, items: NDArray[np.int64]) -> list[Any]:
        get_many = getattr(self._items, "__getitems__", None)
        return list(get_many(items.tolist())) if get_many else [self._items[item] for item in items.tolist()]

    def columns(self, items: NDArray[np.int64]) -> Columns:
        return stacked(self.samples(items))

    def content(self) -> Iterator[bytes]:
        """Only the type and the length, since samples may be random."""
        yield f"{type(self._items).__qualname__} {len(self)}".encode()


def parts(sample: Any) -> tuple[tuple[str, ...], list[Any]]:
    """Names of a sample's inputs (empty if they have none), and its inputs and its target.

    `((a, b), y)` and `(a, b, y)` are the same. Raises Failure (65) for a dict without a target or inside another part.
    """
    if isinstance(sample, Mapping):
        found = [key for key in TARGETS if key in sample]
        if len(found) != 1:
            message = f"a sample is a dict with the keys {', '.join(map(str, sample))}"
            hint = f"name the target {' or '.join(TARGETS)}, and nothing else so, or give (inputs, target)"
            raise Failure(f"{message}; hint: {hint}", BAD_DATA)
        sample = ({key: part for key, part in sample.items() if key != found[0]}, sample[found[0]])
    if isinstance(sample, tuple | list) and len(sample) == 2 and isinstance(sample[0], Mapping):
        inputs = {str(name): part for name, part in sorted(sample[0].items())}
        return tuple(inputs), [*map(_leaf, inputs.values()), _leaf(sample[1])]
    return (), _flat(sample)


def stacked(samples: Sequence[Any]) -> Columns:
    """Samples as arrays. Raises Failure (65) if they do not have the same inputs, and ValueError for other shapes."""
    each = list(map(parts, samples))
    names = each[0][0] if each else ()
    for other, _ in each:
        if other != names:
            message = f"a sample has the inputs {', '.join(other)}, but another one {', '.join(names)}"
            raise Failure(f"{message}; hint: give all samples the same keys", BAD_DATA)
    columns: Iterable[Any] = zip(*(values for _, values in each), strict=True)
    return names, [np.stack([np.asarray(part) for part in column]) for column in columns]


def collated(batch: Any, count: int) -> Columns:
    """A batch that a collate_fn made of `count` samples, as arrays. Raises Failure (65) for another number of them."""
    names, values = parts(batch)
    arrays = [np.asarray(value) for value in values]
    if wrong := [array.shape for array in arrays if array.shape[:1] != (count,)]:
        message = f"collate_fn made an array of shape {wrong[0]} of {count} samples"
        raise Failure(f"{message}; hint: the first axis must count samples", BAD_DATA)
    return names, arrays


def _flat(sample: Any) -> list[Any]:
    if isinstance(sample, tuple | list):
        return [part for item in sample for part in (_flat(item) if isinstance(item, tuple) else [_leaf(item)])]
    return [sample]


def _leaf(part: Any) -> Any:
    if isinstance(part, Mapping):
        message = f"a sample has a dict with the keys {', '.join(map(str, part))} inside"
        raise Failure(f"{message}; hint: give one dict of all inputs", BAD_DATA)
    return part


def _float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float64 else array
