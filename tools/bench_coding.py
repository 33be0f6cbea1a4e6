"""The processor time of reducers' coding, next to a copy, which no coding can beat.

    make bench-coding BENCH_ARGS='--reducers int8 bf16'

Each row is one all-reduce over two hosts, as two processes on the loopback interface: encoding, decoding, adding,
error feedback, and the operating system's copies. `compiled` uses the loops in coding.c, `numpy` does without them.
Both are measured in turn; values are medians over rounds, in nanoseconds of a core per number. `copy` is numpy.copyto
of the vector.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any
from unittest.mock import patch

import numpy as np
from bench import in_turn, options_of, show

from hvdtrain.plan import coding
from hvdtrain.strategies import parse

REDUCERS = ["hierarchical", "bf16", "int8", "int4", "powersgd:rank=4", "powersgd:rank=24,bits=4"]
SHAPES = [(576, 576)] * 4
NUMBERS = 4 * 576**2


def copy_ns() -> float:
    values, seconds = np.ones(NUMBERS, np.float32), []
    other = np.zeros_like(values)
    for _ in range(15):
        before = time.thread_time()
        np.copyto(other, values)
        seconds.append(time.thread_time() - before)
    return 1e9 * statistics.median(seconds) / NUMBERS


def main(arguments: list[str]) -> int:
    top = options_of(__doc__, "coding", rounds=3)
    top.add_argument("--reducers", nargs="+", default=REDUCERS, metavar="NAME", help="(default: all)")
    options = top.parse_args(arguments)
    for name in options.reducers:
        parse(name)

    def compiled() -> dict[str, float]:
        return coding.measure(options.reducers, SHAPES, 60.0)

    def numpy() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, CC="none", XDG_CACHE_HOME=empty):
            return compiled()

    found = in_turn({"numpy": numpy, "compiled": compiled}, options.rounds)
    rows: list[dict[str, Any]] = [{"reducer": "copy", "compiled_ns": copy_ns()}]
    for name in options.reducers:
        medians = {
            f"{how}_ns": statistics.median(1e9 * each[name] / NUMBERS for each in runs) for how, runs in found.items()
        }
        rows.append({"reducer": name, **medians, "gb_per_s": 4 / medians["compiled_ns"]})
    return show(options, rows)
