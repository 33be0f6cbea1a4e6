"""Steps over slow links: data parallelism and pipeline stages.

    sudo make bench-stages BENCH_ARGS='--rates 10mbit --models resnet32 --rows plain-2,powersgd-2,stages2'

Runs the rows in turn on virtual hosts with half a core. Runs are stored in --out. Runs that are stored already, or
whose transfers would take longer than --most-s, are skipped, so the same command resumes. `step_over_ideal` is the
time of a step divided by the slowest stage's computation / (1 - bubble). `perceptron` has weights of half of
--memory-mb, the memory of a host (control groups v1). With gradients and momentum it needs 1.5 times that memory.
`captioner` has one stage for images and one for words.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import NAMES, ROOT, hosts_up, known, listed, on_host, options_of, say, show, throttle

from hvdtrain import strategies
from hvdtrain.models import captioner, mlp, resnet
from hvdtrain.models.layers import Layer, Shapes
from hvdtrain.pipeline import partition
from hvdtrain.pipeline.mesh import Mesh
from hvdtrain.pipeline.schedule import NUMBER_BYTES
from hvdtrain.strategies.cost import Layout
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import goodput_both_ways, parse_rate

MICRO = 4
MOUNT = Path("/sys/fs/cgroup/memory")
PLAIN = ["horovodrun", "--gloo", "--gloo-timeout-seconds", "1800"]
ROWS: dict[str, tuple[int, list[str]]] = {
    "alone": (1, []),
    "plain-2": (2, []),
    "hierarchical-2": (2, ["--strategy", "hierarchical"]),
    "powersgd-2": (2, ["--strategy", "powersgd:rank=4"]),
    "stages2": (2, ["--stages", "2"]),
    "stages2x2-powersgd": (4, ["--stages", "2", "--strategy", "powersgd:rank=4"]),
}
"""Hosts and flags by name"""
MODELS = ("resnet32", "resnet128", "captioner", "perceptron", "small")


def workload(model: str, options: argparse.Namespace) -> list[str]:
    """Return the module and its flags. `small` is for tests."""
    flags = ["--epoch-samples", str(64 * options.steps), "--evaluate-samples", "16", "--global-batch-size", "64"]
    if model == "captioner":
        return ["hvdtrain.captioning", *flags]
    if model.startswith("resnet"):
        return ["hvdtrain.resnet", "--image-size", model.removeprefix("resnet"), *flags]
    width = 2048 if model == "small" else math.isqrt(options.memory_mb * 1_000_000 // 2 // 4 // 8)
    layers = ",".join([str(width)] * (2 if model == "small" else 9))
    return ["hvdtrain.tabular", "--layers", layers, "--global-batch-size", "100"]


# --- the formula ------------------------------------------------------------------------------------------------------


def layers_of(about: dict[str, Any]) -> tuple[Sequence[Layer], Shapes]:
    """Return the layers and the shapes of the trained arrays, given a manifest or a dry run."""
    if about["model"]["name"] == "mlp":
        net = mlp.MLPSpec(**about["model"]["spec"])
        return mlp.layers(net), mlp.parameters(net)
    if about["model"]["name"] == "captioner":
        words = captioner.CaptionerSpec(**about["model"]["spec"])
        return captioner.layers(words, 1), captioner.parameters(words)  # no words cross the stages
    pictures = resnet.ResNetSpec(**about["model"]["spec"])
    return resnet.layers(pictures, *about["data"]["image_shape"][:2]), resnet.parameters(pictures)


def formulas(about: dict[str, Any], hosts: int) -> dict[str, float]:
    """Return the payload per step over the busiest link, one way: `step_bytes` in training, `formula_bytes` in all."""
    return {"step_bytes": payload(about, hosts, whole=False), "formula_bytes": payload(about, hosts, whole=True)}


def payload(about: dict[str, Any], hosts: int, *, whole: bool) -> float:
    """Add up activations, their gradients, and the exchange between a stage's replicas.

    `whole` includes the activations of evaluations, and a captioner's weights, which its stages send each other twice.
    """
    config, plan, data = about["config"], about["plan"], about["data"]
    layers, shapes = layers_of(about)
    mesh, exchange = Mesh(ranks=hosts, stages=config["stages"]), strategies.parse(config["strategy"])
    cut = partition.balanced(layers, mesh.stages, [layer.multiply_adds for layer in layers], 0.0)
    if plan["cut"]:
        cut = partition.named(layers, mesh.stages, plan["cut"])
    trained = config["epoch_samples"] or data["train"]
    seen = min(config["evaluate_samples"] or data["validation"], data["validation"]) + data["test"] if whole else 0
    writes = whole and about["model"]["name"] == "captioner" and mesh.stages > 1
    written = 2 * NUMBER_BYTES if writes else 0
    crossing = [
        0.0,
        *(cut.boundary_numbers(edge) * NUMBER_BYTES / mesh.replicas for edge in range(mesh.stages - 1)),
        0.0,
    ]
    most = 0.0
    for stage, (before, after) in enumerate(itertools.pairwise(crossing)):
        trained_shapes = [shapes[name] for name in cut.arrays(stage) if name in shapes]
        cost = exchange.cost(trained_shapes, Layout(ranks=mesh.replicas, hosts=mesh.replicas)).sent_bytes
        forward, back = trained + seen, trained
        weights = sum(map(math.prod, trained_shapes))
        sent = after * forward + before * back + written * weights
        received = before * forward + after * back + written * (about["model"]["parameters"] - weights)
        most = max(most, max(sent, received) + (plan["steps"] * cost if mesh.replicas > 1 else 0.0))
    return most / plan["steps"]


# --- one run ----------------------------------------------------------------------------------------------------------


def run(words: Sequence[object], options: argparse.Namespace, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command on the first host."""
    inside = on_host(options.name, ["timeout", "-k", "30", timeout_s, *words])
    return subprocess.run(inside, cwd=ROOT, capture_output=True, text=True, check=False)


