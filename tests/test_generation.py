"""Captions by greedy and beam search, compared with exhaustive loops; and equal scores on any number of ranks.

The writer here is a recurrent net in NumPy with few words. Its captions end early, late or never.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import document, failing, launch

from hvdtrain.captions import bleu
from hvdtrain.captions.dataset import CaptionSplit
from hvdtrain.captions.generation import Floats, bleu_scores, write
from hvdtrain.captions.vocabulary import END, PAD, START, UNKNOWN, Vocabulary
from hvdtrain.comm.world import connect
from hvdtrain.system.exits import BAD_CONFIG

LIMIT = 4
WORDS = 4  # without the four specials
SENTENCES = sum(WORDS**length for length in range(LIMIT + 1))


class Tiny:
    """hidden' = tanh(image + A word + B hidden), cell' = its count of steps; probabilities from hidden'."""

    def __init__(self, seed: int, words: int = WORDS, hidden: int = 5, sharpness: float = 2.0) -> None:
        draw = np.random.default_rng(seed)
        size = END + 2 + words
        self.embedding = draw.normal(size=(size, hidden)).astype(np.float32)
        self.recurrent = draw.normal(size=(hidden, hidden)).astype(np.float32)
        self.output = (sharpness * draw.normal(size=(hidden, size))).astype(np.float32)
        self.rows: list[int] = []

    def encode(self, inputs: np.ndarray) -> Floats:
        assert inputs.flags.writeable, "PyTorch warns of memory that it may not write to"
        return inputs.astype(np.float32)

    def step(self, encoded: Floats, words: np.ndarray, hidden: Floats, cell: Floats) -> tuple[Floats, Floats, Floats]:
        assert len(encoded) == len(words) == len(hidden) == len(cell) > 0
        self.rows.append(len(words))
        # One row at a time: to the last bit the same whatever else is in the batch.
        steps = [
            np.tanh(e + self.embedding[w] + h @ self.recurrent) for e, w, h in zip(encoded, words, hidden, strict=True)
        ]
        hidden = np.stack(steps)
        logits = np.stack([h @ self.output for h in hidden])
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        log_probs.setflags(write=False)  # as a framework's memory may be
        return log_probs, hidden, cell + 1


def images(count: int, seed: int = 3, hidden: int = 5) -> np.ndarray:
    """As a memory map is: not to be written to."""
    seen = np.random.default_rng(seed).normal(size=(count, hidden))
    seen.setflags(write=False)
    return seen


def greedy(writer: Tiny, image: np.ndarray, limit: int) -> list[int]:
    """One image, one word at a time."""
    encoded = writer.encode(image[None].copy())
    hidden, cell, words = np.zeros_like(encoded), np.zeros_like(encoded), [START]
    while len(words) <= limit:
        log_probs, hidden, cell = writer.step(encoded, np.array(words[-1:]), hidden, cell)
        allowed = [END, *range(4, log_probs.shape[1])]
        words.append(max(allowed, key=lambda word: log_probs[0, word]))
        if words[-1] == END:
            return words[1:-1]
    return words[1:]


def score(writer: Tiny, image: np.ndarray, words: tuple[int, ...]) -> float:
    """The mean log-probability per token of one sentence and its END."""
    encoded = writer.encode(image[None].copy())
    hidden, cell, total = np.zeros_like(encoded), np.zeros_like(encoded), 0.0
    for now, following in itertools.pairwise((START, *words, END)):
        log_probs, hidden, cell = writer.step(encoded, np.array([now]), hidden, cell)
        total += float(log_probs[0, following])
    return total / (len(words) + 1)


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_of_one_is_greedy_writing(seed: int) -> None:
    writer, seen = Tiny(seed, words=20), images(12, seed)
    assert write(writer, seen, words_limit=9) == [greedy(writer, image, 9) for image in seen]


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_finds_the_best_of_all_sentences(seed: int) -> None:
    writer, seen = Tiny(seed), images(3, seed)
    every = [words for n in range(LIMIT + 1) for words in itertools.product(range(4, 4 + WORDS), repeat=n)]
    assert len(every) == SENTENCES
    best = [max(every, key=lambda words: score(writer, image, words)) for image in seen]
    assert write(writer, seen, words_limit=LIMIT, beam=SENTENCES) == [list(words) for words in best]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_caption_does_not_depend_on_the_others_of_its_batch(beam: int) -> None:
    writer, seen = Tiny(1, words=20), images(30)
    together = write(writer, seen, words_limit=8, beam=beam)
    assert together == write(writer, seen, words_limit=8, beam=beam), "not deterministic"
    for batch_size in (1, 7):
        assert write(writer, seen, words_limit=8, beam=beam, batch_size=batch_size) == together
    shuffled = np.random.default_rng(0).permutation(30)
    assert write(writer, seen[shuffled], words_limit=8, beam=beam) == [together[i] for i in shuffled]


