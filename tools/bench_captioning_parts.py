"""Captions and features per second in one process, for `tools/bench_captioning.py`.

    OMP_NUM_THREADS=1 python tools/bench_captioning_parts.py torch --run results/RUN --rounds 3

Captions: of 256 test pictures, greedily by the model of a run that trained on `shapes`, all together and one by one.
Features: `features.extract` of random pictures through VGG16 with random weights, and the same network called with
nothing round it. Prints one JSON line: of each way what it made per second, by round.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import in_turn

from hvdtrain import world
from hvdtrain.captions import features, generation, trained
from hvdtrain.captions.load import load
from hvdtrain.models import vgg16

PICTURES = 256
FEATURE_BATCH = 16


def network(framework: str) -> features.Encoder:
    """VGG16 with random weights."""
    arrays = vgg16.random_weights(0)
    if framework == "torch":
        from hvdtrain.models.vgg16_torch import Vgg16Torch

        return Vgg16Torch(arrays, "torchvision")
    from hvdtrain.models.vgg16_tf import Vgg16TF

    return Vgg16TF(arrays, "torchvision")


def per_second(ways: Mapping[str, Callable[[], object]], count: int, rounds: int) -> dict[str, list[float]]:
    """How much of `count` each way does per second, by round; the first call of each is not counted."""

    def timed(number: int, way: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        way()
        return count / (time.perf_counter() - began_s)

    found = in_turn({name: partial(timed, way=way) for name, way in ways.items()}, rounds + 1, "parts")
    return {name: each[1:] for name, each in found.items()}


def bench_captions(framework: str, run: Path, rounds: int) -> dict[str, Any]:
    """Captions per second written together and one by one, and of how many pictures both say the same."""
    writer, _ = trained.model(trained.open_run(run), framework, None)
    inputs = np.array(load("shapes").test.inputs[:PICTURES])
    said: dict[str, list[list[int]]] = {}
    ways = {
        "batched": lambda: said.update(batched=generation.write(writer, inputs)),
        "one_by_one": lambda: said.update(one_by_one=[generation.write(writer, one[None])[0] for one in inputs]),
    }
    found: dict[str, Any] = {**per_second(ways, len(inputs), rounds)}
    same = sum(together == alone for together, alone in zip(*said.values(), strict=True))
    return found | {"pictures": len(inputs), "same": same}


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
        found = per_second({"ours": ours, "bare": bare}, count, rounds)
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
