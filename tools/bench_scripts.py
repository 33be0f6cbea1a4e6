"""A user's script compared with the workload: the same model, data, batches and strategy, step by step.

    sudo make bench-scripts BENCH_ARGS='--rates 10mbit --hosts 2 --rounds 2'

Workload and script (`bare_loop.py`, with `hvdtrain.torch` or `hvdtrain.tensorflow`) run in turn on hosts of 0.45 of a
core with a rank each: ResNet-34 at width 0.25, digits of 96x96, 32 images per rank. `script_of_workload` is the ratio
of their median step times. `buckets` compares the number of buckets that hvdtrain chose with the best of --buckets.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import UNLIMITED, document, hosts_up, in_turn, known, listed, on_host, options_of, say, show, throttle

from hvdtrain import records
from hvdtrain.strategies import parse

STRATEGIES = ["hierarchical", "powersgd:rank=4", "local-sgd:every=2,staleness=1+powersgd:rank=12,bits=4"]
FRAMEWORKS = ["torch", "tensorflow"]
WARMUP = 30
"""Steps that are not counted: a script overlaps from the third step on, and the first 27 try numbers of buckets"""
MODEL = ["--width", "0.25", "--image-size", "96"]
BATCH, TRAINING_IMAGES, CORES = 32, 1437, 0.45


def step_s(options: Any, framework: str, hosts: int, strategy: str, variant: str) -> float:
    """Run the script, or the workload with `variant` buckets, and return the median seconds of a step."""
    epochs = str(math.ceil(hosts * BATCH * options.steps / TRAINING_IMAGES))
    extra = {"HVDTRAIN_STRATEGY": strategy, "HVDTRAIN_RECORD": "0"}
    extra |= {"HVDTRAIN_BUCKETS": variant} if variant.isdecimal() else {}
    launcher = ["launch/mpirun.sh", "--quiet", "-np", hosts, "-H", listed(hosts), sys.executable]
    if variant == "script":
        program = [
            "tools/bare_loop.py",
            framework,
            "--library",
            "hvdtrain",
            *MODEL,
            "--warmup",
            WARMUP,
            "--epochs",
            epochs,
        ]
        return float(document(on_host(options.name, [*launcher, *program]), **extra)["step_s"])
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", "hvdtrain.resnet", "--framework", framework, *MODEL, "--batch-size", BATCH, "--epochs", epochs]
        program += ["--strategy", strategy, "--checkpoint-steps", "0", "--evaluate-samples", "64", "--json"]
        document(on_host(options.name, [*launcher, *program, "--run-dir", f"{folder}/run"]), **extra)
        found = records.read(Path(folder, "run/metrics/rank0000.jsonl"))
        steps = [each for each in found if isinstance(each, records.Step)][WARMUP:]
    return statistics.median(each.compute_s + (each.communication_s or 0.0) for each in steps if each.samples == BATCH)


def main(arguments: list[str]) -> int:
    rates = ["10mbit", "100mbit", UNLIMITED]
    top = options_of(__doc__, "scripts", rates=rates, hosts=[2, 4], frameworks=FRAMEWORKS, rounds=3, steps=70)
    top.add_argument("--strategy", action="append", help="may be given several times (default: three strategies)")
    top.add_argument("--buckets", type=lambda text: text.split(","), default=[], help="compare with these numbers")
    options = top.parse_args(arguments)
    known(top, options.frameworks, FRAMEWORKS)
    known(top, options.buckets, ["1", "2", "3", "4"])
    if options.steps <= WARMUP:
        top.error(f"--steps must be more than {WARMUP}")
    for strategy in options.strategy or ():
        parse(strategy)
    rows = []
    with hosts_up(options.name, max(options.hosts), CORES):
        for rate in options.rates:
            throttle(options.name, rate)
            for framework, hosts, strategy in (
                (framework, hosts, strategy)
                for framework in options.frameworks
                for hosts in options.hosts
                for strategy in options.strategy or STRATEGIES
                if framework == "torch" or not strategy.startswith("local-sgd")  # a tape does not see the update
            ):
                run = functools.partial(step_s, options, framework, hosts, strategy)
                variants = {name: functools.partial(run, name) for name in ("workload", "script", *options.buckets)}
                medians = {name: statistics.median(each) for name, each in in_turn(variants, options.rounds).items()}
                row = {"framework": framework, "rate": rate, "hosts": hosts, "strategy": strategy, **medians}
                row["script_of_workload"] = medians["script"] / medians["workload"]
                if options.buckets:
                    row["buckets"] = medians["workload"] / min(medians[each] for each in options.buckets)
                rows.append(row)
                say(row)
    return show(options, rows)
