"""Four hosts against one for an unmodified Trainer script, under plain DDP, its hook, LocalSGD and hvdtrain.ddp.

    sudo make bench-trainers BENCH_ARGS='--parts lora,drop'

Runs `tests/programs/trainer_gpt.py` on four virtual hosts of half a core: a GPT of 10 M parameters, one sample of 128
bytes per rank and step. One host is the mean of the four, all of which train alone at that time. Links are limited
after the first step, so that no run pays for the first broadcast of the weights. Parts:

  lora       LoRA at 100 Mbit/s
  drop       LoRA at 30 Mbit/s, with 6 Mbit/s for a minute in the middle
  full       all weights at 10 Mbit/s
  unlimited  step time of hvdtrain.ddp against plain DDP, without a limit
  loss       held-out loss at equal tokens against exact sums
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from bench import ROOT, UNLIMITED, hosts_up, in_turn, known, limit_s, listed, on_host, options_of, say, show, throttle

from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate

HOSTS, CPU_SHARE, TOKENS = "abcd", 0.5, 128
ALONE, PLAIN, LOOPS = "alone", "plain", ("powersgd", "localsgd")
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
        command = ["hvdtrain", "launch", "torchrun", "-H", listed(4), "--strategy", how, *script]
        if host:
            command = [sys.executable, *script]
        elif how in (PLAIN, *LOOPS):
            store = ["--nnodes=4", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=a:29511"]
            mpirun = ["launch/mpirun.sh", "--quiet", "-np", "4", "-H", listed(4), "-x", "GLOO_SOCKET_IFNAME=eth0"]
            command = [*mpirun, "torchrun", *store, *script, *(["--loop", how] if how in LOOPS else [])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HVDTRAIN_RECORD": "0", "HF_HUB_OFFLINE": "1"}
        self._how, self._log = how, options.out / f"{how.replace(':', '_')}{host}.log"
        self._process = subprocess.Popen(
            on_host(options.name, command, host or "a"),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
        )
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


def speed(options: Any, how: str, rates: Sequence[tuple[str, float]], *words: str) -> tuple[float, int, int]:
    """Steps per second of four hosts, or the mean of hosts that train ALONE; their number; trained parameters.

    `rates`: of the links, each with its seconds.
    """
    throttle(options.name, UNLIMITED)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job(options, how, *words, host=host)) for host in (HOSTS if how == ALONE else [""])]
        for job in jobs:
            job.train(1, MOST_S)
        throttle(options.name, rates[0][0])
        for job in jobs:
            job.train(WARM_UP, MOST_WARM_UP_S)
        began = time.monotonic()
        for rate, seconds in rates:
            throttle(options.name, rate)
            time.sleep(seconds)
        made = [job.rate(began) for job in jobs]
    return statistics.mean(each for each, _ in made), sum(count for _, count in made), int(jobs[0].values["PARAMETERS"])


def against(options: Any, part: str, hows: Sequence[str], rates: Sequence[tuple[str, float]], *words: str) -> None:
    """Tokens per second of four hosts against one."""
    if words not in options.alone:
        options.alone[words] = speed(options, ALONE, [(UNLIMITED, options.seconds)], *words)
    alone, _, parameters = options.alone[words]
    ring_s = limit_s(len(HOSTS), 4 * parameters, parse_rate(rates[0][0]))
    report(options, part, f"one host (an fp32 all-reduce: {ring_s * alone:.2f} of its steps)", TOKENS * alone, 1.0)
    for how in hows:
        try:
            four, steps, _ = speed(options, how, rates, *words)
        except Failure as failure:  # the others are still worth comparing
            say(str(failure))
            report(options, part, f"{how}: failed", math.nan, math.nan)
            continue
        report(options, part, f"{how} ({steps} steps)", 4 * TOKENS * four, 4 * four / alone)


def report(options: Any, part: str, how: str, value: float, ratio: float) -> None:
    options.rows.append({"part": part, "how": how, "value": value, "ratio": ratio})
    say(options.rows[-1])


def unlimited(options: Any) -> None:
    """Step times without a limit, in turn."""
    for words in ([], ["--full"]):
        variants = {
            how: lambda how=how, words=words: 1 / speed(options, how, [(UNLIMITED, options.seconds)], *words)[0]
            for how in (PLAIN, "hierarchical")
        }
        runs = in_turn(variants, options.rounds)
        plain = statistics.median(runs[PLAIN])
        for how, each in runs.items():
            median = statistics.median(each)
            shown = f"{' '.join([how, *words])}, s of a step ({min(each):.3f} to {max(each):.3f})"
            report(options, UNLIMITED, shown, median, median / plain)


def loss(options: Any) -> None:
    """Held-out losses at equal tokens."""
    throttle(options.name, UNLIMITED)
    for seed in map(str, range(1, options.seeds + 1)):
        found = {}
        for how in (PLAIN, LORA):
            with Job(options, how, "--seed", seed, "--steps", str(options.loss_steps)) as job:
                job.wait(600)
            if "LOSS" not in job.values:
                raise job.failure("no loss")
            found[how] = job.values["LOSS"]
            report(options, "loss", f"{how}, seed {seed}", found[how], found[how] / found[PLAIN])


MINUTE = (("30mbit", 15), ("6mbit", 60), ("30mbit", 15))
PARTS = {
    "lora": lambda options: against(options, "lora", (PLAIN, *LOOPS, LORA, "auto"), [("100mbit", options.seconds)]),
    "drop": lambda options: against(options, "drop", (LORA, "auto"), MINUTE),
    "full": lambda options: against(options, "full", (PLAIN, FULL), [("10mbit", 30)], "--full"),
    "unlimited": unlimited,
    "loss": loss,
}


def main(arguments: list[str]) -> int:
    out = ROOT / "results" / "trainers"
    top = options_of(__doc__, "trainers", parts=[*PARTS], seconds=15.0, rounds=2, seeds=3, loss_steps=64, out=out)
    top.add_argument("--script", type=str.split, default=[], help="more options of the script, such as '--layers 2'")
    options = top.parse_args(arguments)
    known(top, options.parts, [*PARTS])
    options.out.mkdir(parents=True, exist_ok=True)
    options.rows, options.alone = [], {}
    with hosts_up(options.name, len(HOSTS), CPU_SHARE):
        for part in options.parts:
            PARTS[part](options)
    return show(options, options.rows)