class Fixed:
    """The same probabilities after any word, END's growing or not."""

    def __init__(self, log_probs: list[float]) -> None:
        self.log_probs = np.array(log_probs, np.float32)

    def encode(self, inputs: np.ndarray) -> Floats:
        return np.zeros((len(inputs), 1), np.float32)

    def step(self, encoded: Floats, words: np.ndarray, hidden: Floats, cell: Floats) -> tuple[Floats, Floats, Floats]:
        assert not set(words.tolist()) & {PAD, END, UNKNOWN}
        return np.tile(self.log_probs, (len(words), 1)), hidden, cell


@pytest.mark.parametrize("beam", [1, 2, 5, 100])
def test_specials_are_never_written_and_equals_go_by_the_lower_word(beam: int) -> None:
    likely_specials = [0.0, 0.0, -9.0, 0.0, -1.0, -1.0, -1.0]
    assert write(Fixed(likely_specials), images(2), words_limit=3, beam=beam) == [[4, 4, 4]] * 2
    end_equals_a_word = [-5.0, -5.0, -1.0, -5.0, -1.0, -1.0]
    assert write(Fixed(end_equals_a_word), images(2), words_limit=3, beam=beam) == [[]] * 2


@pytest.mark.parametrize("beam", [1, 3])
def test_a_model_that_diverged_writes_nothing(beam: int) -> None:
    assert write(Fixed([np.nan] * 8), images(3), words_limit=3, beam=beam) == [[]] * 3


def test_long_sentences_are_not_punished_for_their_length() -> None:
    """END costs 1 at once; a sentence of three words costs 0.1 each and then END's 1: 1.3 / 4 is the better mean."""
    assert write(Fixed([-9, -9, -1.0, -9, -0.1]), images(1), words_limit=3, beam=4) == [[4, 4, 4]]


def test_a_beam_of_0_is_an_error_and_no_images_have_no_captions() -> None:
    with failing(BAD_CONFIG, "beam is 0"):
        write(Tiny(0), images(1), beam=0)
    assert write(Tiny(0), images(0)) == []


# --- scoring ----------------------------------------------------------------------------------------------------------


def problem(count: int) -> tuple[Tiny, CaptionSplit, Vocabulary]:
    """Images with one to three references, a mixture of the writer's captions and other words."""
    words = [f"w{number:02d}" for number in range(20)]
    vocabulary = Vocabulary.build([" ".join(words)], 1)
    writer, seen = Tiny(4, words=20), images(count)
    draw = np.random.default_rng(8)
    references = []
    for number, written in enumerate(write(writer, seen)):
        told = [" ".join(draw.choice(words, size=draw.integers(1, 9))) for _ in range(1 + number % 3)]
        references.append((*told, vocabulary.decode(written) + " w00") if number % 2 else tuple(told))
    nothing: Any = np.zeros(0, np.int64)
    split = CaptionSplit(
        inputs=seen,
        names=tuple(str(number) for number in range(count)),
        references=tuple(references),
        image=nothing,
        tokens=np.zeros((0, 2), np.int32),
        lengths=nothing,
    )
    return writer, split, vocabulary


def test_judge_is_the_corpus_bleu_of_what_was_written() -> None:
    writer, split, vocabulary = problem(37)
    world = connect("torch")
    for beam in (1, 3):
        written = [vocabulary.decode(words) for words in write(writer, split.inputs, beam=beam)]
        found = bleu_scores(writer, split, vocabulary, world, beam)
        assert found == bleu.scores(bleu.statistics(written, split.references))
        assert all(0 < value < 1 for value in found.values())
    _, nothing, _ = problem(0)
    assert bleu_scores(writer, nothing, vocabulary, world, 1) == {}


RANKS = """
import json, sys
sys.path.insert(0, {tests!r})
from test_generation import problem
from hvdtrain.captions.generation import bleu_scores
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.world import connect
world = connect("torch", backend="tcp")
found = []
for count in (37, 1):
    writer, split, vocabulary = problem(count)
    found += [bleu_scores(writer, split, vocabulary, world, beam) for beam in (1, 3)]
everyones = world.gather(found)
assert all(each == found for each in everyones)
if world.rank == 0:
    print(json.dumps({{"ranks": world.size, "found": found}}))
world.shutdown()
"""


def test_two_ranks_judge_as_one_does() -> None:
    world = connect("torch")
    alone = []
    for count in (37, 1):
        writer, split, vocabulary = problem(count)
        alone += [bleu_scores(writer, split, vocabulary, world, beam) for beam in (1, 3)]
    done = launch(2, ["-c", RANKS.format(tests=str(Path(__file__).parent))])
    assert document(done) == {"ranks": 2, "found": json.loads(json.dumps(alone))}
