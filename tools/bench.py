"""Measure the training loop beside its yardsticks, in one run (`make bench`).

    python tools/bench.py                   # everything, about ten minutes on two cores
    python tools/bench.py --quick --json    # one round, one document

Two ranks on this machine train ResNet-34 on the digits, in turn by our entry point and by tools/bare_loop.py, a
hand-written Horovod loop of the same model; `tools/bench_data.py` does the same for preprocessing. Figures are medians
over rounds with the smallest and the largest in brackets; the first three steps of each run are left out of rates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RANKS = 2
EPOCHS = 3


def launch(arguments: list[str], metrics: Path | None = None) -> tuple[dict[str, Any], float]:
    """Runs on two ranks: the JSON document printed, and seconds until `metrics` had its first record."""
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
        first_s = float("nan")
        while process.poll() is None:
            if metrics is not None and first_s != first_s and metrics.exists() and metrics.stat().st_size:
                first_s = time.perf_counter() - began
            time.sleep(0.02)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"bench: {' '.join(arguments)} failed:\n{errors.read()[-3000:]}")
        document: dict[str, Any] = json.loads(output.read())
    return document, first_s


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def measure_loop(framework: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Our loop and the bare one, in turn."""
    ours, bare, launch_s = [], [], []
    for number in range(rounds):
        run = folder / f"{framework}-{number}"
        flags = ["--framework", framework, "--epochs", str(EPOCHS), "--checkpoint-epochs", "0", "--json"]
        summary, first_s = launch(
            ["-m", "hvdtrain.resnet", *flags, "--run-dir", str(run)], run / "metrics" / "rank0000.jsonl"
        )
        ours.append(summary)
        launch_s.append(first_s)
        bare.append(launch(["tools/bare_loop.py", framework, "--epochs", str(EPOCHS)])[0])
        print(f"bench: {framework} round {number + 1}/{rounds} done", file=sys.stderr, flush=True)
    return {
        "ours_samples_per_s": [run["samples_per_s"] for run in ours],
        "bare_samples_per_s": [run["samples_per_s"] for run in bare],
        "ratio": [mine["samples_per_s"] / theirs["samples_per_s"] for mine, theirs in zip(ours, bare, strict=True)],
        "data_share": [run["data_share"] for run in ours],
        "launch_to_first_step_s": launch_s,
        "ours_peak_rss_bytes": [run["peak_rss_bytes"] for run in ours],
        "bare_peak_rss_bytes": [run["peak_rss_bytes"] for run in bare],
    }


def table(results: dict[str, Any]) -> str:
    rows = [("what", "measured: median [min .. max]", "baseline", "goal")]
    for framework, found in results["loop"].items():
        megabytes = {name: [b / 1e6 for b in found[f"{name}_peak_rss_bytes"]] for name in ("ours", "bare")}
        rows += [
            (f"{framework}: images/s, ours", spread(found["ours_samples_per_s"], 1), "", ""),
            (f"{framework}: images/s, bare Horovod loop", spread(found["bare_samples_per_s"], 1), "", ""),
            (f"{framework}: ours / bare, round by round", spread(found["ratio"], 3), "1 = bare loop", ">= 0.98"),
            (
                f"{framework}: waiting for data, % of time",
                spread([100 * s for s in found["data_share"]], 2),
                "0",
                "<= 1",
            ),
            (f"{framework}: launch to first step, s", spread(found["launch_to_first_step_s"], 1), "", ""),
            (
                f"{framework}: peak RSS per rank, MB",
                spread(megabytes["ours"], 0),
                f"bare {spread(megabytes['bare'], 0)}",
                "",
            ),
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of each")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair (default: 5)")
    parser.add_argument("--frameworks", default="torch,tensorflow", help="which to measure")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        loop = {name: measure_loop(name, rounds, Path(folder)) for name in options.frameworks.split(",")}
    data_command = [sys.executable, "tools/bench_data.py", "--rounds", str(rounds)]
    results: dict[str, Any] = {"schema": "hvdtrain/bench/1", "ranks": RANKS, "cores": os.cpu_count(), "loop": loop}
    if options.json:
        done = subprocess.run([*data_command, "--json"], cwd=ROOT, check=True, capture_output=True, text=True)
        print(json.dumps(results | {"data": json.loads(done.stdout)}))
        return
    print(table(results) + "\n", flush=True)
    subprocess.run(data_command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
