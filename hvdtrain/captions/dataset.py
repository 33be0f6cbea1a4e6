"""Pictures with sentences, as arrays: what a captioning model trains on and is judged by.

A sample is a **caption**, not a picture: a picture with five captions is five samples. What a batch weighs is not
samples but **targets**, the words it must predict: each caption's words and the END behind them. A sum of losses over
targets, divided by the targets of all ranks, is then the exact mean per word, however uneven the captions are.

**Order of an epoch**: batches are filled up with PAD to their longest caption, which costs as much time as words do. So
captions are shuffled, sorted by length within windows of 64 batches, cut into batches, and the batches are shuffled:
captions of a batch are of nearly one length, and which ones meet, and when, is random still. Within a batch they are
shuffled again, so that no rank gets always the shorter ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.captions.vocabulary import PAD, Vocabulary
from hvdtrain.data import Batch, halves
from hvdtrain.data.prepared import PARTS

WINDOW = 64  # batches that are sorted by length together


@dataclass(frozen=True, kw_only=True)
class CaptionSplit:
    """One part of a captioning data set: N pictures with P captions in all."""

    inputs: NDArray[Any]
    """(N, height, width, 3) uint8 pictures, maybe a memory map; or (N, features) float32 of an encoder."""
    names: tuple[str, ...]
    """(N,) of the pictures."""
    references: tuple[tuple[str, ...], ...]
    """(N,) the cleaned sentences of each picture, words that the vocabulary lacks included."""
    picture: NDArray[np.int64]
    """(P,) which of the N pictures each caption tells of."""
    tokens: NDArray[np.int32]
    """(P, longest) START, words, END, padded with PAD."""
    lengths: NDArray[np.int64]
    """(P,) targets of each caption: its words and END."""

    def __len__(self) -> int:
        return len(self.picture)

    def order(self, stream: np.random.Generator, borders: Sequence[int]) -> NDArray[np.int64]:
        """A permutation of the captions for an epoch whose global batch k is [borders[k], borders[k + 1]).

        See the head of the module. A pure function of the stream's state; every batch keeps its size.
        """
        shuffled = stream.permutation(len(self))
        sizes = np.diff(borders)
        batches: dict[int, list[NDArray[np.int64]]] = {}
        for begin in range(0, len(sizes), WINDOW):
            window = sizes[begin : begin + WINDOW]
            some = shuffled[borders[begin] : borders[begin + len(window)]]
            some = some[np.argsort(self.lengths[some], kind="stable")]
            # A short batch may be anywhere in the window, or the end of an epoch would be always of long captions.
            window = stream.permutation(window)
            for batch in np.split(some, window.cumsum()[:-1]):
                batches.setdefault(len(batch), []).append(stream.permutation(batch))
        places = {size: stream.permutation(len(same)).tolist() for size, same in batches.items()}
        return np.concatenate([shuffled[:0], *(batches[size][places[size].pop()] for size in sizes.tolist())])

    def batch(self, mine: NDArray[np.int64], everyones: NDArray[np.int64], key: int | None) -> Batch:
        """What this rank works on in a step: captions `mine` of `everyones` (both indices into the P captions).

        arrays: inputs (n, ...) as they are stored; tokens int64 (n, T + 1), T the most targets of `mine`; and the
        step's key (see `data.halves`). Weights are targets.
        """
        longest = int(self.lengths[mine].max(initial=0))
        tokens = self.tokens[mine, : longest + 1].astype(np.int64)
        return Batch(
            arrays=(self.inputs[self.picture[mine]], tokens, halves(key)),
            weight=int(self.lengths[mine].sum()),
            total_weight=int(self.lengths[everyones].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class CaptionDataset:
    """Pictures and captions cut into three parts, by picture: no picture is in two."""

    name: str
    vocabulary: Vocabulary
    """Of the training captions."""
    pictures: NDArray[Any]
    """All inputs, train | validation | test; the parts' inputs are views of it."""
    train: CaptionSplit
    validation: CaptionSplit
    test: CaptionSplit
    fingerprint: str
    """SHA-256 that changes whenever a picture, a caption, a word's number or the cut does."""

    def with_inputs(self, features: NDArray[Any]) -> CaptionDataset:
        """The same captions for other inputs, one row for each of `pictures`, in their order."""
        if len(features) != len(self.pictures):
            raise ValueError(f"{len(features)} rows of features for {len(self.pictures)} pictures")
        begin, parts = 0, {}
        for name in PARTS:
            split = getattr(self, name)
            end = begin + len(split.names)
            parts[name] = dataclasses.replace(split, inputs=features[begin:end])
            begin = end
        return dataclasses.replace(self, pictures=features, **parts)


def assemble(
    *,
    name: str,
    vocabulary: Vocabulary,
    pictures: NDArray[Any],
    names: Sequence[str],
    references: Sequence[Sequence[str]],
    counts: Sequence[int],
    fingerprint: str,
) -> CaptionDataset:
    """A data set of pictures that are in the order train | validation | test already, `counts` of them in each.

    `references` are the cleaned sentences of each picture.
    """
    encoded = [[vocabulary.encode(sentence) for sentence in told] for told in references]
    longest = max((len(ids) for told in encoded for ids in told), default=2)
    parts = {}
    for part, (begin, end) in zip(PARTS, itertools.pairwise([0, *np.cumsum(counts).tolist()]), strict=True):
        ids = [caption for told in encoded[begin:end] for caption in told]
        tokens = np.full((len(ids), longest), PAD, np.int32)
        for row, caption in zip(tokens, ids, strict=True):
            row[: len(caption)] = caption
        parts[part] = CaptionSplit(
            inputs=pictures[begin:end],
            names=tuple(names[begin:end]),
            references=tuple(map(tuple, references[begin:end])),
            picture=np.repeat(np.arange(end - begin), [len(told) for told in encoded[begin:end]]),
            tokens=tokens,
            lengths=np.array([len(caption) - 1 for caption in ids], np.int64),
        )
    return CaptionDataset(
        name=name,
        vocabulary=vocabulary,
        pictures=pictures,
        fingerprint=fingerprint,
        **parts,
    )
