#!/usr/bin/env python3
"""The captioning model beside its yardsticks: training, writing captions, features, bytes, and several hosts.

    python tools/bench_captioning.py                   # everything; as root with virtual hosts, about an hour in all
    python tools/bench_captioning.py --quick --json    # one round, one document

Two ranks on this machine train an epoch on the drawn scenes, in turn by our entry point and by tools/bare_captioner.py;
every other round backwards. Samples are words that are predicted. Captions and features are then made by one process of
one thread (tools/bench_captioning_parts.py), and with root the model is trained over virtual hosts as well
(tools/bench_captioning_hosts.py). Figures are medians over rounds, the smallest and the largest in brackets.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_captioning_hosts as hosts
from bench import HEADS, RANKS, ROOT, aligned, launch, ratios, spread
from PIL import Image

from hvdtrain.captions.load import load
from hvdtrain.data.loader import Loader

BATCH = 32
SCENES = 60
"""Pictures behind the frozen encoder"""
Table = list[tuple[str, str, str, str]]


# 1. What is measured.


def measure_loop(framework: str, rounds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Ours and the bare loop, in turn: what `bench.launch` returned, round by round."""
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "bare": []}
    flags = ["--framework", framework, "--epochs", "1", "--beam", "1", "--json"]
    for number in range(rounds):
        for name in list(found) if number % 2 == 0 else reversed(found):
            if name == "bare":
                found[name].append(launch(["tools/bare_captioner.py", framework]))
                continue
            run = loop_run(folder, framework, number)
            found[name].append(launch(["-m", "hvdtrain.captioning", *flags, "--run-dir", str(run)]))
        tell(f"{framework}: training, round {number + 1}/{rounds} done")
    return found


def loop_run(folder: Path, framework: str, number: int) -> Path:
    return folder / f"{framework}-{number}"


def measure_parts(framework: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Captions and features per second; captions by the model that the first round has trained."""
    command = [sys.executable, "tools/bench_captioning_parts.py", framework, "--rounds", str(rounds)]
    command += ["--run", str(loop_run(folder, framework, 0))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench: {' '.join(command)} failed:\n{done.stderr[-3000:]}")
    tell(f"{framework}: captions and features done")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def padding_percent() -> float:
    """Share of the positions of an epoch's batches, of all ranks, at which no word is."""
    split, words, positions = load("shapes").train, 0, 0
    for rank in range(RANKS):
        for batch in Loader(split, global_batch=BATCH * RANKS, rank=rank, size=RANKS, seed=0).epoch(0):
            words += int(batch.weight)
            positions += batch.arrays[1][:, 1:].size
    return 100 * (1 - words / positions)


def frozen_flags(framework: str, folder: Path) -> list[str]:
    """Of a run with VGG16 frozen (random weights): its data are some of the drawn scenes as files, made if need be."""
    source = folder / "scenes"
    if not source.exists():
        source.mkdir()
        split = load("shapes").train
        with (source / "captions.txt").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["image", "caption"])
            for number in range(SCENES):
                Image.fromarray(split.inputs[number]).save(source / f"{number}.png")
                table.writerows([f"{number}.png", sentence] for sentence in split.references[number])
    return ["--framework", framework, "--data", f"flickr8k:{source}", "--encoder", "vgg16", "--weights", "random"]


def measure_frozen(framework: str, folder: Path) -> dict[str, Any]:
    """A run with VGG16 frozen: what it sent per step, and the limit for what is trained."""
    flags = [*frozen_flags(framework, folder), "--epochs", "1", "--beam", "1", "--checkpoint-epochs", "0", "--json"]
    seen = launch(["-m", "hvdtrain.captioning", *flags, "--run-dir", str(folder / f"{framework}-frozen")])
    tell(f"{framework}: frozen encoder done")
    return {
        "parameters": seen["parameters"],
        "bytes_per_step": seen["bytes_sent"] / seen["steps"],
        "limit_bytes": 2 * (RANKS - 1) / RANKS * 4 * seen["parameters"],
    }


