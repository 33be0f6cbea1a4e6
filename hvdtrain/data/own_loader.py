"""A script's `DataLoader`: its data set, collate_fn and worker processes. hvdtrain makes the batches.

This module does not import PyTorch; the script has done so.
"""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import Batch, Request
from hvdtrain.data.own_split import Columns, Items, collated
from hvdtrain.system.exits import BAD_DATA, Failure

SAMPLERS = ("SequentialSampler", "RandomSampler")
"""What PyTorch makes of shuffle=. hvdtrain's order replaces it"""
KEPT = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")
"""Settings of the worker processes"""


def check(name: str, loader: Any) -> list[str]:
    """Which settings of a DataLoader have no effect, one line each. Raises Failure (65) for those that decide which
    samples a rank gets, since hvdtrain does."""
    sampler = loader.sampler
    kind, problem = type(sampler).__name__, ""
    streamed = "IterableDataset" in [base.__name__ for base in type(loader.dataset).__mro__]
    if loader.batch_size is None:
        problem = "has a batch_sampler, or batch_size=None; hint: give batch_size="
    elif not streamed and kind not in SAMPLERS:
        problem = f"has a {kind}; hint: leave sampler= out, and give a Subset to select samples"
    elif not streamed and (getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset)):
        problem = "has a RandomSampler that draws with replacement or a part; hint: use shuffle=True"
    if problem:
        why = "hvdtrain gives each rank its samples, each one once per epoch"
        raise Failure(f"{name}= {problem} ({why})", BAD_DATA)
    notes = []
    if loader.drop_last:
        notes.append(f"{name}=: drop_last has no effect, since every sample is used")
    if streamed and loader.num_workers:
        notes.append(f"{name}=: num_workers has no effect for an IterableDataset, which this process reads")
    if name == "train" and kind == "SequentialSampler" and not streamed:
        notes.append(f"{name}=: samples are shuffled by the run's seed, although the DataLoader has shuffle=False")
    return notes


class Loaded(Items):
    """The map-style Dataset of a DataLoader. If it has workers, they read the samples ahead."""

    varying = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader.dataset)
        self._collate, self._settings = loader.collate_fn, {name: getattr(loader, name) for name in KEPT}

    def columns(self, items: NDArray[np.int64]) -> Columns:
        return collated(self._collate(self.samples(items)), len(items))

    def batches(self, requests: Iterator[Request], rank: int, size: int) -> Iterator[Batch]:
        first = next(requests, None)
        if first is None:
            return
        requests = itertools.chain([first], requests)
        if not self._settings["num_workers"]:
            yield from super().batches(requests, rank, size)
            return
        torch, asked = sys.modules["torch"], collections.deque[Request]()
        generator = torch.Generator()  # PyTorch's own would change the random numbers of the model
        generator.manual_seed((first.key or 0) >> 1)

        def items() -> Iterator[list[int]]:
            for request in requests:
                asked.append(request)
                yield request.items.tolist()

        loader = torch.utils.data.DataLoader(
            self._items, batch_sampler=items(), collate_fn=self._collate, generator=generator, **self._settings
        )
        for batch in loader:
            request = asked.popleft()
            yield self.made(collated(batch, len(request.items)), request)
