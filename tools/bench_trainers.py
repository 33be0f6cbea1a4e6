#!/usr/bin/env python3
"""Compare four hosts with one for an unmodified Trainer script, under plain DDP, its hook, LocalSGD and hvdtrain.ddp.

    sudo make bench-scripts BENCH=trainers BENCH_ARGS='--parts lora,drop'

Creates four virtual hosts of half a core and runs `tests/programs/trainer_gpt.py` on them: a GPT of 10 M parameters,
one sample of 128 bytes per rank and step. One host is the mean of the four, all of which train alone at that time.
Links are limited after the first step, so that no run pays for the first broadcast of the weights. Needs root. Parts:

  lora       LoRA at 100 Mbit/s                                                goal: 3.5 hosts
  drop       LoRA at 30 Mbit/s, with 6 Mbit/s for a minute in the middle       goal: 3.0 hosts
  full       all weights at 10 Mbit/s                                          goal: 3.5 hosts
  unlimited  step time of hvdtrain.ddp against plain DDP, without a limit      goal: 1.03
  loss       held-out loss at equal tokens against exact sums                  goal: within 1 %
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_network import cluster  # noqa: E402

from hvdtrain.system import exits  # noqa: E402
from hvdtrain.system.arguments import Parser  # noqa: E402
from hvdtrain.system.commands import need_root  # noqa: E402
from hvdtrain.system.exits import Failure  # noqa: E402
from hvdtrain.system.rates import all_reduce_s, goodput_both_ways, parse_rate  # noqa: E402

HOSTS, CPU_SHARE, TOKENS = "abcd", 0.5, 128
UNLIMITED, ALONE, PLAIN, LOOPS = "unlimited", "alone", "plain", ("powersgd", "localsgd")
LORA = "local-sgd:every=8,staleness=4+int8"
FULL = "local-sgd:every=8,staleness=4+powersgd:rank=8,bits=4"
WARM_UP = 16
"""Steps that are not counted: PowerSGD begins, `auto` chooses"""
MOST_S, MOST_WARM_UP_S = 180, 30


class Job:
    """A script on the virtual hosts, which is read while it runs."""

    def __init__(self, options: Any, how: str, *words: str, host: str = "") -> None:
        """`how`: a strategy of hvdtrain.ddp, PLAIN DDP, or a loop of the script. `host`: only this one."""
        script = [str(ROOT / "tests/programs/trainer_gpt.py"), *options.script, *words]
        hosts = ",".join(f"{name}:1" for name in HOSTS)
        if host:
            command = [sys.executable, *script]
        elif how in (PLAIN, *LOOPS):
            store = ["--nnodes=4", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={HOSTS[0]}:29511"]
            command = [
                "launch/mpirun.sh",
                "--quiet",
                "-np",
                "4",
                "-H",
                hosts,
                "-x",
                "GLOO_SOCKET_IFNAME=eth0",
                "torchrun",
            ]
            command += [*store, *script, *(["--loop", how] if how in LOOPS else [])]
        else:
            command = ["hvdtrain", "launch", "torchrun", "-H", hosts, "--strategy", how, *script]
        on_host = [f"{ROOT}/tools/cluster.sh", "exec", "--name", options.name, host or HOSTS[0], "--", *command]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HVDTRAIN_RECORD": "0", "HF_HUB_OFFLINE": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._how, self._log = how, options.out / f"{how.replace(':', '_')}{host}.log"
        pipe, log = subprocess.PIPE, self._log.open("w")
        self._process = subprocess.Popen(on_host, cwd=ROOT, env=environment, stdout=pipe, stderr=log, text=True)
        self.steps: list[float] = []
        """When the first rank had made each step"""
        self.values: dict[str, float] = {}
        """Numbers that the script has printed"""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if (found := re.search(r"STEP (\S+) (\d+)$", line)) and int(found[2]) > len(self.steps):
                self.steps.append(float(found[1]))
            elif found := re.search(r"(LOSS|PARAMETERS) (\S+)$", line):
                self.values[found[1]] = float(found[2])

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self.wait(MOST_S)

    def wait(self, seconds: float) -> None:
        self._process.wait(seconds)
        self._reader.join()

    def failure(self, what: str) -> Failure:
        return Failure(f"{self._how}: {what}: {self._log.read_text()[-800:]}")

    def train(self, until: int, most_s: float) -> None:
        """Wait until so many steps have been made, but not longer than `most_s`. Raises Failure if none was made."""
        end = time.monotonic() + most_s
        while len(self.steps) < until and time.monotonic() < end and self._process.poll() is None:
            time.sleep(0.05)
        if not self.steps:
            raise self.failure("it did not begin")

    def rate(self, since: float) -> tuple[float, int]:
        """Steps per second since then, and their number. Raises Failure if there is none."""
        at = bisect.bisect_right(self.steps, since) - 1
        self.train(max(0, at) + 2, MOST_S)  # if a step takes longer
        made = self.steps[max(0, at) :]
        if len(made) < 2:
            raise self.failure(f"no step in {time.monotonic() - since:.0f} s")
        return (len(made) - 1) / (made[-1] - made[0]), len(made) - 1


def throttle(options: Any, rate: str) -> None:
    words = [f"{ROOT}/tools/throttle.sh", "clear" if rate == UNLIMITED else rate, "--name", options.name]
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def speed(options: Any, how: str, rates: Sequence[tuple[str, float]], *words: str) -> tuple[float, int, int]:
    """Steps per second of four hosts, or the mean of hosts that train ALONE; their number; trained parameters.

    `rates`: of the links, each with its seconds.
    """
    throttle(options, UNLIMITED)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(options, how, *words, host=host)) for host in (HOSTS if how == ALONE else [""])]
        for job in jobs:
            job.train(1, MOST_S)
        throttle(options, rates[0][0])
        for job in jobs:
            job.train(WARM_UP, MOST_WARM_UP_S)
        began = time.monotonic()
        for rate, seconds in rates:
            throttle(options, rate)
            time.sleep(seconds)
        made = [job.rate(began) for job in jobs]
    return statistics.mean(each for each, _ in made), sum(count for _, count in made), int(jobs[0].values["PARAMETERS"])


def against(options: Any, part: str, hows: Sequence[str], rates: Sequence[tuple[str, float]], *words: str) -> None:
    """Tokens per second of four hosts against one."""
    if words not in options.alone:
        options.alone[words] = speed(options, ALONE, [(UNLIMITED, options.seconds)], *words)
    alone, _, parameters = options.alone[words]
    ring_s = all_reduce_s(4 * parameters, len(HOSTS), goodput_both_ways(parse_rate(rates[0][0])))
    report(options, part, f"one host (an fp32 all-reduce: {ring_s * alone:.2f} of its steps)", TOKENS * alone, 1.0)
    for how in hows:
        try:
            four, steps, _ = speed(options, how, rates, *words)
        except Failure as failure:  # the others are still worth comparing
            print(failure, file=sys.stderr, flush=True)
            report(options, part, f"{how}: failed", math.nan, math.nan)
            continue
        report(options, part, f"{how} ({steps} steps)", 4 * TOKENS * four, 4 * four / alone)


def report(options: Any, part: str, how: str, value: float, ratio: float) -> None:
    options.rows.append({"part": part, "how": how, "value": value, "ratio": ratio})
    print(json.dumps(options.rows[-1]), file=sys.stderr, flush=True)


def unlimited(options: Any) -> None:
    """Step times without a limit, in turn."""
    for words in ([], ["--full"]):
        runs: dict[str, list[float]] = {PLAIN: [], "hierarchical": []}
        for _ in range(options.rounds):
            for how, each in runs.items():
                each.append(1 / speed(options, how, [(UNLIMITED, options.seconds)], *words)[0])
        plain = statistics.median(runs[PLAIN])
        for how, each in runs.items():
            median = statistics.median(each)
            shown = f"{' '.join([how, *words])}, s of a step ({min(each):.3f} to {max(each):.3f})"
            report(options, UNLIMITED, shown, median, median / plain)


def loss(options: Any) -> None:
    """Held-out losses at equal tokens."""
    throttle(options, UNLIMITED)
    for seed in map(str, range(1, options.seeds + 1)):
        found = {}
        for how in (PLAIN, LORA):
            with Job(options, how, "--seed", seed, "--steps", str(options.loss_steps)) as job:
                job.wait(600)
            if "LOSS" not in job.values:
                raise job.failure("no loss")
            found[how] = job.values["LOSS"]
            report(options, "loss", f"{how}, seed {seed}", found[how], found[how] / found[PLAIN])


def main(arguments: Sequence[str]) -> int:
    top = Parser(description=__doc__)
    top.add_argument("--parts", default=",".join(PARTS), help="(default: all)")
    top.add_argument("--seconds", type=float, default=15, help="measured in each run (default: 15)")
    top.add_argument("--rounds", type=int, default=2, help="runs of each kind without a limit (default: 2)")
    top.add_argument("--seeds", type=int, default=3, help="of the losses (default: 3)")
    top.add_argument("--loss-steps", type=int, default=64, help="steps before the loss is measured (default: 64)")
    top.add_argument("--script", type=str.split, default=[], help="more options of the script, such as '--layers 2'")
    top.add_argument("--name", default="trainers", help="name of the virtual cluster (default: trainers)")
    top.add_argument("--out", type=Path, default=ROOT / "results" / "trainers", help="folder of the logs")
    top.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = top.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - set(PARTS):
        top.error(f"--parts {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    need_root("the virtual cluster")
    options.out.mkdir(parents=True, exist_ok=True)
    options.rows, options.alone = [], {}
    cluster("up", "--name", options.name, "--hosts", ",".join(HOSTS), "--cpu-share", str(CPU_SHARE))
    try:
        for part in options.parts.split(","):
            PARTS[part](options)
    finally:
        cluster("down", "--name", options.name)
    if options.json:
        print(json.dumps({"schema": "hvdtrain/bench-trainers/1", "rows": options.rows}))
    else:
        print(pd.DataFrame(options.rows).to_string(index=False, float_format="{:.3f}".format))
    return exits.OK


MINUTE = (("30mbit", 15), ("6mbit", 60), ("30mbit", 15))
PARTS = {
    "lora": lambda options: against(options, "lora", (PLAIN, *LOOPS, LORA, "auto"), [("100mbit", options.seconds)]),
    "drop": lambda options: against(options, "drop", (LORA, "auto"), MINUTE),
    "full": lambda options: against(options, "full", (PLAIN, FULL), [("10mbit", 30)], "--full"),
    "unlimited": unlimited,
    "loss": loss,
}

if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "bench-trainers")
