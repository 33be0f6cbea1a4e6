"""Words as numbers, captions as batches, and the drawn scenes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from hvdtrain.captions import shapes
from hvdtrain.captions.dataset import CaptionDataset, CaptionSplit, assemble
from hvdtrain.captions.prepared import load
from hvdtrain.captions.vocabulary import END, PAD, SPECIALS, START, UNKNOWN, Vocabulary, clean
from hvdtrain.data.loader import Loader, shard


@pytest.fixture(scope="module")
def scenes() -> CaptionDataset:
    return load("shapes")


# Words.


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A dog's well-known ball .", "a dog's well known ball"),
        ("  Two\tCHILDREN,\u00a0running!\r\n", "two children running"),
        ("It’s the dogs’ \u201cball\u201d", "it's the dogs ball"),
        (
            "Ein Cafe\u0301 in K\u00d6LN, 2 \u0441\u043e\u0431\u0430\u043a\u0438",
            "ein caf\u00e9 in k\u00f6ln 2 \u0441\u043e\u0431\u0430\u043a\u0438",
        ),
        ("snake_case & <start> 3.5", "snake case start 3 5"),
        ("\u0915\u0941\u0924\u094d\u0924\u093e!", "\u0915\u0941\u0924\u094d\u0924\u093e"),
        ("... -- !?", ""),
    ],
)
def test_a_caption_becomes_its_words(caption: str, words: str) -> None:
    assert clean(caption) == clean(words) == words


words_ = st.text(st.sampled_from("abcde"), min_size=1, max_size=3)
sentences_ = st.lists(st.lists(words_, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=12)


@given(sentences_, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_vocabulary_is_the_words_by_count_and_alphabet(sentences: list[str], least: int, random: object) -> None:
    vocabulary = Vocabulary.build(sentences, least)
    words = [word for sentence in sentences for word in sentence.split()]
    assert vocabulary.words[:4] == SPECIALS and len(vocabulary) == len(vocabulary.words)
    assert set(vocabulary.words[4:]) == {word for word in words if words.count(word) >= least}
    ranks = [(-words.count(word), word) for word in vocabulary.words[4:]]
    assert ranks == sorted(ranks)
    random.shuffle(sentences)  # type: ignore[attr-defined]
    assert Vocabulary.build(sentences, least).words == vocabulary.words
    if len(vocabulary) > len(SPECIALS):
        assert Vocabulary.from_json(vocabulary.as_json(), "there").words == vocabulary.words
    for sentence in sentences:
        ids = vocabulary.encode(sentence)
        assert (ids[0], ids[-1]) == (START, END) and PAD not in ids
        known = [word if words.count(word) >= least else SPECIALS[UNKNOWN] for word in sentence.split()]
        assert vocabulary.decode(ids).split() == known
        assert vocabulary.decode([*ids[1:], 4, PAD, PAD]).split() == known, "nothing counts behind the END"


# Batches.


def split(lengths: list[int], images: int = 7) -> CaptionSplit:
    """Captions of these lengths, of images with different values."""
    told: list[list[str]] = [[] for _ in range(images)]
    for number, length in enumerate(lengths):
        told[number * images // len(lengths)].append(" ".join(["w"] * length))
    return assemble(
        name="made",
        vocabulary=Vocabulary(["w"]),
        images=np.arange(images, dtype=np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 2, 2, 3), np.uint8),
        names=[f"p{number}" for number in range(images)],
        references=told,
        counts=(images, 0, 0),
        fingerprint="",
    ).train


def cuts(count: int, batch: int) -> list[int]:
    return [*range(0, count, batch), count]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_is_a_permutation_whatever_the_borders(lengths: list[int], batch: int, seed: int) -> None:
    made, borders = split(lengths), cuts(len(lengths), batch)
    order = made.order(np.random.default_rng(seed), borders)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert np.array_equal(order, made.order(np.random.default_rng(seed), borders)), "of the stream's state alone"


def test_a_batch_holds_what_the_split_says() -> None:
    made = split([3, 1, 2, 5, 4, 1, 6], images=3)
    everyones = np.array([6, 0, 3, 1])
    batch = made.batch(everyones[1:], everyones, 2**63 + 5)
    inputs, tokens, key = batch.arrays
    assert inputs.dtype == np.uint8 and inputs[:, 0, 0, 0].tolist() == made.image[[0, 3, 1]].tolist()
    assert tokens.dtype == np.int64 and tokens.shape == (3, 1 + 5 + 1)
    assert tokens[2].tolist() == [START, 4, END, PAD, PAD, PAD, PAD]
    assert (key.dtype, key.tolist()) == (np.int64, [2**31, 5])
    assert (batch.weight, batch.total_weight) == (4 + 6 + 2, 4 + 6 + 2 + 7), "words and END"
    assert made.batch(everyones[:1], everyones, None).arrays[2].tolist() == [0, 0]
    assert len(made) == 7 and [len(told) for told in made.references] == np.bincount(made.image).tolist()


def test_the_loaders_weights_are_targets_and_exact(scenes: CaptionDataset) -> None:
    """Over uneven ranks and both kinds of epochs: each step's ranks add up, and an epoch has every target once."""
    part = scenes.validation
    loaders = [Loader(part, global_batch=300, rank=rank, size=3, seed=1, shares=[1, 2, 3]) for rank in range(3)]
    shards = [shard(part, batch_size=100, rank=rank, size=3) for rank in range(3)]
    for ranks in (zip(*(loader.epoch(0) for loader in loaders), strict=True), itertools.zip_longest(*shards)):
        targets = 0
        for step in ranks:
            batches = [batch for batch in step if batch is not None]
            assert {batch.total_weight for batch in batches} == {sum(batch.weight for batch in batches)}
            assert all(np.count_nonzero(batch.arrays[1][:, 1:]) == batch.weight for batch in batches)
            targets += batches[0].total_weight
        assert targets == part.lengths.sum()


