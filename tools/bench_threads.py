"""Measure what threads and their way of waiting cost, alone and beside a second copy (part of `make bench`).

    python tools/bench_threads.py                      # the README's first command
    python tools/bench_threads.py --flags '--width 1'  # other flags of hvdtrain.resnet

One process trains for an epoch, alone and beside a copy of itself: by default, with one thread, and with a thread per
core that spins or sleeps while it waits (OMP_WAIT_POLICY). All take turns, every other round backwards. Images/s,
median [least .. most] over rounds; of two copies both count.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import ROOT, aligned, spread

CORES = len(os.sched_getaffinity(0))
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "as it comes": ([], {}),
    "1 thread": (["--threads", "1"], {}),
    f"{CORES} threads, sleeping": (["--threads", str(CORES)], {"OMP_WAIT_POLICY": "passive"}),
    f"{CORES} threads, spinning": (["--threads", str(CORES)], {"GOMP_SPINCOUNT": "300000"}),
}


def rates(name: str, copies: int, flags: list[str], folder: Path) -> list[float]:
    """Images/s of each copy."""
    threads, variables = VARIANTS[name]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "HVDTRAIN_"))}
    program = [sys.executable, "-m", "hvdtrain.resnet", "--epochs", "1", "--checkpoint-epochs", "0", "--json"]
    started = [
        subprocess.Popen(
            [*program, *threads, *flags, "--run-dir", tempfile.mkdtemp(dir=folder)],
            cwd=ROOT,
            env=inherited | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(copies)
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"bench_threads: {shlex.join([*program, *threads, *flags])} failed")
    return [json.loads(text)["samples_per_s"] for text in printed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="--width 0.25", help="of hvdtrain.resnet")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    turns = [(name, copies) for copies in (1, 2) for name in VARIANTS]
    found: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        for number in range(options.rounds):
            for turn in turns if number % 2 == 0 else reversed(turns):
                found[turn] += rates(*turn, shlex.split(options.flags), Path(folder))
                print(
                    f"bench_threads: {turn[0]}, {turn[1]} running: {found[turn][-turn[1] :]}",
                    file=sys.stderr,
                    flush=True,
                )
    if options.json:
        rates_of = {name: {copies: found[name, copies] for copies in (1, 2)} for name in VARIANTS}
        print(json.dumps({"schema": "hvdtrain/bench-threads/1", "variants": rates_of}))
        return
    rows = [("images/s", "alone", "beside a copy")]
    print(aligned(rows + [(name, spread(found[name, 1], 0), spread(found[name, 2], 0)) for name in VARIANTS]))


if __name__ == "__main__":
    main()
