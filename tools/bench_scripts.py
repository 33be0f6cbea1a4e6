#!/usr/bin/env python3
"""Compare a user's script with the workload: the same model, data, batches and strategy, step by step.

    sudo make bench-scripts BENCH_ARGS='--rates 10mbit --hosts 2 --rounds 2'

Creates virtual hosts with a rank each, throttles them to each rate, and runs workload and script (`bare_loop.py`, with
`hvdtrain.torch` or `hvdtrain.tensorflow`) in turn: ResNet-34 at width 0.25, digits of 96x96, 32 images per rank. Needs
root. `script_of_workload` is the ratio of their median step times, and should be at most 1.03. `buckets` compares the
number of buckets that hvdtrain chose with the best of 1, 2 and 4, and should be at most 1.03 too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_network import cluster  # noqa: E402

from hvdtrain import records  # noqa: E402
from hvdtrain.strategies import parse  # noqa: E402
from hvdtrain.system import exits  # noqa: E402
from hvdtrain.system.arguments import Parser  # noqa: E402
from hvdtrain.system.commands import need_root  # noqa: E402
from hvdtrain.system.exits import Failure  # noqa: E402
from hvdtrain.system.rates import parse_rate, show_rate  # noqa: E402

NAMES, UNLIMITED = "abcd", "unlimited"
STRATEGIES = ("hierarchical", "powersgd:rank=4", "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4")
WARMUP = 30
"""Steps that are not counted: a script overlaps from the third step on, and the first 27 try numbers of buckets"""
MODEL = ["--width", "0.25", "--image-size", "96"]
BATCH, TRAINING_IMAGES = 32, 1437


def step_s(options: argparse.Namespace, kind: str, framework: str, hosts: int, strategy: str, buckets: str) -> float:
    """Run the workload or the script, and return the median seconds of a step."""
    names = ",".join(f"{host}:1" for host in NAMES[:hosts])
    python, folder = sys.executable, options.out / "run"
    epochs = str(math.ceil(hosts * BATCH * options.steps / TRAINING_IMAGES))
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "workload":
        program = ["-m", "hvdtrain.resnet", "--framework", framework, *MODEL, "--batch-size", str(BATCH)]
        program += ["--epochs", epochs, "--strategy", strategy, "--run-dir", str(folder)]
        program += ["--checkpoint-epochs", "0", "--evaluate-samples", "64"]
    else:
        program = [str(ROOT / "tools" / "bare_loop.py"), framework, "--library", "hvdtrain", *MODEL]
        program += ["--warmup", str(WARMUP), "--epochs", epochs]
    launcher = ["launch/mpirun.sh", "--quiet", "-np", str(hosts), "-H", names, python, *program]
    command = [f"{ROOT}/tools/cluster.sh", "exec", "--name", options.name, "a", "--", *launcher]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HVDTRAIN_STRATEGY": strategy, "HVDTRAIN_RECORD": "0"}
    if buckets:
        environment |= {"HVDTRAIN_BUCKETS": buckets}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"{kind} with {strategy} on {hosts} hosts: {done.stderr[-800:]}")
    if kind == "script":
        return float(json.loads(done.stdout.splitlines()[-1])["step_s"])
    steps = [each for each in records.read(folder / "metrics" / "rank0000.jsonl") if isinstance(each, records.Step)]
    return statistics.median(
        each.compute_s + (each.communication_s or 0.0) for each in steps[WARMUP:] if each.samples == BATCH
    )


def compared(options: argparse.Namespace, framework: str, rate: str, hosts: int, strategy: str) -> dict[str, Any]:
    runs: dict[str, list[float]] = {}
    variants = [("workload", ""), ("script", ""), *(("workload", each) for each in options.buckets)]
    for _ in range(options.rounds):
        for kind, buckets in variants:
            name = f"{kind} {buckets}".strip()
            runs.setdefault(name, []).append(step_s(options, kind, framework, hosts, strategy, buckets))
    medians = {name: statistics.median(each) for name, each in runs.items()}
    row: dict[str, Any] = {"framework": framework, "rate": rate, "hosts": hosts, "strategy": strategy, **medians}
    row["script_of_workload"] = medians["script"] / medians["workload"]
    if options.buckets:
        row["buckets"] = medians["workload"] / min(medians[f"workload {each}"] for each in options.buckets)
    return row


def chosen_from(*known: str) -> Callable[[str], list[str]]:
    """The type of an option that takes some of these words."""

    def read(text: str) -> list[str]:
        if unknown := [word for word in text.split(",") if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}; hint: choose from {', '.join(known)}")
        return text.split(",")

    return read


def rates(text: str) -> list[str]:
    """`unlimited`, or rates such as 10mbit. Raises Failure (2)."""
    return [word if word == UNLIMITED else show_rate(parse_rate(word)) for word in text.split(",")]


def main(arguments: Sequence[str]) -> int:
    top = Parser(description=__doc__)
    frameworks = ("torch", "tensorflow")
    top.add_argument("--frameworks", type=chosen_from(*frameworks), default=list(frameworks), help="default: both")
    top.add_argument("--rates", type=rates, default=["10mbit", "100mbit", UNLIMITED], help="rates of the links")
    top.add_argument("--hosts", type=chosen_from("2", "3", "4"), default=["2", "4"], help="default: 2,4")
    top.add_argument("--strategy", action="append", help="may be given several times (default: three strategies)")
    top.add_argument("--buckets", type=chosen_from("1", "2", "3", "4"), default=[], help="compare with these numbers")
    top.add_argument("--rounds", type=int, default=3, help="runs of each kind (default: 3)")
    top.add_argument("--steps", type=int, default=70, help="steps of a run (default: 70)")
    top.add_argument("--cpu-share", default="0.45", help="cores of a host (default: 0.45)")
    top.add_argument("--name", default="scripts", help="name of the virtual cluster (default: scripts)")
    top.add_argument("--out", type=Path, default=ROOT / "results" / "scripts", help="folder of the runs")
    top.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = top.parse_args(arguments)
    if options.rounds < 1 or options.steps <= WARMUP:
        top.error(f"--rounds must be 1 or more, and --steps more than {WARMUP}")
    for strategy in options.strategy or ():
        parse(strategy)
    need_root("the virtual cluster")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    cluster("up", "--name", options.name, "--hosts", ",".join(NAMES), "--cpu-share", options.cpu_share)
    try:
        for rate in options.rates:
            cluster_rate = "clear" if rate == UNLIMITED else rate
            subprocess.run([f"{ROOT}/tools/throttle.sh", cluster_rate, "--name", options.name], check=True, cwd=ROOT)
            for framework in options.frameworks:
                for hosts in map(int, options.hosts):
                    for strategy in options.strategy or STRATEGIES:
                        if framework == "tensorflow" and strategy.startswith("local-sgd"):
                            continue  # a tape does not see the update
                        rows.append(compared(options, framework, rate, hosts, strategy))
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        cluster("down", "--name", options.name)
    if options.json:
        print(json.dumps({"schema": "hvdtrain/bench-scripts/1", "rows": rows}))
    else:
        print(pd.DataFrame(rows).to_string(index=False, float_format="{:.3f}".format))
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "bench-scripts")