def measured(model: str, row: str, rate: str, turn: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return a run's results, from its folder if they are there; `none` is the reason why there are none."""
    hosts, flags = ROWS[row]
    if model == "captioner" and "--stages" in flags:
        flags = [*flags, "--cut-at", "lstm"]
    folder = options.out / f"{rate}-{model}-{row}-{turn}"
    if (results := folder / "bench.json").exists():
        return dict(json.loads(results.read_text()))
    common = ["--framework", "torch", "--epochs", "1", "--checkpoint-steps", "0", "--threads", "1"]
    program = [sys.executable, "-m", *workload(model, options), *flags, *common, "--optimizer", "sgd"]
    dry = run([*program, "--dry-run", "--json"], options, 120)
    if dry.returncode:
        raise Failure(dry.stderr.strip(), dry.returncode)
    about = json.loads(dry.stdout)
    numbers: dict[str, Any] = formulas(about, hosts)
    if numbers["formula_bytes"] * about["plan"]["steps"] * 8 / goodput_both_ways(parse_rate(rate)) > options.most_s:
        return numbers | {"none": "not run"}
    starter = [*PLAIN, "-np", hosts] if row == "plain-2" else ["launch/mpirun.sh", "--quiet"]
    starter += ["-H", listed(hosts), sys.executable, "tools/bench.py", "stages"]
    starter += ["--within", options.name] if model == "perceptron" else []
    shutil.rmtree(folder, ignore_errors=True)  # an unfinished run
    done = run([*starter, "--run", *program, "--run-dir", folder], options, options.most_s + 120)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        why = next((line for line in lines if "Error: " in line or "hvdtrain: " in line), lines[-1])
        return numbers | {"none": "hangs" if done.returncode in (124, 137) else f"failed: {why.strip()[:150]}"}
    numbers |= read(folder, hosts)
    folder.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(numbers))
    return numbers


