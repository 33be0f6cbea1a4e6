"""Measure hvdtrain's training loop against a bare Horovod loop (`make bench`).

    python tools/bench.py                   # about twenty minutes on two cores
    python tools/bench.py --quick --json    # one round, one JSON document
    python tools/bench.py --only ours       # `python -m hvdtrain.resnet` and the bare loop, without the other variants

Two ranks on this machine train ResNet-34 on the digits with tools/bare_loop.py (a hand-written Horovod loop of the same
model), with `python -m hvdtrain.resnet`, with all monitors switched on, and with `--strategy native`. The variants take
turns, and every second round runs in reverse order, so that drift of the machine favours none of them. Results are
medians over rounds, with the minimum and the maximum in brackets. The first three steps of a run do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).parent.parent
RANKS = 2
EPOCHS = 3
OURS = {"ours": [], "monitored": ["--monitor", "power,resources"], "native": ["--strategy", "native"]}
HEADS = ("quantity", "median [min .. max]", "baseline", "goal")
SAMPLER = "hvdtrain.monitors"
T = TypeVar("T")
SAMPLING_S = 1.0  # between two readings of the sampler's processor time; the same for variants without a sampler


def launch(arguments: list[str], metrics: Path | None = None) -> dict[str, Any]:
    """Run a program on two ranks and return the JSON document that it printed.

    Adds `launch_s`, the seconds until `metrics` had its first record, and `sampler_cpu_percent`, the share of one core
    that the monitors' process took. Both are None if they were not measured.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-np", str(RANKS), "--bind-to", "none", "--oversubscribe"]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*mpirun, sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=errors
        )
        launch_s, readings, next_s = None, [], 0.0
        while process.poll() is None:
            now_s = time.perf_counter() - began
            if metrics is not None and launch_s is None and metrics.exists() and metrics.stat().st_size:
                launch_s = now_s
            if now_s > next_s:
                next_s = now_s + SAMPLING_S
                readings += [(now_s, cpu_s) for cpu_s in sampler_cpu_s(process.pid)]
            time.sleep(0.02)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"bench: {' '.join(arguments)} failed:\n{errors.read()[-3000:]}")
        document: dict[str, Any] = json.loads(output.read())
    share = None
    if len(readings) > 1:
        (first_s, first_cpu_s), (last_s, last_cpu_s) = readings[0], readings[-1]
        share = (last_cpu_s - first_cpu_s) / (last_s - first_s)
    return document | {"launch_s": launch_s, "sampler_cpu_percent": None if share is None else 100 * share}


def sampler_cpu_s(launcher: int) -> list[float]:
    """Processor seconds used so far by each sampler among the launcher's descendants."""
    seconds = []
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(SAMPLER in word for word in child.cmdline()):
                times = child.cpu_times()
                seconds.append(times.user + times.system)
    return seconds


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "not measured"
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def in_turn(variants: Mapping[str, Callable[[int], T]], rounds: int, label: str) -> dict[str, list[T]]:
    """Run the variants in turn, every second round in reverse order. Returns the result of each round by variant."""
    results: dict[str, list[T]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants) if number % 2 == 0 else reversed(list(variants)):
            results[name].append(variants[name](number))
        print(f"bench: {label}, round {number + 1}/{rounds} done", file=sys.stderr, flush=True)
    return results


def measure_loop(framework: str, rounds: int, folder: Path, variants: Sequence[str]) -> dict[str, Any]:
    """Run hvdtrain in these variants, and the bare loop. Returns what `launch` returned, by variant and round."""

    def ours(number: int, name: str) -> dict[str, Any]:
        run = folder / f"{framework}-{name}-{number}"
        flags = ["--framework", framework, "--epochs", str(EPOCHS), "--checkpoint-epochs", "0", "--json"]
        program = ["-m", "hvdtrain.resnet", *flags, *OURS[name], "--run-dir", str(run)]
        return launch(program, run / "metrics" / "rank0000.jsonl")

    loops: dict[str, Callable[[int], dict[str, Any]]]
    loops = {"bare": lambda number: launch(["tools/bare_loop.py", framework, "--epochs", str(EPOCHS)])}
    return in_turn(loops | {name: partial(ours, name=name) for name in variants}, rounds, framework)


def ratios(results: dict[str, Any], one: str, other: str) -> list[float]:
    """Ratios of the throughput of two variants, per round."""
    return [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(results[one], results[other], strict=True)]


def values(runs: list[dict[str, Any]], field: str, factor: float = 1.0) -> list[float]:
    return [factor * run[field] for run in runs if run.get(field) is not None]


def framework_rows(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The table's rows for one framework."""
    ours, bare = results["ours"], results["bare"]
    bare_mb = spread(values(bare, "peak_rss_bytes", 1e-6), 0)
    rows = [
        ("images/s, hvdtrain", spread(values(ours, "samples_per_s"), 1), "", ""),
        ("images/s, bare Horovod loop", spread(values(bare, "samples_per_s"), 1), "", ""),
        ("hvdtrain / bare, per round", spread(ratios(results, "ours", "bare"), 3), "1 = bare loop", ">= 0.98"),
        ("waiting for data, % of time", spread(values(ours, "data_share", 100), 2), "0", "<= 1"),
        ("peak RSS per rank, MB", spread(values(ours, "peak_rss_bytes", 1e-6), 0), f"bare {bare_mb}", ""),
        ("launch to first step, s", spread(values(ours, "launch_s"), 1), "", ""),
    ]
    if "native" in results:
        rows += [
            (
                "images/s, hvdtrain with --strategy native",
                spread(values(results["native"], "samples_per_s"), 1),
                "",
                "",
            ),
            ("native / bare, per round", spread(ratios(results, "native", "bare"), 3), "1 = bare loop", ""),
        ]
    if "monitored" in results:
        slower = [100 * (1 / ratio - 1) for ratio in ratios(results, "monitored", "ours")]
        sampler = spread(values(results["monitored"], "sampler_cpu_percent"), 2)
        rows += [
            ("step time added by all monitors, %", spread(slower, 2), "monitors off", "<= 1"),
            ("sampler's processor time, % of a core", sampler, "0", "<= 1"),
        ]
    return rows


def table(loops: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [HEADS]
    for framework, results in loops.items():
        rows += [(f"{framework}: {label}", *cells) for label, *cells in framework_rows(results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument(
        "--frameworks", default="torch,tensorflow", help="frameworks, separated by commas (default: both)"
    )
    parser.add_argument("--only", choices=("ours",), help="only hvdtrain and the bare loop")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if unknown := set(options.frameworks.split(",")) - {"torch", "tensorflow"}:
        parser.error(f"--frameworks: unknown {', '.join(sorted(unknown))}; choose from torch, tensorflow")
    rounds = 1 if options.quick else options.rounds
    variants = [options.only] if options.only else list(OURS)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        loop = {name: measure_loop(name, rounds, Path(folder), variants) for name in options.frameworks.split(",")}
    results: dict[str, Any] = {"schema": "hvdtrain/bench/3", "ranks": RANKS, "cores": os.cpu_count(), "loop": loop}
    print(json.dumps(results) if options.json else table(loop))


if __name__ == "__main__":
    main()
