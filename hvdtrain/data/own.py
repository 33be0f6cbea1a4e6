"""Data sets of users' scripts, as `hvdtrain.train` takes them.

| given | order | memory and reading on each rank |
|---|---|---|
| arrays (inputs, targets) | shuffled by the seed | the arrays |
| a map-style Dataset, or a DataLoader of one | shuffled by the seed | reads its own samples |
| an IterableDataset, or a DataLoader of one | the source's | reads all samples, keeps its own: see `own_stream` |
| a finite tf.data.Dataset | shuffled by the seed | all samples in memory, read once |
| the same with stream=True | the source's | reads all samples, keeps its own: see `own_stream` |

Every rank receives the whole data set in the same order, and the loader shards it: each sample is used once per epoch.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.data import own_loader, own_stream
from hvdtrain.data.own_split import Arrays, Columns, Items, OwnSplit, parts, stacked
from hvdtrain.system.exits import BAD_DATA, Failure

KINDS = (
    "arrays as (inputs, targets), a torch Dataset with len() and [], an IterableDataset, a DataLoader, or a finite "
    "tf.data.Dataset"
)


@dataclass(frozen=True, kw_only=True)
class Own:
    """A script's data."""

    train: OwnSplit
    validation: OwnSplit
    test: OwnSplit
    notes: tuple[str, ...] = ()
    """Settings of DataLoaders that have no effect, one line each"""
    batch_size: int | None = None
    """The batch size of the training data's DataLoader"""
    name = "own"

    @property
    def streamed(self) -> list[str]:
        """Names of the splits that are read in the order of their sources."""
        return [name for name in ("train", "validation", "test") if getattr(self, name).streamed]

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the contents of all splits (see `OwnSplit.content`)."""
        digest = hashlib.sha256()
        for split in (self.train, self.validation, self.test):
            for content in split.content():
                digest.update(content)
        return digest.hexdigest()


def opened(train: Any, validation: Any, test: Any, *, stream: bool = False) -> Own:
    """The three splits; validation and test may be None. Reads sources of unknown length once.

    `stream`: do not hold a tf.data.Dataset in memory. Raises Failure (65) for unsupported or inconsistent data.
    """
    given = {"train": train, "validation": validation, "test": test}
    notes = [note for name, each in given.items() if _is(each, "DataLoader") for note in own_loader.check(name, each)]
    data = Own(
        **{name: _split(name, each, stream) for name, each in given.items()},
        notes=tuple(notes),
        batch_size=train.batch_size if _is(train, "DataLoader") else None,
    )
    for name, split in {"validation": data.validation, "test": data.test}.items():
        varying = data.train.varying or split.varying
        if len(split) and (other := sample(split, name, varying)) != (expected := sample(data.train, "train", varying)):
            message = f"{name}= has samples of {other}, but train= of {expected}"
            raise Failure(f"{message}; hint: give both the same shapes and types", BAD_DATA)
    sample(data.train, "train")
    return data


def sample(split: OwnSplit, name: str, varying: bool = False) -> str:
    """Shapes and types of a sample's inputs and target, for people; number of axes for `varying` shapes.

    Raises Failure (65) if the split has no samples, or samples that models cannot be trained with.
    """
    if not len(split):
        raise Failure(f"{name}= has no samples", BAD_DATA)
    first = np.zeros(1, np.int64)
    *arrays, _ = split.batch(first, first, None).arrays
    if len(arrays) < 2:
        raise Failure(f"a sample of {name}= has only one part; hint: give inputs and target, (x, y)", BAD_DATA)
    labels = [*(split.names or [""] * (len(arrays) - 1)), ""]
    for label, array in zip(labels, arrays, strict=True):
        if array.dtype.kind not in "biuf":
            message = f"{name}= has {f'inputs {label}' if label else 'inputs or targets'} of {array.dtype}"
            raise Failure(f"{message}; hint: give numbers; classes count from 0", BAD_DATA)
    shapes = [f"{array.ndim - 1} axes" if varying else "x".join(map(str, array.shape[1:])) for array in arrays]
    return ", ".join(
        f"{label + ' ' if label else ''}{array.dtype} {shape or 'number'}"
        for label, array, shape in zip(labels, arrays, shapes, strict=True)
    )


def _split(name: str, given: Any, stream: bool) -> OwnSplit:
    if given is None:
        return Arrays(((), [np.empty(0), np.empty(0)]))
    try:
        if hasattr(given, "element_spec"):
            if int(given.cardinality()) == -1:
                raise ValueError("that never ends")
            return own_stream.of_tensorflow(name, given) if stream else Arrays(_read(given))
        if _is(given, "DataLoader"):
            if _is(given.dataset, "IterableDataset"):
                return own_stream.of_iterable(name, given.dataset, given.collate_fn)
            return own_loader.Loaded(given)
        if _is(given, "IterableDataset"):
            return own_stream.of_iterable(name, given)
        if isinstance(given, tuple | list | dict):
            names, arrays = (values := parts(given))[0], [np.asarray(part) for part in values[1]]
        elif not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
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
        raise Failure(f"{name}= is a {type(given).__name__} {error}; hint: give {KINDS}", BAD_DATA) from error
    return Arrays((names, arrays))


def _is(given: Any, kind: str) -> bool:
    """Whether a class of this name is among the bases of the object's, so that no framework has to be imported."""
    return any(base.__name__ == kind for base in type(given).__mro__)


def _read(dataset: Any) -> Columns:
    """All elements of a tf.data.Dataset. Raises ValueError if they differ in shape."""
    elements = list(dataset.as_numpy_iterator())
    if not own_stream.is_batched(dataset):
        return stacked(elements)
    columns = zip(*(parts(element)[1] for element in elements), strict=True)
    return parts(dataset.element_spec)[0], [np.concatenate(column) for column in columns]
