"""Corpus BLEU-1 to BLEU-4 of captions (Papineni et al., ACL 2002), from counts that can be added over ranks.

BLEU follows from ten counts, each a sum over captions. So each rank counts its part of a corpus, and the sums give
exactly the score of the whole corpus. sacrebleu counts and scores, without tokenizer (captions are words joined by
spaces) and without smoothing. The closest reference (the shorter of two) gives the reference length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.exits import BAD_DATA, Failure

ORDER = 4
"""Words in the longest n-grams counted"""


def statistics(captions: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """The ten counts of a corpus or of a part of it.

    They are: words of the captions, words of the closest references, n-grams (n = 1..4) that are also in a reference,
    all n-grams. `references[i]` are one or more sentences for `captions[i]`. Counts are integers far below 2**53, so
    sums of them in float64 are exact in any order. Raises Failure (65) for a caption without a reference.
    """
    if missing := [number for number, sentences in enumerate(references, start=1) if not sentences]:
        message = f"caption {missing[0]} of {len(captions)} has no reference"
        raise Failure(f"{message}; hint: leave such images out when preparing the data", BAD_DATA)
    if not captions:
        return np.zeros(2 + 2 * ORDER)
    if len(captions) != len(references):
        raise ValueError(f"{len(captions)} captions, but references for {len(references)}")
    result = _metric().corpus_score(captions, _streams(references))
    return np.array([result.sys_len, result.ref_len, *result.counts, *result.totals], np.float64)


def scores(statistics: NDArray[np.float64]) -> dict[str, float]:
    """BLEU-1 to BLEU-4 of the counted corpus, as {"bleu1": 0..1, ..., "bleu4": 0..1}; 0 for an empty corpus."""
    bleu = type(_metric())
    words, closest, *counts = statistics.astype(np.int64).tolist()
    result = {}
    for order in range(1, ORDER + 1):
        matched, total = counts[:order], counts[ORDER : ORDER + order]
        score = bleu.compute_bleu(matched, total, words, closest, smooth_method="none", max_ngram_order=order)
        result[f"bleu{order}"] = min(1.0, score.score / 100)  # a perfect corpus scores 1 + 2e-16
    return result


def signature() -> str:
    """sacrebleu's signature of these scores, with its version; the number of references per caption may vary."""
    metric = _metric()
    metric.corpus_score(["a", "a"], _streams([["a"], ["a", "b"]]))  # the signature exists only after a corpus is scored
    return str(metric.get_signature())


def _metric() -> Any:
    """sacrebleu's metric; `force` silences its warning about captions that end in " ."."""
    from sacrebleu.metrics.bleu import BLEU  # slow to load

    return BLEU(max_ngram_order=ORDER, tokenize="none", smooth_method="none", force=True)


def _streams(references: Sequence[Sequence[str]]) -> list[Any]:
    """The references in sacrebleu's layout: the first ones of all captions, then the second ones; None fills gaps."""
    return list(zip_longest(*references))
