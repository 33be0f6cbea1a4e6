"""Images with sentences as arrays: training and evaluation data of a captioning model.

A sample is a **caption**: an image with five captions is five samples. The weight of a batch is its number of
**targets**, the words to predict and END, so that the mean loss over all ranks is exact per word.

**Order of an epoch**: a batch is padded to its longest caption, and padding costs time. So captions are shuffled and
sorted by length within windows of 64 batches. The windows are split into batches, and the batches are shuffled.
Captions are shuffled again within a batch, so that no rank always gets the shorter ones.
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
from hvdtrain.data import Batch, Split, halves
from hvdtrain.data.prepared import PARTS

WINDOW = 64  # number of batches that are sorted by length together


@dataclass(frozen=True, kw_only=True)
class CaptionSplit(Split):
    """One part of a captioning data set: N images with P captions in total."""

    inputs: NDArray[Any]
    """(N, height, width, 3) uint8 images, possibly a memory map; or (N, features) float32 encoder outputs."""
    names: tuple[str, ...]
    """(N,), names of the images."""
    references: tuple[tuple[str, ...], ...]
    """(N,), cleaned sentences of each image, including words that are not in the vocabulary."""
    image: NDArray[np.int64]
    """(P,), image of each caption, as an index into the N images."""
    tokens: NDArray[np.int32]
    """(P, longest), START, words, END, padded with PAD."""
    lengths: NDArray[np.int64]
    """(P,), number of targets of each caption: its words and END."""

    def __len__(self) -> int:
        return len(self.image)

    def order(self, stream: np.random.Generator, borders: Sequence[int]) -> NDArray[np.int64]:
        """A permutation of the captions for an epoch whose global batch k is [borders[k], borders[k + 1]).

        The module's docstring describes it. It is a pure function of the stream's state, and every batch keeps its
        size.
        """
        shuffled = stream.permutation(len(self))
        sizes = np.diff(borders)
        batches: dict[int, list[NDArray[np.int64]]] = {}
        for begin in range(0, len(sizes), WINDOW):
            window = sizes[begin : begin + WINDOW]
            chosen = shuffled[borders[begin] : borders[begin + len(window)]]
            chosen = chosen[np.argsort(self.lengths[chosen], kind="stable")]
            # A short batch may be anywhere in the window; otherwise an epoch would always end with long captions.
            window = stream.permutation(window)
            for batch in np.split(chosen, window.cumsum()[:-1]):
                batches.setdefault(len(batch), []).append(stream.permutation(batch))
        position = {size: stream.permutation(len(same)).tolist() for size, same in batches.items()}
        return np.concatenate([shuffled[:0], *(batches[size][position[size].pop()] for size in sizes.tolist())])

    def batch(self, items: NDArray[np.int64], global_items: NDArray[np.int64], key: int | None) -> Batch:
        """This rank's captions `items` of the step's `global_items` (both indices into the P captions).

        arrays: inputs (n, ...) as stored; tokens, int64 (n, T + 1), where T is the largest number of targets in
        `items`; the step's key (see `data.halves`). Weights are numbers of targets.
        """
        longest = int(self.lengths[items].max(initial=0))
        tokens = self.tokens[items, : longest + 1].astype(np.int64)
        return Batch(
            arrays=(self.inputs[self.image[items]], tokens, halves(key)),
            weight=int(self.lengths[items].sum()),
            total_weight=int(self.lengths[global_items].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class CaptionDataset:
    """Images and captions split into three parts; all captions of an image are in the same part."""

    name: str
    vocabulary: Vocabulary
    """Words of the training captions."""
    images: NDArray[Any]
    """All inputs, train | validation | test; the inputs of the parts are views of it."""
    train: CaptionSplit
    validation: CaptionSplit
    test: CaptionSplit
    fingerprint: str
    """SHA-256 that changes if an image, a caption, a word's number or the split changes."""

    def with_inputs(self, features: NDArray[Any]) -> CaptionDataset:
        """The same captions with other inputs, one row for each of `images`, in the same order."""
        if len(features) != len(self.images):
            raise ValueError(f"{len(features)} rows of features for {len(self.images)} images")
        begin, parts = 0, {}
        for name in PARTS:
            split = getattr(self, name)
            end = begin + len(split.names)
            parts[name] = dataclasses.replace(split, inputs=features[begin:end])
            begin = end
        return dataclasses.replace(self, images=features, **parts)


def assemble(
    *,
    name: str,
    vocabulary: Vocabulary,
    images: NDArray[Any],
    names: Sequence[str],
    references: Sequence[Sequence[str]],
    counts: Sequence[int],
    fingerprint: str,
) -> CaptionDataset:
    """A data set from images in the order train | validation | test, with `counts` of them in each part.

    `references` are the cleaned sentences of each image.
    """
    encoded = [[vocabulary.encode(sentence) for sentence in sentences] for sentences in references]
    longest = max((len(ids) for captions in encoded for ids in captions), default=2)
    parts = {}
    for part, (begin, end) in zip(PARTS, itertools.pairwise([0, *np.cumsum(counts).tolist()]), strict=True):
        ids = [caption for captions in encoded[begin:end] for caption in captions]
        tokens = np.full((len(ids), longest), PAD, np.int32)
        for row, caption in zip(tokens, ids, strict=True):
            row[: len(caption)] = caption
        parts[part] = CaptionSplit(
            inputs=images[begin:end],
            names=tuple(names[begin:end]),
            references=tuple(map(tuple, references[begin:end])),
            image=np.repeat(np.arange(end - begin), [len(captions) for captions in encoded[begin:end]]),
            tokens=tokens,
            lengths=np.array([len(caption) - 1 for caption in ids], np.int64),
        )
    return CaptionDataset(name=name, vocabulary=vocabulary, images=images, fingerprint=fingerprint, **parts)
