"""Beam search: write captions word by word with a model of either framework, and score the captions of a split.

**Objective**: the highest mean log-probability per token, with END counted as a token, among the captions that the
search finishes. PAD, START and UNKNOWN are never written, and their probabilities are not redistributed.

**Search** with beam width B (Show and Tell: Vinyals et al., CVPR 2015, section 4.2). Each step extends every partial
caption by every word and keeps the best B by sum of log-probabilities. A caption that ends is removed from the beam and
reduces its width by one. The search stops when the width is 0, or when no partial caption could beat the best finished
one even if all its further words were certain. After the last allowed word only END may follow. Ties are resolved by
beam position, then by word number. B = 1 is greedy search.

All images of a batch take a step together, and finished images leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.captions import bleu
from hvdtrain.captions.dataset import CaptionSplit
from hvdtrain.captions.vocabulary import END, PAD, START, UNKNOWN, Vocabulary
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.observe.progress import Progress
from hvdtrain.system.exits import BAD_CONFIG, Failure

Floats = NDArray[np.float32]

UNWRITTEN = (PAD, START, UNKNOWN)
"""Tokens that no caption contains"""
WORDS_LIMIT = 34
"""Maximum number of words in a caption (Lucero, 2022)"""
BATCH_SIZE = 256
"""Images captioned together. On one core this is 4 to 8 times as fast as one by one in PyTorch, 25 times in
TensorFlow."""


class Writer(Protocol):
    """A captioning model in evaluation mode that predicts one word at a time."""

    def encode(self, inputs: NDArray[Any], /) -> Floats:
        """The encoded images, (N, H)."""

    def step(
        self, encoded: Floats, words: NDArray[np.int64], hidden: Floats, cell: Floats, /
    ) -> tuple[Floats, Floats, Floats]:
        """Advances n captions by one word: returns log-probabilities (n, V) of the word after `words` (n,), and the new
        hidden and cell states (n, H). Both states are zeros before START."""


def write(
    writer: Writer,
    inputs: NDArray[Any],
    *,
    words_limit: int = WORDS_LIMIT,
    beam: int = 1,
    batch_size: int = BATCH_SIZE,
    done: Callable[[int], None] = lambda images: None,
) -> list[list[int]]:
    """The caption of each input, as word numbers without START and END; empty if the model ends at once.

    `inputs` (N, ...) are inputs of the model's encoder and may be a memory map. `done` is called with the number of
    images captioned since its last call. Raises Failure (78) for a beam or limit below 1.
    """
    for name, value in (("beam", beam), ("words_limit", words_limit), ("batch_size", batch_size)):
        if value < 1:
            raise Failure(f"{name} is {value}, but must be at least 1", BAD_CONFIG)
    captions: list[list[int]] = []
    for start in range(0, len(inputs), batch_size):
        batch = np.array(inputs[start : start + batch_size])  # copied, since PyTorch warns about read-only memory maps
        captions += _search(writer, writer.encode(batch), words_limit, beam)
        done(len(captions) - start)
    return captions


def bleu_scores(
    writer: Writer, split: CaptionSplit, vocabulary: Vocabulary, world: Communicator, beam: int
) -> dict[str, float]:
    """Corpus BLEU-1 to BLEU-4 of captions for a split's images, {"bleu1": 0..1, ...}; empty for an empty split.

    Each rank captions a contiguous part of the images, and the counts are summed. The result equals that of one process
    and is the same on all ranks. Collective. Raises Failure (65) for an image without references.
    """
    images = len(split.references)
    if not images:
        return {}
    start, end = (images * part // world.size for part in (world.rank, world.rank + 1))
    with Progress(f"captioning, beam {beam}", end - start, "images", enabled=world.rank == 0) as progress:
        written = write(writer, split.inputs[start:end], beam=beam, done=progress.advance)
    counts = bleu.statistics([vocabulary.decode(words) for words in written], split.references[start:end])
    return bleu.scores(world.sum(counts, f"bleu.{beam}"))


def _search(writer: Writer, encoded: Floats, words_limit: int, beam: int) -> list[list[int]]:
    """The captions of one batch, `encoded` (N, H).

    Each row is a partial caption: `owner` is its image, `total` its sum of log-probabilities, `words` its words
    including START. Rows of an image are consecutive, the best first.
    """
    images = len(encoded)
    captions: list[list[int]] = [[] for _ in range(images)]
    best, width = np.full(images, -np.inf), np.full(images, beam)
    owner, total = np.arange(images), np.zeros(images)
    words = np.full((images, 1), START, np.int64)
    hidden, cell = np.zeros_like(encoded), np.zeros_like(encoded)
    for length in range(words_limit + 1):
        log_probs, hidden, cell = writer.step(encoded[owner], words[:, -1], hidden, cell)
        following, gains = _best_words(log_probs, beam) if length < words_limit else _only_end(log_probs)
        parent = np.repeat(np.arange(len(owner)), following.shape[1])
        sums, following = (total[:, None] + gains).ravel(), following.ravel()

        # Keep the best rows of each image. lexsort keeps ties in the order of beam positions and words.
        order = np.lexsort((-sums, owner[parent]))
        order = order[sums[order] > -np.inf]
        image_of = owner[parent[order]]
        position = np.arange(len(order)) - np.searchsorted(image_of, image_of)
        order = order[position < width[image_of]]
        parent, sums, following, owner = parent[order], sums[order], following[order], owner[parent[order]]

        ended = following == END
        for row in np.flatnonzero(ended):
            image, score = owner[row], sums[row] / (length + 1)
            width[image] -= 1
            if score > best[image]:
                best[image], captions[image] = score, words[parent[row], 1:].tolist()

        # An image continues while its best partial caption, whose sum can only fall, may still end with a better mean.
        bound = np.full(images, -np.inf)
        np.maximum.at(bound, owner[~ended], sums[~ended] / (words_limit + 1))
        active = ~ended & (bound > best)[owner]
        if not active.any():
            break
        parent, total, owner = parent[active], sums[active], owner[active]
        words = np.column_stack([words[parent], following[active]])
        hidden, cell = hidden[parent], cell[parent]
    return captions


def _best_words(log_probs: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """The `count` most likely words of each row and their log-probabilities, (n, count) each; ties go to the lower
    word.

    Words that are never written, and NaN, are treated as -inf.
    """
    left = np.fmax(log_probs, np.float32(-np.inf))  # a copy, since the memory may belong to the framework
    left[:, UNWRITTEN] = -np.inf
    rows, count = np.arange(len(left)), min(count, left.shape[1])
    words, values = np.empty((len(left), count), np.int64), np.empty((len(left), count), left.dtype)
    for place in range(count):  # argmax returns the first of equal values; a partial sort may not
        words[:, place] = chosen = left.argmax(axis=1)
        values[:, place] = left[rows, chosen]
        left[rows, chosen] = -np.inf
    return words, values


def _only_end(log_probs: Floats) -> tuple[NDArray[np.int64], Floats]:
    """END as the only word of every row, and its log-probability."""
    return np.full((len(log_probs), 1), END), np.fmax(log_probs[:, END : END + 1], np.float32(-np.inf))
