#!/usr/bin/env python3
"""Measure the processor time of reducers' coding, next to a copy, which no coding can beat.

    make bench-coding BENCH_ARGS='--reducers int8 bf16'

Each row is one all-reduce over two hosts, as two processes on the loopback interface: encoding, decoding, adding, error
feedback, and the operating system's copies. `compiled` uses the loops in coding.c, `numpy` does without them. Both are
measured in turn; values are medians over rounds, in nanoseconds of a core per number. GB/s are the float32 vector's
bytes by the compiled time. The last line compares the compiled loops of int8 with numpy.copyto of the vector.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from hvdtrain.plan import coding  # noqa: E402
from hvdtrain.strategies import parse  # noqa: E402
from hvdtrain.strategies.reducers import compiled, quantize  # noqa: E402
from hvdtrain.system import exits  # noqa: E402
from hvdtrain.system.arguments import Parser  # noqa: E402

REDUCERS = ("hierarchical", "bf16", "int8", "int4", "powersgd:rank=4", "powersgd:rank=24,bits=4")
SIDE = 576


def ns(work: Callable[[], object], numbers: int, repeats: int = 15) -> float:
    """Median nanoseconds of this thread's processor time per number."""
    seconds = []
    for _ in range(repeats):
        before = time.thread_time()
        work()
        seconds.append(time.thread_time() - before)
    return 1e9 * statistics.median(seconds) / numbers


def loops(numbers: int) -> dict[str, float]:
    """A copy, and the parts of int8."""
    blocks = numbers // quantize.LENGTH
    values = np.random.default_rng(0).standard_normal(blocks * quantize.LENGTH, np.float32)
    other, message = np.zeros_like(values), quantize.encode(values, blocks, 8)
    return {
        "copy": ns(lambda: np.copyto(other, values), numbers),
        "encode": ns(lambda: quantize.encode(values, blocks, 8), numbers),
        "decode": ns(lambda: quantize.decode(message, other, 8), numbers),
        "add": ns(lambda: quantize.decode(message, other, 8, compiled.ADD), numbers),
    }


def main(arguments: list[str]) -> int:
    top = Parser(prog="bench_coding.py", description=__doc__)
    top.add_argument("--matrices", type=int, default=4, metavar="N", help=f"of {SIDE} x {SIDE} numbers each (4)")
    top.add_argument("--reducers", nargs="+", default=list(REDUCERS), metavar="NAME", help="(default: all)")
    top.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    top.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    options = top.parse_args(arguments)
    for name in options.reducers:
        parse(name)
    shapes, numbers = [(SIDE, SIDE)] * options.matrices, options.matrices * SIDE**2
    compiler, found = os.environ.get("CC", "cc"), dict[str, dict[str, list[float]]]()
    for _, (kind, os.environ["CC"]) in itertools.product(
        range(options.rounds), (("numpy_ns", "none"), ("compiled_ns", compiler))
    ):
        for name, seconds in coding.measure(options.reducers, shapes, 60.0).items():
            found.setdefault(name, {}).setdefault(kind, []).append(1e9 * seconds / numbers)
    rows = [{"reducer": name} | {k: statistics.median(v) for k, v in kinds.items()} for name, kinds in found.items()]
    parts = loops(numbers)
    if options.json:
        print(json.dumps({"schema": "hvdtrain/bench-coding/1", "rows": rows, "loops_ns": parts}))
        return 0
    table = pd.DataFrame(rows).assign(gb_per_s=lambda each: 4 / each["compiled_ns"])
    print(table.to_string(index=False, float_format="{:.2f}".format))
    print(
        "int8's loops, ns (copy = 1): " + ", ".join(f"{k} {v:.2f} ({v / parts['copy']:.2f})" for k, v in parts.items())
    )
    return 0


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
