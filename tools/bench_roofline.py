"""Time to equal quality over slow links: four hosts against the best single one, by hvdtrain and by hand.

    sudo make bench-roofline BENCH_ARGS='--short'

Trains examples/byte_gpt.py, or with --model resnet examples/fashion_resnet.py, on virtual hosts of half a core. Steps
to the target do not depend on the rate of the links, nor seconds of a step on the seed, so both are measured alone and
multiplied:

  quality  steps, without a limit, to the held-out loss that one host reaches after --batches at its best learning rate.
           Each method searches its learning rate with seed 1, from --lrs outwards, and is judged by --seeds
  time     seconds and sent bytes of a step at each rate (--steps 0: none), --rounds times, between those of one host

A method that does not arrive within the steps of one host has no row: it cannot be faster. Each finished measurement is
a line of records.jsonl in --out, and is not repeated. `rho` is the least time of the network for an fp32 all-reduce, in
steps of one host. `bytes` and `steps` are relative to DDP's.
"""

from __future__ import annotations

import concurrent.futures
import fnmatch
import functools
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import ROOT, UNLIMITED, hosts_up, limit_s, listed, numbers, on_host, options_of, say, show, throttle

from hvdtrain.strategies import presets
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate

HOSTS, ONE = "abcd", "one host"
RIVALS = [
    "ddp",
    "fp16",
    "bucket:1",
    "fp16+bucket:1",
    *(f"accumulate:{k}{hook}" for hook in ("", "+fp16") for k in (2, 4, 8)),
]
RIVALS += [f"{how}:{every}" for how in ("postlocal", "accelerate", "diloco") for every in (2, 4, 8, 16, 32, 64)]
RIVALS += [f"diloco:{every}" for every in ("8/1", "16/2", "16/3", "32/5", "64/12")]
RIVALS += [f"powersgd:{rank}" for rank in (1, 2, 4, 8)] + ["horovod", "horovod+fp16"]
OURS_GPT = {
    "hvdtrain balanced": presets.strategy("balanced", "adam"),
    "hvdtrain every=1": "local-sgd:every=1,staleness=1,lr_scaling=sqrt+int2",
    "hvdtrain every=2": "local-sgd:every=2,lr_scaling=sqrt+int2",
    "hvdtrain fast": presets.strategy("fast", "adam"),
    "hvdtrain every=6": "local-sgd:every=6,staleness=1,parts=6,lr_scaling=sqrt,outer_lr=0.6,outer_momentum=0.6+int2",
    "hvdtrain every=16": "local-sgd:every=16,staleness=1,parts=8,outer_lr=0.8,outer_momentum=0.6+int2",
}
OURS_RESNET = {"hvdtrain balanced": presets.strategy("balanced", "muon"), "hvdtrain int2": "int2"}


class Model(NamedTuple):
    """A script, and the defaults and options with which it is trained."""

    script: str
    out: str
    ours: dict[str, str]
    lrs: list[float]
    batches: int
    before: int
    """Steps of one host that make the weights to begin with (0: new weights)"""
    warm_up: int
    """First steps, with a smaller learning rate"""
    batch: int
    """Samples of each host in a step"""
    evaluate: tuple[int, int]
    """Steps between evaluations of one host, and of four"""


MODELS = {
    "gpt": Model("byte_gpt.py", "roofline", OURS_GPT, [4e-3, 2e-3, 8e-3], 600, 400, 16, 8, (32, 32)),
    "resnet": Model("fashion_resnet.py", "roofline-resnet", OURS_RESNET, [0.06, 0.03, 0.12], 320, 0, 4, 64, (20, 10)),
}
PERIOD = r"(?:every=|accumulate:|postlocal:|accelerate:|diloco:)(\d+)"
MOST_S = 1800
"""Seconds of a run"""
Found = dict[str, tuple[float, dict[int, float]]]
"""By method, its learning rate and the steps of each seed"""


