#!/usr/bin/env python3
"""The captioning model beside its yardsticks: training, writing captions, features of a frozen encoder.

    python tools/bench_captioning.py                   # everything
    python tools/bench_captioning.py --quick --json    # one round, one document

Two ranks on this machine train an epoch on the drawn scenes, in turn by our entry point and by tools/bare_loop.py;
every other round backwards. Samples are captions. Captions and features are then made by one process of
one thread: captions of 256 test images, greedily by the model of the first round, all together and one by one;
features of random images through VGG16 with random weights by `features.extract`, and by the same network called with
nothing round it. Figures are medians over rounds, the smallest and the largest in brackets.
Several hosts: `hvdtrain sweep launch/sweeps/lucero2022_captioning.toml`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import HEADS, RANKS, ROOT, aligned, in_turn, launch, loop_rows, spread

IMAGES = 256
FEATURE_BATCH = 16


def loop_run(folder: Path, framework: str, number: int) -> Path:
    return folder / f"{framework}-{number}"


def measure_loop(framework: str, rounds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Ours and the bare loop: what `bench.launch` returned, round by round."""
    flags = ["--framework", framework, "--epochs", "1", "--beam", "1", "--json"]

    def ours(number: int) -> dict[str, Any]:
        return launch(["-m", "hvdtrain.captioning", *flags, "--run-dir", str(loop_run(folder, framework, number))])

    ways = {"ours": ours, "bare": lambda number: launch(["tools/bare_loop.py", framework, "captioner"])}
    return in_turn(ways, rounds, f"captioning, {framework}")


def measure_parts(framework: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Captions and features per second; captions by the model that the first round has trained."""
    command = [sys.executable, __file__, "--frameworks", framework, "--rounds", str(rounds)]
    command += ["--run", str(loop_run(folder, framework, 0))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench: {' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def per_second(ways: Mapping[str, Callable[[], object]], count: int, rounds: int) -> dict[str, list[float]]:
    """How much of `count` each way does per second, by round; the first call of each is not counted."""

    def timed(number: int, way: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        way()
        return count / (time.perf_counter() - began_s)

    found = in_turn({name: partial(timed, way=way) for name, way in ways.items()}, rounds + 1, "parts")
    return {name: each[1:] for name, each in found.items()}


def bench_captions(framework: str, run: Path, rounds: int) -> dict[str, Any]:
    """Captions per second written together and one by one, and of how many images both say the same."""
    from hvdtrain.captions import generation, trained
    from hvdtrain.captions.load import load

    writer, _ = trained.model(trained.open_run(run), framework, None)
    inputs = np.array(load("shapes").test.inputs[:IMAGES])
    said: dict[str, list[list[int]]] = {}
    ways = {
        "batched": lambda: said.update(batched=generation.write(writer, inputs)),
        "one_by_one": lambda: said.update(one_by_one=[generation.write(writer, one[None])[0] for one in inputs]),
    }
    found: dict[str, Any] = {**per_second(ways, len(inputs), rounds)}
    same = sum(together == alone for together, alone in zip(*said.values(), strict=True))
    return found | {"images": len(inputs), "same": same}


def bench_features(framework: str, rounds: int, count: int = 48) -> dict[str, Any]:
    """Images per second of both, with their cache in a folder of their own that is removed."""
    from hvdtrain.captions import features, frozen
    from hvdtrain.comm import world
    from hvdtrain.models import vgg16

    images = np.random.default_rng(0).integers(0, 256, (count, *vgg16.IMAGE_SIZE, 3), dtype=np.uint8)
    encode, alone = frozen.encoder(frozen.RANDOM, framework), world.World(framework)
    calls = iter(range(1000))

    def bare() -> None:
        for first in range(0, count, FEATURE_BATCH):
            encode(images[first : first + FEATURE_BATCH])

    def ours() -> None:  # never the same key, or the cache would answer
        key = {"call": next(calls)}
        features.extract(images, lambda: encode, key=key, world=alone, batch_size=FEATURE_BATCH)

    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        found = per_second({"ours": ours, "bare": bare}, count, rounds)
    return {**found, "images": count}


def parts_rows(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    made, seen = found["captions"], found["features"]
    times = [together / alone for together, alone in zip(made["batched"], made["one_by_one"], strict=True)]
    shares = [ours / bare for ours, bare in zip(seen["ours"], seen["bare"], strict=True)]
    return [
        (f"captions/s, {made['images']} images together", spread(made["batched"], 0), "", ""),
        ("  times one call for each", spread(times, 1), spread(made["one_by_one"], 0), ">= 10"),
        ("  captions that both write alike", f"{made['same']} of {made['images']}", "", "all"),
        (f"features, images/s of {seen['images']}", spread(seen["ours"], 2), f"bare {spread(seen['bare'], 2)}", ""),
        ("features / bare VGG16, round by round", spread(shares, 3), "1 = bare forward", ">= 0.95"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair (default: 5)")
    parser.add_argument("--frameworks", default="torch,tensorflow", help="which to measure")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    if asked.run:
        parts = {"captions": bench_captions(asked.frameworks, asked.run, rounds)}
        print(json.dumps(parts | {"features": bench_features(asked.frameworks, rounds)}))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # of the prepared scenes and their features
        for framework in asked.frameworks.split(","):
            found[framework] = {"loop": measure_loop(framework, rounds, folder)}
            found[framework]["parts"] = measure_parts(framework, rounds, folder)
    if asked.json:
        about = {"schema": "hvdtrain/bench-captioning/2", "ranks": RANKS, "cores": os.cpu_count()}
        print(json.dumps({**about, "frameworks": found}))
        return
    rows: list[tuple[str, ...]] = [HEADS]
    for framework, each in found.items():
        of_it = [*loop_rows(each["loop"], "captions"), *parts_rows(each["parts"])]
        rows += [(f"{framework}: {what}", *cells) for what, *cells in of_it]
    print(aligned(rows))


if __name__ == "__main__":
    main()
