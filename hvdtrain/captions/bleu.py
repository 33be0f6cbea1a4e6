"""Corpus BLEU-1..4 of captions, from counts that add up over ranks.

BLEU-n (Papineni et al., "BLEU: a method for automatic evaluation of machine translation", ACL 2002) is the geometric
mean of the corpus's precisions of 1- to n-grams, times a penalty where the captions are shorter than the references.
All of it follows from ten counts, each a sum over captions: so parts of a corpus are counted wherever they are, the
counts are added, and the score is that of the whole, exactly.

Counting and scoring are sacrebleu's: no tokenizer (captions come as words joined by spaces), no smoothing, the
reference length is that of the closest reference (the shorter of two), and an n-gram counts at most as often as in the
reference that has most of it. Where every order has a match, the captioning community's own scripts give the same
scores; where an order has none, the score is 0 here and nearly 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

from hvdtrain.system.exits import BAD_DATA, Failure

ORDER = 4
"""Words in the longest n-grams counted"""


def statistics(captions: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """The ten counts of a corpus or of a part of it: words of the captions, words of the closest references, n-grams
    (n = 1..4) that are in a reference too, n-grams in all.

    `references[i]` are the sentences, one or more, that `captions[i]` is compared with. Counts are whole numbers far
    below 2**53, so that sums of them in float64 are exact in any order. Raises Failure (65) for a caption without a
    reference.
    """
    if alone := [number for number, sentences in enumerate(references) if not sentences]:
        told = f"number {alone[0] + 1} of {len(captions)} captions has no reference to be compared with"
        raise Failure(f"{told}: leave such pictures out when preparing the data", BAD_DATA)
    if not captions:
        return np.zeros(2 + 2 * ORDER)
    if len(captions) != len(references):
        raise ValueError(f"{len(captions)} captions, but references for {len(references)}")
    found = _metric().corpus_score(captions, _streams(references))
    return np.array([found.sys_len, found.ref_len, *found.counts, *found.totals], np.float64)


def scores(statistics: NDArray[np.float64]) -> dict[str, float]:
    """BLEU-1..4 of the corpus that was counted, as {"bleu1": 0..1, ..., "bleu4": 0..1}; 0 for an empty corpus."""
    words, closest, *counts = statistics.astype(np.int64).tolist()
    found = {}
    for order in range(1, ORDER + 1):
        matched, all_of_them = counts[:order], counts[ORDER : ORDER + order]
        score = BLEU.compute_bleu(matched, all_of_them, words, closest, smooth_method="none", max_ngram_order=order)
        found[f"bleu{order}"] = min(1.0, score.score / 100)  # a perfect corpus scores 1 + 2e-16
    return found


def signature() -> str:
    """sacrebleu's signature of these scores, with its version; the number of references per caption may vary."""
    metric = _metric()
    metric.corpus_score(["a", "a"], _streams([["a"], ["a", "b"]]))  # only a scored corpus gives the metric a signature
    return str(metric.get_signature())


def _metric() -> BLEU:
    """sacrebleu's metric; `force` silences its warning about captions that end in " ."."""
    return BLEU(max_ngram_order=ORDER, tokenize="none", smooth_method="none", force=True)


def _streams(references: Sequence[Sequence[str]]) -> list[Any]:
    """The references as sacrebleu takes them: the first of all captions, then the second ones; None fills the gaps."""
    return list(zip_longest(*references))