def tell(line: str) -> None:
    print(f"bench: captioning: {line}", file=sys.stderr, flush=True)


# 2. How it is shown.


def loop_rows(found: dict[str, list[dict[str, Any]]]) -> Table:
    def values(name: str, field: str, factor: float = 1.0) -> list[float]:
        return [factor * run[field] for run in found[name] if run.get(field) is not None]

    bare_mb = spread(values("bare", "peak_rss_bytes", 1e-6), 0)
    return [
        ("words/s, ours", spread(values("ours", "samples_per_s"), 0), "", ""),
        ("words/s, bare Horovod loop", spread(values("bare", "samples_per_s"), 0), "", ""),
        ("ours / bare, round by round", spread(ratios(found, "ours", "bare"), 3), "1 = bare loop", ">= 0.98"),
        ("waiting for data, % of time", spread(values("ours", "data_share", 100), 2), "0", "<= 1"),
        ("peak RSS per rank, MB", spread(values("ours", "peak_rss_bytes", 1e-6), 0), f"bare {bare_mb}", ""),
    ]


def parts_rows(found: dict[str, Any]) -> Table:
    made, seen = found["captions"], found["features"]

    def times(name: str) -> str:
        return spread([ours / theirs for ours, theirs in zip(made["batched"], made[name], strict=True)], 1)

    shares = [ours / bare for ours, bare in zip(seen["ours"], seen["bare"], strict=True)]
    return [
        (f"captions/s, {made['pictures']} pictures together", spread(made["batched"], 0), "", ""),
        ("  times one by one, state kept", times("one_by_one"), spread(made["one_by_one"], 0), ">= 10"),
        ("  times one by one, read anew per word", times("word_by_word"), spread(made["word_by_word"], 0), ""),
        ("  captions that all three write alike", f"{made['same']} of {made['pictures']}", "", "all"),
        (f"features, images/s of {seen['images']}", spread(seen["ours"], 2), f"bare {spread(seen['bare'], 2)}", ""),
        ("features / bare VGG16, round by round", spread(shares, 3), "1 = bare forward", ">= 0.95"),
    ]


def frozen_rows(found: dict[str, Any]) -> Table:
    what = f"MB per step of rank 0, VGG16 frozen, {RANKS} ranks"
    limit = f"limit {found['limit_bytes'] / 1e6:.3f}"
    return [(what, f"{found['bytes_per_step'] / 1e6:.3f}", limit, "the limit")]


def table(results: dict[str, Any]) -> str:
    """All of it, a line each."""
    rows: list[Sequence[str]] = [HEADS]
    for framework, found in results["frameworks"].items():
        of_it = [*loop_rows(found["loop"]), *parts_rows(found["parts"]), *frozen_rows(found["frozen"])]
        rows += [(f"{framework}: {what}", *cells) for what, *cells in of_it]
    rows.append(("padding, % of positions", f"{results['padding_percent']:.2f}", "0", "< 10"))
    return aligned([*rows, *hosts.rows(results["hosts"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair (default: 5)")
    parser.add_argument("--frameworks", default="torch,tensorflow", help="which to measure")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    results: dict[str, Any] = {"schema": "hvdtrain/bench-captioning/1", "ranks": RANKS, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # of the prepared scenes and their features
        results["padding_percent"], results["frameworks"], results["hosts"] = padding_percent(), {}, []
        for framework in asked.frameworks.split(","):
            results["frameworks"][framework] = {
                "loop": measure_loop(framework, rounds, folder),
                "parts": measure_parts(framework, rounds, folder),
                "frozen": measure_frozen(framework, folder),
            }
        if os.geteuid():
            tell("virtual hosts need root: left out")
        else:
            frozen = frozen_flags("torch", folder)
            results["hosts"] = hosts.measure(min(rounds, 3), folder, frozen=frozen)
    print(json.dumps(results) if asked.json else table(results))


if __name__ == "__main__":
    main()
