"""BLEU: the same as an independent one in fractions, and additive over parts."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from conftest import failing

from hvdtrain.captions import bleu
from hvdtrain.system.exits import BAD_DATA

WORDS = ["a", "an", "the", "red", "blue", "green", "circle", "square", "above", "below", "left", "two"]
Corpus = tuple[list[str], list[list[str]]]


def corpus(seed: int) -> Corpus:
    """Sentences of 0 to 12 words of a small vocabulary, with 1 to 5 references; some seeds share no word with them."""
    draw = random.Random(seed)
    words = WORDS[: draw.randint(2, len(WORDS))]
    strange = ["x", "y", "z"]

    def sentence(longest: int, least: int = 0) -> list[str]:
        return draw.choices(words, k=draw.randint(least, longest))

    captions, references = [], []
    for _ in range(draw.randint(1, 12)):
        told = [sentence(12, 1) for _ in range(draw.randint(1, 5))]
        kind = draw.random()
        caption = sentence(12) if kind < 0.4 else draw.choice(told)[: draw.randint(0, 12)]
        if seed % 10 == 0:
            caption = draw.choices(strange, k=draw.randint(0, 6))
        captions.append(" ".join(caption))
        references.append([" ".join(each) for each in told])
    return captions, references


def grams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def independent(captions: Sequence[str], references: Sequence[Sequence[str]], longest: int) -> float:
    """BLEU as Papineni et al. (2002) define it, exact up to the root and the exponential."""
    product, written, wanted = Fraction(1), 0, 0
    for order in range(1, longest + 1):
        matched = total = 0
        for caption, several in zip(captions, references, strict=True):
            mine = grams(caption.split(), order)
            most: Counter[tuple[str, ...]] = Counter()
            for reference in several:
                most |= grams(reference.split(), order)
            matched += (mine & most).total()
            total += mine.total()
        product *= Fraction(matched, total) if total else 0
    for caption, several in zip(captions, references, strict=True):
        length = len(caption.split())
        written += length
        wanted += min((abs(len(each.split()) - length), len(each.split())) for each in several)[1]
    if not product:
        return 0.0
    penalty = 1.0 if written >= wanted else math.exp(float(1 - Fraction(wanted, written)))
    return penalty * float(product) ** (1 / longest)


def test_scores_equal_an_independent_bleu_and_counts_add_up_on_200_random_corpora() -> None:
    zeros = perfect = 0
    for seed in range(200):
        captions, references = corpus(seed)
        counts = bleu.statistics(captions, references)
        borders = [len(captions) * part // 3 for part in range(4)]
        parts = [bleu.statistics(captions[start:end], references[start:end]) for start, end in pairwise(borders)]
        np.testing.assert_array_equal(sum(parts), counts)
        found = bleu.scores(counts)
        for order in range(1, 5):
            ours = found[f"bleu{order}"]
            assert ours == pytest.approx(independent(captions, references, order), abs=1e-12), (seed, order)
            zeros += ours == 0
            perfect += ours > 0.9
    assert zeros > 40, "no corpus without matches was tried"
    assert perfect > 10, "no corpus with nearly all matches was tried"


def test_perfect_captions_score_one_silence_nothing_and_an_image_needs_references() -> None:
    sentences = ["a red circle above a blue square", "two green squares"]
    assert set(bleu.scores(bleu.statistics(sentences, [[s] for s in sentences])).values()) == {1.0}
    assert set(bleu.scores(bleu.statistics(["", ""], [[s] for s in sentences])).values()) == {0.0}
    assert set(bleu.scores(bleu.statistics([], [])).values()) == {0.0}
    with failing(BAD_DATA, "caption 2 of 2"):
        bleu.statistics(["a", "b"], [["a"], []])


def test_the_signature_says_what_was_measured() -> None:
    fields = dict(field.split(":") for field in bleu.signature().split("|"))
    assert fields.pop("version")
    assert fields == {"nrefs": "var", "case": "mixed", "eff": "no", "tok": "none", "smooth": "none"}
