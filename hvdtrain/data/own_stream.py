"""Data sets that can only be read from the beginning: a PyTorch `IterableDataset`, or a `tf.data.Dataset`.

Samples are numbered in the order of the source, which must be the same on all ranks and each time it is read. Rank r of
n uses the samples r, r + n, r + 2n ...: n times the reading of one process, and no memory but the batches. A source
saves the reading if it declares `hvdtrain_shard(rank, size)`, which returns an iterable of just these samples. A
tf.data.Dataset has `shard`.

The number of samples is `len(source)`; without it, the source is read once to count them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Batch, Request
from hvdtrain.data.own_split import Columns, OwnSplit, collated, parts, stacked
from hvdtrain.system.exits import BAD_DATA, Failure

Shard = Callable[[int, int], Iterable[Any]]
"""From rank and number of ranks to the rank's samples"""


class Stream(OwnSplit):
    """Samples in the order of the source, which each iteration over batches reads again."""

    streamed = True

    def __init__(self, name: str, shard: Shard, count: int | None, collate: Callable[[list[Any]], Any] | None) -> None:
        """`count`: the number of samples, or None to count them. `collate` makes a batch of a list of samples."""
        self._name, self._shard, self._collate, self.varying = name, shard, collate, collate is not None
        self._count = sum(1 for _ in shard(0, 1)) if count is None else count

    def __len__(self) -> int:
        return self._count

    def order(self, stream: np.random.Generator, borders: Sequence[int]) -> NDArray[np.int64]:
        return np.arange(len(self))

    def part(self, items: NDArray[np.int64], cuts: Sequence[int], rank: int) -> NDArray[np.int64]:
        return items[items % (len(cuts) - 1) == rank]

    def batches(self, requests: Iterator[Request], rank: int, size: int) -> Iterator[Batch]:
        samples, at = iter(self._shard(rank, size)), rank
        for request in requests:
            wanted = list[Any]()
            for item in request.items.tolist():
                next(itertools.islice(samples, (item - at) // size, (item - at) // size), None)  # skips those between
                at = item + size
                wanted.extend(itertools.islice(samples, 1))
            if len(wanted) < len(request.items):
                self._differs("ended before")
            if at >= len(self) and next(samples, self) is not self:
                self._differs("continues after")
            yield self.made(self._columns(wanted), request)

    def columns(self, items: NDArray[np.int64]) -> Columns:
        """These samples, in any order and with repetitions."""
        unique, back = np.unique(items, return_inverse=True)
        wanted, selected = set(unique.tolist()), itertools.islice(self._shard(0, 1), int(unique[-1]) + 1)
        samples = [sample for number, sample in enumerate(selected) if number in wanted]
        if len(samples) < len(unique):
            self._differs("ended before")
        return self._columns([samples[number] for number in back.tolist()])

    def content(self) -> Iterator[bytes]:
        """Only the length, since samples may be random."""
        yield f"stream {len(self)}".encode()

    def _columns(self, samples: list[Any]) -> Columns:
        return stacked(samples) if self._collate is None else collated(self._collate(samples), len(samples))

    def _differs(self, event: str) -> None:
        hint = "give the same samples each time; their number must equal len() if it is defined"
        raise Failure(f"{self._name}= {event} the expected {self._count:,} samples; hint: {hint}", BAD_DATA)


def of_iterable(name: str, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> Stream:
    """The stream of an IterableDataset."""
    declared = getattr(dataset, "hvdtrain_shard", None)
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        count = None

    def shard(rank: int, size: int) -> Iterable[Any]:
        return declared(rank, size) if declared else itertools.islice(dataset, rank, None, size)

    return Stream(name, shard, count, collate)


def of_tensorflow(name: str, dataset: Any) -> Stream:
    """The stream of a tf.data.Dataset. Raises Failure (65) if its order differs between ranks or iterations."""
    for node in _pipeline(dataset):
        if type(node).__name__ != "_ShuffleDataset":
            continue
        seeds = (getattr(node, "_seed", 1), getattr(node, "_seed2", 1))
        if getattr(node, "_reshuffle_each_iteration", False) or not any(int(seed) for seed in seeds):
            message = f"{name}= is shuffled in another order each time or on each rank, so samples would be lost"
            raise Failure(f"{message}; hint: shuffle(..., seed=1, reshuffle_each_iteration=False)", BAD_DATA)
    samples = dataset.unbatch() if is_batched(dataset) else dataset
    cardinality = int(samples.cardinality())
    return Stream(
        name,
        lambda rank, size: samples.shard(size, rank).as_numpy_iterator(),
        None if cardinality < 0 else cardinality,
        None,
    )


def is_batched(dataset: Any) -> bool:
    """Whether the elements of a tf.data.Dataset are batches: all parts have a first axis of unknown length."""
    return all(spec.shape.rank and spec.shape[0] is None for spec in parts(dataset.element_spec)[1])


def _pipeline(dataset: Any) -> Iterator[Any]:
    """The steps of a tf.data pipeline, the last one first."""
    yield dataset
    for source in getattr(dataset, "_inputs", list)():
        yield from _pipeline(source)