def trained(options: Any, method: str, words: dict[str, object], host: str = "a") -> dict[str, Any]:
    """Run the script by a method on all hosts, or on one, and return the JSON object that it prints. Raises Failure."""
    files = {"text": options.text} if options.text else {}
    if options.start and options.start.exists():
        files["start"] = options.start
    model, evaluate = options.model, options.model.evaluate[method != ONE]
    words = {"batch": model.batch, "warm-up": model.warm_up, "evaluate": evaluate, **files, **words}
    script = [ROOT / "examples" / model.script, *(f"--{key}={value}" for key, value in words.items())]
    ranks, by_hand = (host, []) if method == ONE else (HOSTS, [f"--method={method}"])
    shared = [f"WORLD_SIZE={len(ranks)}", f"MASTER_ADDR={ranks[0]}", f"MASTER_PORT={random.randrange(20_000, 30_000)}"]
    commands = [
        ["env", *shared, f"RANK={rank}", "LOCAL_RANK=0", sys.executable, "-W", "ignore", *script, *by_hand]
        for rank in range(len(ranks))
    ]
    if strategy := model.ours.get(method):
        commands = [["hvdtrain", "launch", "torchrun", "-H", listed(len(HOSTS)), "--strategy", strategy, *script]]
    elif method.startswith("horovod"):
        launcher = ["launch/mpirun.sh", "-H", listed(len(HOSTS)), "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
        commands = [["env", *shared, *launcher, sys.executable, "-W", "ignore", *script, *by_hand]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HVDTRAIN_RECORD": "0", "GLOO_SOCKET_IFNAME": "eth0"}
    log, jobs = options.out / f"{host}.log", []
    try:
        for at, command in zip(ranks, commands, strict=False):
            with (log if at == ranks[0] else log.with_name(f"rank-{at}.log")).open("w") as file:
                inside = on_host(options.name, command, at)
                jobs.append(subprocess.Popen(inside, cwd=ROOT, env=environment, stdout=file, stderr=file))
        jobs[0].wait(MOST_S)
    except subprocess.TimeoutExpired:
        raise Failure(f"{method} has not ended in {MOST_S} s; hint: see {log}") from None
    finally:
        for job in jobs:
            job.terminate()
            job.wait(60)
    if not (found := re.findall(r"^(?:\[.*>:)?(\{.*\})$", log.read_text(), re.MULTILINE)):
        raise Failure(f"{method} has failed: {log.read_text().strip()[-200:]}; hint: see {log}")
    return dict(json.loads(found[-1]))


# --- measurements -----------------------------------------------------------------------------------------------------


def kept(options: Any, **key: object) -> list[dict[str, Any]]:
    return [each for each in options.records if key.items() <= each.items()]


def keep(options: Any, **record: Any) -> dict[str, Any]:
    options.records.append(record | {"load": os.getloadavg()[0]})
    with (options.out / "records.jsonl").open("a") as file:
        file.write(json.dumps(options.records[-1]) + "\n")
    say({name: value for name, value in options.records[-1].items() if name != "curve"})
    return dict(options.records[-1])


def crossing(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Where straight lines between [place, loss] first reach the target."""
    for (place, loss), (later, lower) in itertools.pairwise(curve):
        if lower <= target < loss:
            return place + (later - place) * (loss - target) / (loss - lower)
    return curve[0][0] if curve[0][1] <= target else None


def run(options: Any, method: str, target: float, seed: int, lr: float, most: int) -> dict[str, Any]:
    """The record of a training to the target, or of one that has made `most` steps without reaching it."""
    key = {"kind": "quality", "method": method, "seed": seed, "lr": lr}
    for found in kept(options, **key):
        steps = crossing([each[:2] for each in found["curve"]], target)
        if found["target"] <= target and (steps or found["most"] >= most):
            return found | {"steps": steps}
    key["target"] = target
    curve = trained(options, method, {"lr": lr, "seed": seed, "steps": most, "target": target})["curve"]
    return keep(options, **key, most=most, steps=crossing([each[:2] for each in curve], target), curve=curve)


def arrived(*which: Any) -> float:
    return float(run(*which)["steps"] or math.inf)


def searched(lrs: Sequence[float], most: int, value: Callable[[float, int], float]) -> tuple[float, float]:
    """The learning rate of the least value, and that value. An end that is best is followed by factors of two."""
    found, left = dict[float, float](), [*lrs]
    while left:
        lr = left.pop(0)
        found[lr] = value(lr, math.ceil(min(most, *found.values(), math.inf)))  # a later one need not arrive
        best = min(found, key=found.__getitem__)
        if not left and found[best] < math.inf:
            left = [beyond for end, beyond in ((min(found), best / 2), (max(found), best * 2)) if best == end]
    return best, found[best]


def quality(options: Any) -> tuple[float, Found]:
    """The target, and what has arrived."""
    if options.start and not options.start.exists():
        steps = options.model.before
        trained(options, ONE, {"steps": steps, "evaluate": steps, "save": options.start})
    most, found = options.batches, Found()
    lr, least = searched(options.lrs, most, lambda lr, _: run(options, ONE, 0.0, 1, lr, most)["curve"][-1][1])
    target = options.target or least
    found[ONE] = lr, {seed: arrived(options, ONE, target, seed, lr, 2 * most) for seed in options.seeds}
    for method in options.methods:
        try:
            lr, least = searched(options.lrs, most, functools.partial(arrived, options, method, target, 1))
            if least < math.inf:
                found[method] = lr, {seed: arrived(options, method, target, seed, lr, most) for seed in options.seeds}
        except Failure as failure:  # the others are still worth comparing
            say(str(failure))
    return target, found


def times(options: Any) -> None:
    """Time --steps steps of each method at each rate, in whole periods; 30 s and six exchanges are enough."""
    order = [ONE]
    for number in range(options.rounds):  # every second round in reverse, so that drift favours none
        order += [*options.methods[:: 1 - 2 * (number % 2)], ONE]
    for rate, (place, method) in itertools.product(options.rates, enumerate(order)):
        if len(kept(options, kind="time", method=method, rate=rate)) > order[:place].count(method):
            continue
        period = int(next(iter(re.findall(PERIOD, options.model.ours.get(method, method))), 1))
        sent = max((8 * each["step_bytes"] for each in kept(options, kind="time", method=method)), default=1)
        exchanges = 0 if method == ONE else max(6, 30 * parse_rate(rate) / sent / period)
        count = period * math.ceil(min(options.steps / period, exchanges or math.inf))
        try:
            throttle(options.name, rate)
            with concurrent.futures.ThreadPoolExecutor(len(HOSTS)) as pool:  # one host is the mean of all, at work
                words = {"steps": options.model.warm_up + count, "evaluate": 0}
                train = functools.partial(trained, options, method, words)
                runs = [*pool.map(train, HOSTS if method == ONE else HOSTS[0])]
            means = {name: statistics.mean(each[name] for each in runs) for name in runs[0] if name != "curve"}
            keep(options, kind="time", method=method, rate=rate, **means)
        except Failure as failure:
            say(str(failure))


def seconds(options: Any, method: str, rate: str, steps: float) -> float:
    """To the target: the first steps, which some methods make with exact sums, and the others."""
    return mean(options, method, rate, "first_s") + (steps - options.model.warm_up) * mean(
        options, method, rate, "step_s"
    )


def mean(options: Any, method: str, rate: str, name: str) -> float:
    return statistics.mean(each[name] for each in kept(options, kind="time", method=method, rate=rate))


def table(options: Any, found: Found) -> list[dict[str, Any]]:
    """A row for each rate and method that arrives, with the median, least and greatest speed-up of the seeds."""
    rows = []
    for rate in options.rates:
        timed = {each["method"]: each for each in kept(options, kind="time", rate=rate)}
        of_rate: list[dict[str, Any]] = []
        for method in (each for each in options.methods if each in timed and each in found):
            lr, steps = found[method]
            network_s = limit_s(len(HOSTS), 4 * int(timed[ONE]["parameters"]), parse_rate(rate))
            row = {"rho": network_s / mean(options, ONE, rate, "step_s"), "method": method, "lr": lr}
            row["step_s"] = mean(options, method, rate, "step_s")
            row["bytes"] = timed[method]["step_bytes"] / timed["ddp"]["step_bytes"]
            row["steps"] = statistics.mean(steps.values()) / statistics.mean(found["ddp"][1].values())
            alone = {seed: seconds(options, ONE, rate, count) for seed, count in found[ONE][1].items()}
            gains = [alone[seed] / seconds(options, method, rate, count) for seed, count in steps.items()]
            of_rate.append(row | {"gain": statistics.median(gains), "least": min(gains), "most": max(gains)})
        for names, mark in ((RIVALS, "rival"), (options.model.ours, "ours")):
            if mine := [row for row in of_rate if row["method"] in names]:
                max(mine, key=lambda row: row["gain"])["best"] = mark
        rows += [{"best": "", **row} for row in of_rate]
    return rows


def check(options: Any, target: float, found: Found) -> list[dict[str, Any]]:
    """Train random cells whole at their rate. The prediction is a record before the run begins."""
    cells = [*itertools.product(options.rates, (method for method in found if method != ONE))]
    for rate, method in random.Random(1).sample(cells, min(options.check, len(cells))):
        key, (lr, steps), seed = {"method": method, "rate": rate}, found[method], options.seeds[0]
        if not kept(options, kind="check", **key):
            expected = seconds(options, method, rate, statistics.mean(steps.values()))
            keep(options, kind="prediction", **key, expected_s=expected)
            throttle(options.name, rate)
            words = {"lr": lr, "seed": seed, "steps": options.batches, "target": target}
            curve = trained(options, method, words)["curve"]
            made = crossing([[spent, loss] for _, loss, spent in curve], target)
            keep(options, kind="check", **key, expected_s=expected, made_s=made)
    return kept(options, kind="check")


def learning_rates(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main(arguments: list[str]) -> int:
    rates = ["1gbit", "300mbit", "100mbit", "30mbit", "10mbit"]
    top = options_of(__doc__, "roofline", rates=rates, steps=40, rounds=1, check=0, only=["*"])
    top.add_argument("--model", choices=MODELS, default="gpt", help="(default: gpt)")
    top.add_argument("--out", type=Path, help="folder of the records (default: results/roofline, for resnet another)")
    top.add_argument("--batches", type=int, help="steps of the host whose loss is the target (default: by model)")
    top.add_argument("--lrs", type=learning_rates, help="such as 4e-3,2e-3 (default: three, by model)")
    top.add_argument("--target", type=float, help="held-out loss (default: the loss of one host after --batches)")
    top.add_argument("--seeds", type=numbers, default=[3, 4, 5], help="(default: 3,4,5)")
    top.add_argument("--start", type=Path, help="weights to begin with (default: of 400 steps, for resnet new)")
    top.add_argument("--text", type=Path, help="a file to train on (default: the Bible)")
    top.add_argument("--short", action="store_true", help="one rate, three methods and one seed: about 15 minutes")
    top.add_argument("--dry-run", action="store_true", help="say how many runs are left")
    options = top.parse_args(arguments)
    if missing := [path for path in (options.start, options.text) if path and not path.is_file()]:
        top.error(f"{missing[0]}: no such file")
    model = options.model = MODELS[options.model]
    if options.short:
        options.rates, options.seeds, options.only = ["100mbit"], [3], ["accumulate:4", "hvdtrain balanced"]
    named = [*RIVALS, *model.ours]
    if not (chosen := [name for each in options.only for name in fnmatch.filter(named, each)]):
        top.error(f"--only: no such method; hint: choose from {', '.join(named)}")
    options.methods = ["ddp", *(each for each in dict.fromkeys(chosen) if each != "ddp")]
    options.out = options.out or ROOT / "results" / model.out
    options.lrs, options.batches = options.lrs or model.lrs, options.batches or model.batches
    if options.batches < max(model.evaluate):
        top.error(f"--batches {options.batches}: the first evaluation is after {max(model.evaluate)} steps")
    options.start = options.start or (options.out / "start.pt" if model.before else None)
    written = options.out / "records.jsonl"
    try:
        options.records = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    except ValueError as error:
        raise Failure(f"{written} is damaged ({error}); hint: remove its last line", exits.BAD_DATA) from None
    if options.dry_run:
        searches = (len(options.methods) + 1) * (len(options.lrs) + len(options.seeds))
        runs = options.rounds * (len(options.methods) + 1) + 1
        counts = [("quality", searches, 45), ("time", runs * len(options.rates), 40)]
        cells = [*itertools.product((ONE, *options.methods), (UNLIMITED, *options.rates))]
        done = [each["kind"] for each in options.records if (each["method"], each.get("rate", UNLIMITED)) in cells]
        left = [(kind, max(0, count - done.count(kind)), each_s) for kind, count, each_s in counts]
        return show(options, [{"phase": kind, "runs": runs, "minutes": runs * s / 60} for kind, runs, s in left])
    options.out.mkdir(parents=True, exist_ok=True)
    with hosts_up(options.name, len(HOSTS)):
        target, found = quality(options)
    if not options.steps:
        return show(
            options, [{"method": method, "lr": lr, "steps": [*steps.values()]} for method, (lr, steps) in found.items()]
        )
    with hosts_up(options.name, len(HOSTS), 0.5):
        times(options)
        checked = check(options, target, found)
    return show(options, [*table(options, found), *checked])
