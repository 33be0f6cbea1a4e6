"""Measure the training loop beside its yardsticks, in one run (`make bench`).

    python tools/bench.py                   # everything, about forty minutes on two cores
    python tools/bench.py --quick --json    # one round, one document
    python tools/bench.py --only ours       # our entry point and the bare loop alone, without the others

Two ranks on this machine train ResNet-34 on the digits, in turn by tools/bare_loop.py, a hand-written Horovod loop of
the same model, by our entry point, by it with all monitors on, and by it with --strategy native; every other round
backwards, so that drift favours none; the pairs that are compared stand beside each other. `tools/bench_data.py` does
the same for preprocessing, `bench_captioning.py` for the captioning model, `bench_threads.py` for threads and
`bench_script.py` for the other import in a user's script.
Figures are medians over rounds with the smallest and the largest in brackets; the first three steps of each run are
left out of rates.
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
HEADS = ("what", "measured: median [min .. max]", "baseline", "goal")
SAMPLER = "hvdtrain.monitors"
T = TypeVar("T")
LOOK_S = 1.0  # between two looks at the sampler's processor time, whether there is a sampler or not


def launch(arguments: list[str], metrics: Path | None = None) -> dict[str, Any]:
    """Runs on two ranks: the JSON document printed, with `launch_s`, seconds until `metrics` had its first record, and
    `sampler_cpu_percent`, the share of one core that the monitors' process took; None: not measured.
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
        launch_s, looks, look_s = None, [], 0.0
        while process.poll() is None:
            now_s = time.perf_counter() - began
            if metrics is not None and launch_s is None and metrics.exists() and metrics.stat().st_size:
                launch_s = now_s
            if now_s > look_s:
                look_s = now_s + LOOK_S
                looks += [(now_s, cpu_s) for cpu_s in sampler_cpu_s(process.pid)]
            time.sleep(0.02)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"bench: {' '.join(arguments)} failed:\n{errors.read()[-3000:]}")
        document: dict[str, Any] = json.loads(output.read())
    share = (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0]) if len(looks) > 1 else None
    return document | {"launch_s": launch_s, "sampler_cpu_percent": None if share is None else 100 * share}


def sampler_cpu_s(launcher: int) -> list[float]:
    """Processor seconds taken so far by each sampler among the launcher's descendants."""
    found = []
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(SAMPLER in word for word in child.cmdline()):
                times = child.cpu_times()
                found.append(times.user + times.system)
    return found


def spread(values: list[float], digits: int) -> str:
    if not values:
        return "not measured"
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def in_turn(ways: Mapping[str, Callable[[int], T]], rounds: int, told: str) -> dict[str, list[T]]:
    """What each way returned, round by round; every other round goes backwards."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(list(ways)):
            found[name].append(ways[name](number))
        print(f"bench: {told}, round {number + 1}/{rounds} done", file=sys.stderr, flush=True)
    return found


def measure_loop(framework: str, rounds: int, folder: Path, variants: Sequence[str]) -> dict[str, Any]:
    """Our loop in these variants and the bare one: for each what `launch` returned, round by round."""

    def ours(number: int, name: str) -> dict[str, Any]:
        run = folder / f"{framework}-{name}-{number}"
        flags = ["--framework", framework, "--epochs", str(EPOCHS), "--checkpoint-epochs", "0", "--json"]
        program = ["-m", "hvdtrain.resnet", *flags, *OURS[name], "--run-dir", str(run)]
        return launch(program, run / "metrics" / "rank0000.jsonl")

    ways: dict[str, Callable[[int], dict[str, Any]]]
    ways = {"bare": lambda number: launch(["tools/bare_loop.py", framework, "resnet", "--epochs", str(EPOCHS)])}
    return in_turn(ways | {name: partial(ours, name=name) for name in variants}, rounds, framework)


def ratios(found: dict[str, Any], one: str, other: str) -> list[float]:
    """Throughput of one variant over that of another, round by round."""
    return [a["samples_per_s"] / b["samples_per_s"] for a, b in zip(found[one], found[other], strict=True)]


def values(runs: list[dict[str, Any]], field: str, factor: float = 1.0) -> list[float]:
    return [factor * run[field] for run in runs if run.get(field) is not None]


def loop_rows(found: dict[str, Any], samples: str) -> list[tuple[str, str, str, str]]:
    """Our loop beside the bare one, as rows of the table."""
    ours, bare = found["ours"], found["bare"]
    bare_mb = spread(values(bare, "peak_rss_bytes", 1e-6), 0)
    return [
        (f"{samples}/s, ours", spread(values(ours, "samples_per_s"), 1), "", ""),
        (f"{samples}/s, bare Horovod loop", spread(values(bare, "samples_per_s"), 1), "", ""),
        ("ours / bare, round by round", spread(ratios(found, "ours", "bare"), 3), "1 = bare loop", ">= 0.98"),
        ("waiting for data, % of time", spread(values(ours, "data_share", 100), 2), "0", "<= 1"),
        ("peak RSS per rank, MB", spread(values(ours, "peak_rss_bytes", 1e-6), 0), f"bare {bare_mb}", ""),
    ]


def framework_rows(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What was measured of one framework, as rows of the table."""
    rows = loop_rows(found, "images")
    rows += [("launch to first step, s", spread(values(found["ours"], "launch_s"), 1), "", "")]
    if "native" in found:
        rows += [
            ("images/s, ours with --strategy native", spread(values(found["native"], "samples_per_s"), 1), "", ""),
            ("native / bare, round by round", spread(ratios(found, "native", "bare"), 3), "1 = bare loop", ""),
        ]
    if "monitored" in found:
        slower = [100 * (1 / ratio - 1) for ratio in ratios(found, "monitored", "ours")]
        sampler = spread(values(found["monitored"], "sampler_cpu_percent"), 2)
        rows += [
            ("step time added by all monitors, %", spread(slower, 2), "monitors off", "<= 1"),
            ("sampler's processor time, % of a core", sampler, "0", "<= 1"),
        ]
    return rows


def table(results: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [HEADS]
    for framework, found in results["loop"].items():
        rows += [(f"{framework}: {what}", *cells) for what, *cells in framework_rows(found)]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines, columns below one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair (default: 5)")
    parser.add_argument("--frameworks", default="torch,tensorflow", help="which to measure")
    parser.add_argument("--only", choices=("ours",), help="our entry point beside the bare loop, and nothing else")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if unknown := set(options.frameworks.split(",")) - {"torch", "tensorflow"}:
        parser.error(f"--frameworks: no {', '.join(sorted(unknown))}; there are torch and tensorflow")
    rounds = 1 if options.quick else options.rounds
    variants = [options.only] if options.only else list(OURS)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        loop = {name: measure_loop(name, rounds, Path(folder), variants) for name in options.frameworks.split(",")}
    flags = {"threads": [], "script": [], "data": [], "captioning": ["--frameworks", options.frameworks]}
    others = {
        name: [sys.executable, f"tools/bench_{name}.py", "--rounds", str(rounds), *more]
        for name, more in flags.items()
        if not options.only
    }
    results: dict[str, Any] = {"schema": "hvdtrain/bench/2", "ranks": RANKS, "cores": os.cpu_count(), "loop": loop}
    if options.json:
        for name, command in others.items():
            done = subprocess.run([*command, "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
            results[name] = json.loads(done.stdout)
        print(json.dumps(results))
        return
    print(table(results), flush=True)
    for command in others.values():
        print(flush=True)
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
