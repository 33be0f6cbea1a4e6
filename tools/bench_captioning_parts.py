"""Captions and features per second in one process, for `tools/bench_captioning.py`.

    OMP_NUM_THREADS=1 python tools/bench_captioning_parts.py torch --run results/RUN --rounds 3

Captions: of 256 test pictures, greedily by the model of a run that trained on `shapes`; all together, one after the
other, and one after the other with the whole caption read anew for each word, as Lucero's (2022) script does. Features:
`features.extract` of random pictures through VGG16 with random weights, and the same network called with nothing round
it. Rounds take turns, every other one backwards. Prints one JSON line: of each way what it made per second, by round.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain import world
from hvdtrain.captions import features, generation, trained
from hvdtrain.captions.load import load
from hvdtrain.captions.vocabulary import END, START
from hvdtrain.models import vgg16

PICTURES = 256
FEATURE_BATCH = 16
Words = list[list[int]]


def one_by_one(writer: generation.Writer, inputs: np.ndarray) -> Words:
    """Greedy writing as one would write it down: a picture, a word, the next word."""
    written = []
    for picture in inputs:
        encoded = writer.encode(picture[None])
        hidden, cell, words = np.zeros_like(encoded), np.zeros_like(encoded), [START]
        while len(words) <= generation.WORDS_LIMIT:
            log_probs, hidden, cell = writer.step(encoded, np.array(words[-1:]), hidden, cell)
            log_probs = log_probs.copy()
            log_probs[:, generation.UNWRITTEN] = -np.inf
            if (word := int(log_probs.argmax())) == END:
                break
            words.append(word)
        written.append(words[1:])
    return written


def word_by_word(model: Any, framework: str, inputs: np.ndarray) -> Words:
    """The same, but everything said so far is read again, and the picture seen again, for each word."""
    chances = _torch_chances(model) if framework == "torch" else _tensorflow_chances(model, inputs)
    written = []
    for picture in inputs:
        words = [START]
        while len(words) <= generation.WORDS_LIMIT:
            last = chances(picture[None], np.array([[*words, END]])).copy()  # END stands where the next word will
            last[list(generation.UNWRITTEN)] = -np.inf
            if (word := int(last.argmax())) == END:
                break
            words.append(word)
        written.append(words[1:])
    return written


def _torch_chances(model: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    import torch

    key = torch.zeros(2, dtype=torch.int64)
    model.eval()

    def chances(picture: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(model(torch.from_numpy(picture), torch.from_numpy(tokens), key)[0][-1].numpy())

    return chances


def _tensorflow_chances(model: Any, inputs: np.ndarray) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    import tensorflow as tf

    key = tf.zeros(2, tf.int64)
    types = [tf.TensorSpec((None, *inputs.shape[1:]), tf.uint8), tf.TensorSpec((None, None), tf.int64)]
    graph = tf.function(lambda picture, tokens: model(picture, tokens, key, False)[0][-1], input_signature=types)
    return lambda picture, tokens: np.asarray(graph(tf.constant(picture), tf.constant(tokens)).numpy())


def network(framework: str) -> features.Encoder:
    """VGG16 with random weights."""
    arrays = vgg16.random_weights(0)
    if framework == "torch":
        from hvdtrain.models.vgg16_torch import Vgg16Torch

        return Vgg16Torch(arrays, "torchvision")
    from hvdtrain.models.vgg16_tf import Vgg16TF

    return Vgg16TF(arrays, "torchvision")


def in_turn(ways: Mapping[str, Callable[[], object]], count: int, rounds: int) -> dict[str, list[float]]:
    """How much of `count` each way does per second, by round; the first call of each is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            began_s = time.perf_counter()
            ways[name]()
            if number:
                found[name].append(count / (time.perf_counter() - began_s))
    return found


def bench_captions(framework: str, run: Path, rounds: int) -> dict[str, Any]:
    """Captions per second of the three ways, and of how many pictures all of them say the same."""
    left = trained.open_run(run)
    writer, _ = trained.model(left, framework, None)
    inputs = np.array(load("shapes").test.inputs[:PICTURES])
    said: dict[str, Words] = {}
    ways = {
        "batched": lambda: said.update(batched=generation.write(writer, inputs)),
        "one_by_one": lambda: said.update(one_by_one=one_by_one(writer, inputs)),
        "word_by_word": lambda: said.update(word_by_word=word_by_word(writer, framework, inputs)),
    }
    found: dict[str, Any] = {**in_turn(ways, len(inputs), rounds)}
    same = sum(len({tuple(words) for words in three}) == 1 for three in zip(*said.values(), strict=True))
    words = sum(map(len, said["batched"])) / len(inputs)
    return found | {"pictures": len(inputs), "same": same, "words_per_caption": words}


def bench_features(framework: str, count: int, rounds: int) -> dict[str, Any]:
    """Images per second of both, with their cache in a folder of their own that is removed."""
    pictures = np.random.default_rng(0).integers(0, 256, (count, *vgg16.IMAGE_SIZE, 3), dtype=np.uint8)
    encode, alone = network(framework), world.World(framework)
    calls = iter(range(1000))

    def bare() -> None:
        for first in range(0, count, FEATURE_BATCH):
            encode(pictures[first : first + FEATURE_BATCH])

    def ours() -> None:  # never the same key, or the cache would answer
        key = {"call": next(calls)}
        features.extract(pictures, lambda: encode, key=key, world=alone, batch_size=FEATURE_BATCH)

    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        found = in_turn({"ours": ours, "bare": bare}, count, rounds)
    return {**found, "images": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=("torch", "tensorflow"))
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of hvdtrain.captioning on shapes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=48, help="for VGG16 (default: 48)")
    asked = parser.parse_args()
    found = {"captions": bench_captions(asked.framework, asked.run, asked.rounds)}
    found["features"] = bench_features(asked.framework, asked.images, asked.rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
