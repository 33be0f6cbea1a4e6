"""Beam search: writes captions word by word with a model of either framework, and scores a split's captions.

Which caption: the one whose mean log-probability per token is highest, END counted as a token, among those that the
search below finishes. That is the sum of its words' log-probabilities and END's, divided by its words + 1; the plain
sum would favour short captions. The words PAD, START and UNKNOWN are never written, and what the model gives them is
not shared out among the others.

The search of beam B (Show and Tell's: Vinyals et al., CVPR 2015, section 4.2) has B places. It begins with the empty
caption. In each step every beginning is continued by every word, and the best by sum of log-probabilities get the
places; one that ends takes its place out of the search for good. The search is over when no place is left, or when no
beginning could still beat the best caption even if all its further words were certain. After the last word allowed
only END may follow. Ties go to the better place, then to the lower word. With B = 1 this is greedy
writing; with B as large as the number of all captions it finds the best of them.

All pictures of a batch take a step together, and those that are done leave the batch. Each is searched by itself, so
its caption does not depend on the others, but for what a framework's sums differ by in batches of another size.
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
"""What no caption contains"""
WORDS_LIMIT = 34
"""Words in the longest caption (Lucero, 2022)"""
BATCH_SIZE = 256
"""Pictures captioned together: on one core 4 to 8 times as fast as one by one in PyTorch, 25 times in TensorFlow"""


class Writer(Protocol):
    """A captioning model in evaluation, which gives one word at a time."""

    def encode(self, inputs: NDArray[Any], /) -> Floats:
        """The encoded pictures, (N, H)."""

    def step(
        self, encoded: Floats, words: NDArray[np.int64], hidden: Floats, cell: Floats, /
    ) -> tuple[Floats, Floats, Floats]:
        """One word on for each of n captions: log-probabilities (n, V) of the word behind `words` (n,), and the new
        hidden and cell state (n, H); both are zeros before START."""


def write(
    writer: Writer,
    inputs: NDArray[Any],
    *,
    words_limit: int = WORDS_LIMIT,
    beam: int = 1,
    batch_size: int = BATCH_SIZE,
    done: Callable[[int], None] = lambda pictures: None,
) -> list[list[int]]:
    """The caption of each of the inputs, as words without START and END; one that the model ends at once is empty.

    `inputs` (N, ...) are what the model's encoder takes; they may be a memory map. `done` is called with the number
    of pictures captioned since its last call. Raises Failure (78) for a beam or limit below 1.
    """
    for name, value in (("beam", beam), ("words_limit", words_limit), ("batch_size", batch_size)):
        if value < 1:
            raise Failure(f"{name} is {value}: give 1 or more", BAD_CONFIG)
    captions: list[list[int]] = []
    for start in range(0, len(inputs), batch_size):
        some = np.array(inputs[start : start + batch_size])  # a copy: PyTorch complains of a memory map's read-only one
        captions += _search(writer, writer.encode(some), words_limit, beam)
        done(len(captions) - start)
    return captions


def judge(
    writer: Writer, split: CaptionSplit, vocabulary: Vocabulary, world: Communicator, beam: int
) -> dict[str, float]:
    """Corpus BLEU-1..4 of the captions of a split's pictures, {"bleu1": 0..1, ...}; empty for an empty split.

    Each rank captions its own contiguous part of the pictures, and the counts are summed, so the result is that of one
    process and the same on all ranks. Collective. Raises Failure (65) for a picture without references.
    """
    pictures = len(split.references)
    if not pictures:
        return {}
    start, end = (pictures * part // world.size for part in (world.rank, world.rank + 1))
    with Progress(f"captioning, beam {beam}", end - start, "pictures", enabled=world.rank == 0) as progress:
        written = write(writer, split.inputs[start:end], beam=beam, done=progress.advance)
    counts = bleu.statistics([vocabulary.decode(words) for words in written], split.references[start:end])
    return bleu.scores(world.sum(counts, f"judge.{beam}"))


def _search(writer: Writer, encoded: Floats, words_limit: int, beam: int) -> list[list[int]]:
    """The captions of one batch, `encoded` (N, H).

    A row is a beginning that is still searched: `owner` says of which picture, `total` its sum of log-probabilities,
    `words` what it has so far behind START. Rows of a picture are together, the best first.
    """
    pictures = len(encoded)
    captions: list[list[int]] = [[] for _ in range(pictures)]
    best, places = np.full(pictures, -np.inf), np.full(pictures, beam)
    owner, total = np.arange(pictures), np.zeros(pictures)
    words = np.full((pictures, 1), START, np.int64)
    hidden, cell = np.zeros_like(encoded), np.zeros_like(encoded)
    for length in range(words_limit + 1):
        log_probs, hidden, cell = writer.step(encoded[owner], words[:, -1], hidden, cell)
        nexts, gains = _best_words(log_probs, beam) if length < words_limit else _only_end(log_probs)
        parent = np.repeat(np.arange(len(owner)), nexts.shape[1])
        sums, nexts = (total[:, None] + gains).ravel(), nexts.ravel()

        # The best of each picture get its places; lexsort keeps ties in the order of their places and words.
        order = np.lexsort((-sums, owner[parent]))
        order = order[sums[order] > -np.inf]
        whose = owner[parent[order]]
        place = np.arange(len(order)) - np.searchsorted(whose, whose)
        order = order[place < places[whose]]
        parent, sums, nexts, owner = parent[order], sums[order], nexts[order], owner[parent[order]]

        ended = nexts == END
        for row in np.flatnonzero(ended):
            picture, score = owner[row], sums[row] / (length + 1)
            places[picture] -= 1
            if score > best[picture]:
                best[picture], captions[picture] = score, words[parent[row], 1:].tolist()

        # A picture goes on while its best beginning, whose sum can only fall, may still end with a better mean.
        hope = np.full(pictures, -np.inf)
        np.maximum.at(hope, owner[~ended], sums[~ended] / (words_limit + 1))
        on = ~ended & (hope > best)[owner]
        if not on.any():
            break
        parent, total, owner = parent[on], sums[on], owner[on]
        words = np.column_stack([words[parent], nexts[on]])
        hidden, cell = hidden[parent], cell[parent]
    return captions


def _best_words(log_probs: Floats, count: int) -> tuple[NDArray[np.int64], Floats]:
    """The `count` likeliest words of each row and their log-probabilities, (n, count) each; ties go to the lower word.

    Words that are never written, and NaN, count as -inf.
    """
    left = np.fmax(log_probs, np.float32(-np.inf))  # a copy; frameworks lend memory that is theirs
    left[:, UNWRITTEN] = -np.inf
    rows, count = np.arange(len(left)), min(count, left.shape[1])
    words, values = np.empty((len(left), count), np.int64), np.empty((len(left), count), left.dtype)
    for place in range(count):  # argmax gives the first of equal values, a partial sort need not
        words[:, place] = chosen = left.argmax(axis=1)
        values[:, place] = left[rows, chosen]
        left[rows, chosen] = -np.inf
    return words, values


def _only_end(log_probs: Floats) -> tuple[NDArray[np.int64], Floats]:
    """END behind every row, and its log-probability."""
    return np.full((len(log_probs), 1), END), np.fmax(log_probs[:, END : END + 1], np.float32(-np.inf))
