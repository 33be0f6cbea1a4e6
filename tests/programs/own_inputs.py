"""Trains a model on the samples of one kind of source, for test_own_inputs.py.

Usage: own_inputs.py KIND FOLDER [JSON of settings]; each rank saves its weights and the samples that it trained with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import hvdtrain
from hvdtrain.comm.launch_env import launch_env

COUNT, TEST = 101, 37
DRAW = np.random.default_rng(0)
NUMBERS = np.arange(COUNT + TEST, dtype=np.float32)
INPUTS = DRAW.normal(size=(COUNT + TEST, 5)).astype(np.float32)
TARGETS = INPUTS.argmax(1)


def sample(at: int, *, named: bool) -> Any:
    if named:
        return {"x": INPUTS[at], "number": NUMBERS[at], "label": TARGETS[at]}
    return NUMBERS[at], INPUTS[at], TARGETS[at]


class Indexed(Dataset):
    def __init__(self, begin: int, end: int, named: bool) -> None:
        self.range, self.named = range(begin, end), named

    def __len__(self) -> int:
        return len(self.range)

    def __getitem__(self, at: int) -> Any:
        return sample(self.range[at], named=self.named)


class Read(IterableDataset):
    """Its length is unknown."""

    def __init__(self, begin: int, end: int, named: bool) -> None:
        self.range, self.named = range(begin, end), named

    def __iter__(self) -> Iterator[Any]:
        return self.taken(self.range)

    def taken(self, numbers: range) -> Iterator[Any]:
        return (sample(at, named=self.named) for at in numbers)


class Sharded(Read):
    """Reads only the samples of a rank."""

    def hvdtrain_shard(self, rank: int, size: int) -> Iterator[Any]:
        return self.taken(self.range[rank::size])


def tensorflow(begin: int, end: int, named: bool) -> Any:
    import tensorflow as tf

    numbers = tf.data.Dataset.range(begin, end).map(lambda at: at).filter(lambda at: at >= 0)  # of unknown length

    def element(at: Any) -> Any:
        x, y, number = tf.gather(INPUTS, at), tf.gather(TARGETS, at), tf.cast(at, tf.float32)
        return ({"x": x, "number": number}, y) if named else (number, x, y)

    return numbers.map(element).batch(7)


def arrays(begin: int, end: int, named: bool) -> Any:
    x, number, y = INPUTS[begin:end], NUMBERS[begin:end], TARGETS[begin:end]
    return ({"x": x, "number": number}, y) if named else (number, x, y)


def loader(begin: int, end: int, named: bool) -> Any:
    return DataLoader(Indexed(begin, end, named), batch_size=8, shuffle=True, num_workers=2, drop_last=True)


def iterable_loader(begin: int, end: int, named: bool) -> Any:
    return DataLoader(Read(begin, end, named), batch_size=8)


KINDS: dict[str, Callable[[int, int, bool], Any]] = {
    "arrays": arrays,
    "indexed": Indexed,
    "loader": loader,
    "read": Read,
    "sharded": Sharded,
    "iterable_loader": iterable_loader,
    "tensorflow": tensorflow,
}
STREAMS = ("read", "sharded", "iterable_loader", "tensorflow")


class Noting(torch.nn.Module):
    """Keeps the numbers of the samples that it was trained with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line, self.numbers = torch.nn.Linear(5, 5), list[float]()

    def forward(self, number: Any, x: Any) -> Any:
        if self.training:
            self.numbers += number.tolist()
        return self.line(x)


def trained(kind: str, named: bool, **settings: Any) -> tuple[Noting, Any]:
    """Train with this kind of data; return the model and the run's summary."""
    model, make = Noting(), KINDS[kind]
    data = {"train": make(0, COUNT, named), "test": make(COUNT, COUNT + TEST, named)}
    settings = {"epochs": 2, "lr": 0.1, "stream": True, "global_batch_size": 24, **data, **settings}
    return model, hvdtrain.train(model, loss=torch.nn.functional.cross_entropy, **settings)


if __name__ == "__main__":
    kind, folder, *rest = sys.argv[1:]
    model, summary = trained(kind, True, **(json.loads(rest[0]) if rest else {}))
    result = {"numbers": model.numbers, "scores": summary.test_scores, "weights": model.line.weight.tolist()}
    (Path(folder) / f"rank{launch_env().rank}.json").write_text(json.dumps(result))