def read(folder: Path, hosts: int) -> dict[str, Any]:
    """Return the results of an hvdtrain run from its records."""
    about = json.loads((folder / "manifest.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics" / "rank0000.jsonl").read_text().splitlines()]
    end = next(line for line in lines if line["type"] == "summary")
    timed = [line for line in lines if line["type"] == "step" and not line["warmup"]]
    ways = [nic[way] for nic in end["nic_bytes"] for way in ("sent_bytes", "received_bytes")]
    return {
        "steps_s": [line["data_s"] + line["compute_s"] + (line["communication_s"] or 0.0) for line in timed],
        **formulas(about, hosts),
        "bytes": max(ways, default=0) / end["steps"],
        "waiting": end["step_shares"].get("exchange"),
        "busiest": 1 - end["step_shares"].get("exchange_least", 0.0),
        "rss_bytes": end["peak_rss_bytes"],
    }


def group(name: str, host: str) -> Path:
    """Return the control group that limits a host's memory."""
    return MOUNT / f"hvdtrain-{name}-{host}"


# --- the table --------------------------------------------------------------------------------------------------------


def combined(model: str, row: str, rate: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of all rounds to one row of the table."""
    flags, steps_s = ROWS[row][1], [second for each in results for second in each.get("steps_s", ())]
    line: dict[str, Any] = {"rate": rate, "model": model, "row": row, **results[-1], "bubble": None}
    line["network_s"] = line["step_bytes"] * 8 / goodput_both_ways(parse_rate(rate))
    if "--stages" in flags:
        line["bubble"] = partition.bubble(int(flags[flags.index("--stages") + 1]), MICRO)
        if "busiest" in line:
            line["step_over_ideal"] = (1 - line["bubble"]) / line["busiest"]
    if steps_s:
        line |= {"median_s": statistics.median(steps_s), "least_s": min(steps_s), "most_s": max(steps_s)}
        ratios = (each["bytes"] / (each["formula_bytes"] or math.inf) for each in results if "bytes" in each)
        line["of_formula"] = max(ratios)
        line["network_efficiency"] = line["network_s"] / line["median_s"]
    return {name: each for name, each in line.items() if name not in ("steps_s", "busiest")}


def main(arguments: list[str]) -> int:
    limited = MOUNT.is_dir()
    defaults: dict[str, Any] = {"rates": ["10mbit", "100mbit", "1gbit"], "models": list(MODELS[: 3 + limited])}
    defaults |= {"rows": list(ROWS), "rounds": 2, "steps": 8, "memory_mb": 3000, "most_s": 600.0}
    top = options_of(__doc__, "stages", **defaults, out=ROOT / "results" / "stages")
    top.add_argument("--within", help=argparse.SUPPRESS)
    top.add_argument("--run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = top.parse_args(arguments)
    if options.within:
        (group(options.within, socket.gethostname()) / "cgroup.procs").write_text("0")
    if options.run:
        os.execvp(options.run[0], options.run)
    known(top, options.models, MODELS)
    known(top, options.rows, list(ROWS))
    if "perceptron" in options.models and not limited:
        top.error(f"--models perceptron needs control groups v1 in {MOUNT}; hint: leave it out")
    results: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    count = max(ROWS[row][0] for row in options.rows)
    groups = [group(options.name, host) for host in NAMES[:count]] if "perceptron" in options.models else []
    with hosts_up(options.name, count, 0.5):
        try:
            for each in groups:
                each.mkdir()
                (each / "memory.limit_in_bytes").write_text(str(options.memory_mb * 1_000_000))
            for rate in options.rates:
                throttle(options.name, rate)
                for turn, model, row in itertools.product(range(options.rounds), options.models, options.rows):
                    if model != "captioner" or ROWS[row][0] <= 2:
                        one = measured(model, row, rate, turn, options)
                        results.setdefault((model, row, rate), []).append(one)
                        words = (
                            f"{statistics.median(one['steps_s']):.3f} s per step" if "steps_s" in one else one["none"]
                        )
                        say(f"{rate}, {model}, {row}, round {turn + 1}: {words}")
        finally:
            for each in groups:
                each.rmdir()
    return show(options, [combined(*key, each) for key, each in results.items()])
