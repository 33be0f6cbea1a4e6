"""Extracts features with all ranks, step after step; rank 0 prints what each rank did as JSON. For test_features.py.

argv: JSON with `images`, and `steps`: each a list with the cache folder of every rank; ranks with one folder are taken
to be on one host. A step may be {"caches": [...], "cut": folder} to cut off what that cache holds first, or
{"caches": [...], "seeds": [...]} to give ranks different images.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.captions.features import extract
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.world import connect
from hvdtrain.models.vgg16 import FEATURES
from hvdtrain.system.exits import Failure

SIDE = 8


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


class Encoder:
    """A frozen layer whose weights are whole numbers, so that no sum depends on the size of a batch."""

    def __init__(self) -> None:
        self.weight = np.random.default_rng(1).integers(-2, 3, (SIDE * SIDE * 3, FEATURES)).astype(np.float32)
        self.images = 0

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.images += len(images)
        return np.maximum(images.reshape(len(images), -1).astype(np.float32) @ self.weight, 0)


def step(
    world: Communicator, count: int, caches: list[str], cut: str = "", seeds: list[int] | None = None
) -> dict[str, Any]:
    mine = caches[world.rank]
    world.host, world.local_rank = f"host-of-{mine}", caches[: world.rank].count(mine)
    os.environ["XDG_CACHE_HOME"] = mine
    if cut and world.rank == 0:
        for file in Path(cut).rglob("*.npy"):
            file.write_bytes(file.read_bytes()[:-1])
    world.gather(None)
    made: list[Encoder] = []

    def encoder() -> Encoder:
        made.append(Encoder())
        return made[-1]

    try:
        features = extract(
            images(count, seeds[world.rank] if seeds else 0), encoder, key={"encoder": "whole"}, world=world
        )
        digest = hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()
    except Failure as failure:
        digest = f"{failure.code}: {failure}"
    left = sorted(path.suffix for path in Path(mine).rglob("*.*") if path.is_file())
    report = {"digest": digest, "images": [encoder.images for encoder in made], "left": left}
    return {name: [each[name] for each in world.gather(report)] for name in report}


def main() -> None:
    asked = json.loads(sys.argv[1])
    world = connect("torch", backend="tcp")
    steps = [each if isinstance(each, dict) else {"caches": each} for each in asked["steps"]]
    reports = [step(world, asked["images"], **each) for each in steps]
    if world.rank == 0:
        sys.stdout.write(json.dumps({"steps": reports}) + "\n")
    world.shutdown()


if __name__ == "__main__":
    main()
