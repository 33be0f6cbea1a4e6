"""Measure what `import hvdtrain.torch` costs a script beside `import horovod.torch` (part of `make bench`).

    python tools/bench_script.py                # 5 rounds

Horovod carries. A script of 24 small layers (48 tensors) runs on two ranks by either import in turn, every other round
backwards. Told is the processor time of rank 0's main thread, in which all of ours runs: waiting and Horovod's own
thread are not in it. That needs a quiet machine all the same. A step's time by the clock has all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any

from bench import RANKS, aligned, in_turn, launch, spread

STEPS, WARMUP = 200, 20
WAYS = {"horovod": ("horovod.torch", "0"), "ours": ("hvdtrain.torch", "0"), "recorded": ("hvdtrain.torch", "1")}
"""The module to import, and HVDTRAIN_RECORD"""


def script(module: str) -> None:
    """What each rank runs."""
    import torch

    hvd: Any = importlib.import_module(module)
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(24)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batch = torch.randn(16, 32)
    used_s, whole_s = [], []
    for _ in range(STEPS):
        used, began = time.thread_time(), time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        used_s.append(time.thread_time() - used)
        whole_s.append(time.perf_counter() - began)
    if hvd.rank() == 0:
        medians = [1e6 * statistics.median(each[WARMUP:]) for each in (used_s, whole_s)]
        print(json.dumps(dict(zip(("used_us", "whole_us"), medians, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--script", metavar="MODULE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        script(options.script)
        return
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:

        def started(number: int, name: str) -> dict[str, Any]:
            module, record = WAYS[name]
            os.environ |= {"HVDTRAIN_RECORD": record, "HVDTRAIN_RUN_DIR": f"{folder}/{number}"}
            return launch([__file__, "--script", module])

        found = in_turn({name: partial(started, name=name) for name in WAYS}, options.rounds, "script")
    if options.json:
        print(json.dumps({"schema": "hvdtrain/bench-script/1", "ranks": RANKS, "runs": found}))
        return
    rows = [["import", "main thread, us per step", "more than Horovod, us", "a step by the clock, us"]]
    for name, runs in found.items():
        more = [run["used_us"] - plain["used_us"] for run, plain in zip(runs, found["horovod"], strict=True)]
        used, whole = ([run[field] for run in runs] for field in ("used_us", "whole_us"))
        rows.append([name, spread(used, 0), spread(more, 0) if name != "horovod" else "", spread(whole, 0)])
    print(aligned(rows))


if __name__ == "__main__":
    main()
