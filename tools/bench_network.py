"""Horovod's all-reduce over slow links, started by horovodrun (Gloo), mpirun and launch/mpirun.sh in turn.

    sudo make bench-network BENCH_ARGS='--rates 10mbit --hosts 2'

Each run times float32 all-reduces of all sizes on the slowest rank, after random pauses as in training. The network's
limit is 2 (p-1)/p x bytes / (rate x 0.936) for p hosts (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).
Idle traffic is the larger direction of the first host's interface while all ranks are idle.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench import (
    check_throttle,
    document,
    hosts_up,
    in_turn,
    limit_s,
    listed,
    numbers,
    on_host,
    options_of,
    show,
    throttle,
)

from hvdtrain.system import net
from hvdtrain.system.rates import parse_rate

IDLE_S, PAUSE_S = 8.0, 0.1
INTERFACE = ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
STARTERS = {
    # Gloo's timeout of 30 s would end long transfers; it does not affect speed.
    "gloo": ["env", "HOROVOD_GLOO_TIMEOUT_SECONDS=1800", "horovodrun", "--gloo"],
    "mpirun": ["mpirun", "--bind-to", "none", *INTERFACE, "-x", "PATH", "-x", "OPAL_PREFIX"],
    "ours": ["launch/mpirun.sh"],
}
"""Launchers, with the options that they need to run, but no tuning"""


def rank_program(work: Sequence[tuple[int, int]]) -> None:
    """Time each (bytes, repetitions); rank 0 prints one JSON line."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()
    pauses = random.Random(1)  # equal on all ranks
    report: dict[str, Any] = {"seconds": {}}

    def slowest(value: float) -> float:
        return float(hvd.allreduce(torch.tensor(value, dtype=torch.float64), op=hvd.Max, name="slowest"))

    for size, times in work:
        tensor = torch.zeros(size // 4)
        hvd.allreduce_(torch.zeros(min(size, 1_000_000) // 4), op=hvd.Sum, name="warm")
        seconds = []
        for _ in range(times):
            hvd.allreduce_(torch.zeros(1), op=hvd.Sum, name="together")
            time.sleep(pauses.uniform(0, PAUSE_S))
            start = time.perf_counter()
            hvd.allreduce_(tensor, op=hvd.Sum, name=f"bytes{size}")
            seconds.append(slowest(time.perf_counter() - start))
        report["seconds"][size] = seconds
    time.sleep(1)
    before = net.counters("eth0")
    time.sleep(IDLE_S)
    report["idle_bit_s"] = max(8 * (new - old) / IDLE_S for old, new in zip(before, net.counters("eth0"), strict=True))
    hvd.allreduce(torch.zeros(1), name="end")
    if hvd.rank() == 0:
        print(json.dumps(report), flush=True)
    hvd.shutdown()


def main(arguments: list[str]) -> int:
    top = options_of(__doc__, "network", rates=["10mbit", "100mbit", "1gbit"], hosts=[2, 4], rounds=2)
    top.add_argument("--sizes-kb", type=numbers, default=[64, 1000, 5000, 25000, 85000], metavar="KB")
    top.add_argument("--rank", help=argparse.SUPPRESS)
    options = top.parse_args(arguments)
    if options.rank:
        rank_program(json.loads(options.rank))
        return 0
    rows = []
    with hosts_up(options.name, max(options.hosts)):
        for rate, hosts in ((rate, hosts) for rate in options.rates for hosts in options.hosts):
            throttle(options.name, rate)
            bits = parse_rate(rate)
            limits = {1000 * size: limit_s(hosts, 1000 * size, bits) for size in options.sizes_kb}
            work = [(size, max(1, min(5, int(20 / limit)))) for size, limit in limits.items()]
            program = [sys.executable, "tools/bench.py", "network", "--rank", json.dumps(work)]
            commands = {
                name: on_host(options.name, [*start, "-np", hosts, "-H", listed(hosts), *program])
                for name, start in STARTERS.items()
            }
            variants = {name: lambda command=command: document(command) for name, command in commands.items()}
            for name, reports in in_turn(variants, options.rounds).items():
                times: dict[int, list[float]] = defaultdict(list)
                for size, report in ((size, report) for report in reports for size in limits):
                    times[size] += report["seconds"][str(size)]
                idle = statistics.median(100 * report["idle_bit_s"] / bits for report in reports)
                for size, seconds in times.items():
                    median = statistics.median(seconds)
                    check_throttle(f"{name}: {size} bytes", median, size, limits[size])
                    row = {"rate_mbit": bits / 1e6, "hosts": hosts, "starter": name, "bytes": size, "median_s": median}
                    row |= {"least_s": min(seconds), "most_s": max(seconds), "limit_s": limits[size]}
                    rows.append(row | {"share_of_limit": limits[size] / median, "idle_percent": idle})
    return show(options, sorted(rows, key=lambda row: (row["rate_mbit"], row["hosts"], row["bytes"])))