# The drawn scenes.


def test_shapes_are_the_same_every_time_and_as_described(scenes: CaptionDataset) -> None:
    again = load("shapes")
    assert scenes.fingerprint == again.fingerprint and np.array_equal(scenes.images, again.images)
    parts = (scenes.train, scenes.validation, scenes.test)
    assert [(len(part.names), len(part)) for part in parts] == [(4000, 20000), (500, 2500), (500, 2500)]
    assert scenes.images.shape == (5000, 64, 64, 3) and scenes.images.dtype == np.uint8
    assert len(scenes.vocabulary) == 42
    assert len({five[0] for part in parts for five in part.references}) == 5000, "no scene is in two splits"
    told = [sentence for part in parts for five in part.references for sentence in five]
    assert {len(sentence.split()) for sentence in told} == {9, 10, 14}
    assert all(clean(sentence) == sentence for sentence in told)
    assert not any(UNKNOWN in part.tokens for part in parts), "every word is learnt"


def test_the_sentences_are_true_of_the_pixels(scenes: CaptionDataset) -> None:
    """Compares colour, number, size and shape of each group in the image with the sentence."""
    singular = {plural: one for one, plural in shapes.SHAPES.items()}
    for image, told in zip(scenes.test.inputs, scenes.test.references, strict=True):
        words = told[0].split()
        stacked = "above" in words
        halves = (image[:32], image[32:]) if stacked else (image[:, :32], image[:, 32:])
        for half, (number, size, colour, noun) in zip(halves, (words[:4], words[-4:]), strict=True):
            mask = (half == shapes.COLOURS[colour]).all(-1)
            assert (half[~mask] < 100).all(), "nothing else is in this half"
            things, count = ndimage.label(mask)
            assert shapes.NUMBERS[count - 1] == number
            width = 2 * shapes.SIZES[size] + 1
            for box in ndimage.find_objects(things):
                thing = mask[box]
                assert thing.shape in [(width, width), (width - 1, width), (width, width - 1)]
                shape = singular.get(noun, noun)
                filled = {"square": (1, 1), "circle": (0.7, 0.9), "triangle": (0.45, 0.65), "cross": (0.2, 0.52)}[shape]
                assert filled[0] <= thing.mean() <= filled[1]
                assert thing[0, 0] == (shape == "square") and thing[-1, 0] == (shape in ("square", "triangle"))
