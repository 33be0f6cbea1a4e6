#!/usr/bin/env python3
"""How fast images are prepared, beside bare Pillow on the same files, and what a batch costs beside a step.

    python tools/bench_data.py                # a table
    python tools/bench_data.py --json         # one document

Bare Pillow opens, converts, resizes and makes an array of each image on all cores, and keeps nothing. Ours also looks
for bad files, writes, syncs and checksums the result, and both pay for starting their processes. Rounds take turns and
the medians are compared, so that other work on the machine weighs on both alike; where there is much of it, the
processor time per image is the steadier figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hvdtrain.data.images import ImagesConfig, prepare
from hvdtrain.data.loader import Loader
from hvdtrain.data.prepared import open_images

SIZE = (197, 148)  # what the fish of Cruz Varona (2021), 590x445, are prepared to
STEP_S = 0.1


def bare(path: str) -> int:
    return int(np.asarray(Image.open(path).convert("L").resize(SIZE, Image.Resampling.BILINEAR)).nbytes)


def make_images(folder: Path, count: int) -> list[str]:
    """JPEGs of 590x445 with smooth colours and a camera's noise; 32 different ones, copied."""
    rng = np.random.default_rng(0)
    kinds = []
    for _ in range(32):
        smooth = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).resize((590, 445))
        noisy = np.clip(np.asarray(smooth) + rng.normal(0, 6, (445, 590, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "kind.jpg", quality=90)
        kinds.append((folder / "kind.jpg").read_bytes())
    (folder / "kind.jpg").unlink()
    paths = [folder / f"class{number % 9}" / f"{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(kinds[number % len(kinds)])
    return [str(path) for path in paths]


def bench_preparing(folder: Path, count: int, rounds: int, cores: int) -> dict[str, Any]:
    """Images per second of both, in turns."""
    (folder / "in").mkdir()
    paths = make_images(folder / "in", count)
    pillow, ours = [], []
    for number in range(rounds):
        config = ImagesConfig(
            source=str(folder / "in"),
            destination=str(folder / f"out{number}"),
            size="{}x{}".format(*SIZE),
            gray=True,
            workers=cores,
        )
        pillow.append(measure(lambda: all_bare(paths, cores)))
        ours.append(measure(partial(prepare, config)))
    ratios = [theirs / own for theirs, own in zip(np.array(pillow), np.array(ours), strict=True)]
    wall, processor = np.median(ratios, axis=0)
    return {
        "cores": cores,
        "images": count,
        "rounds": rounds,
        "pillow_images_per_s": round(count / statistics.median(wall_s for wall_s, _ in pillow), 1),
        "hvdtrain_images_per_s": round(count / statistics.median(wall_s for wall_s, _ in ours), 1),
        "ratio": round(float(wall), 3),
        "pillow_cpu_ms_per_image": round(statistics.median(cpu_s for _, cpu_s in pillow) / count * 1e3, 3),
        "hvdtrain_cpu_ms_per_image": round(statistics.median(cpu_s for _, cpu_s in ours) / count * 1e3, 3),
        "cpu_ratio": round(float(processor), 3),
    }


def all_bare(paths: list[str], cores: int) -> None:
    with get_context("spawn").Pool(cores) as pool:
        sum(pool.imap_unordered(bare, paths, chunksize=64))
        pool.close()
        pool.join()


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, processor) seconds of it and of the processes that it starts."""
    began_s, before_s = time.perf_counter(), processor_s()
    work()
    return time.perf_counter() - began_s, processor_s() - before_s


def processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def bench_loading(folder: Path, batch_size: int) -> dict[str, Any]:
    """What making a batch takes, and how long a step of 100 ms waits for it when it is prefetched."""
    loader = Loader(open_images(folder).train, global_batch=batch_size, rank=0, size=1, seed=0)
    made_s, waited_s = [], []
    for epoch in range(3):
        batches = loader._batches(epoch, 0)
        for _ in range(loader.steps_per_epoch):
            began_s = time.perf_counter()
            next(batches)
            made_s.append(time.perf_counter() - began_s)
    batches = loader.epoch(0)
    for _ in range(loader.steps_per_epoch):
        began_s = time.perf_counter()
        next(batches)
        waited_s.append(time.perf_counter() - began_s)
        busy_until_s = time.perf_counter() + STEP_S
        while time.perf_counter() < busy_until_s:  # NumPy frees the interpreter, as a framework's step does
            np.dot(BUSY, BUSY)
    wait_s = statistics.fmean(waited_s[1:])
    return {
        "batch_size": batch_size,
        "batch_ms": round(statistics.median(made_s) * 1e3, 2),
        "batch_percent_of_100_ms": round(statistics.median(made_s) / STEP_S * 100, 2),
        "wait_ms": round(wait_s * 1e3, 3),
        "wait_percent_of_step": round(wait_s / (STEP_S + wait_s) * 100, 3),
    }


BUSY = np.ones((256, 256), np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as name:
        preparing = bench_preparing(Path(name), flags.images, flags.rounds, cores)
        loading = bench_loading(Path(name) / "out0", flags.batch_size)
    if flags.json:
        print(json.dumps({"schema": "hvdtrain.bench.data/1", "preparing": preparing, "loading": loading}))
        return
    print("preparing ({images} JPEGs of 590x445 to 197x148 gray, {cores} cores)".format(**preparing))
    for title, name in (("bare Pillow", "pillow"), ("hvdtrain", "hvdtrain")):
        speed, cost = preparing[f"{name}_images_per_s"], preparing[f"{name}_cpu_ms_per_image"]
        print(f"  {title:<12}  {speed:8.1f} images/s   {cost:.3f} ms of processor per image")
    print(f"  of bare Pillow's speed: {preparing['ratio']} by the clock, {preparing['cpu_ratio']} by processor time")
    print("loading (batches of {batch_size} from a float16 memory map)".format(**loading))
    print(
        f"  one batch     {loading['batch_ms']:8.2f} ms         {loading['batch_percent_of_100_ms']} % of a 100 ms step"
    )
    print(f"  waited        {loading['wait_ms']:8.3f} ms         {loading['wait_percent_of_step']} % of a step")


if __name__ == "__main__":
    main()
