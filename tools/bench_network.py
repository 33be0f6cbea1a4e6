#!/usr/bin/env python3
"""Measure Horovod's allreduce over slow links, started by horovodrun (Gloo), mpirun and hvdtrain's launchers.

    sudo make bench-network BENCH_ARGS='--rates 10mbit --hosts 2 --sizes-kb 1000,5000'

Creates a virtual cluster, throttles it to each rate and runs the launchers in turn. Needs root. Each run times float32
allreduces of all sizes on the slowest rank, after random pauses as in training. The limit of the network is
2 (p-1)/p x bytes / (rate x 0.936) for p hosts (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). Idle traffic
is the larger direction of the first host's interface while all ranks are idle.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvdtrain.sweep.process import run_uninterrupted  # noqa: E402
from hvdtrain.system import exits, net  # noqa: E402
from hvdtrain.system.arguments import Parser  # noqa: E402
from hvdtrain.system.commands import need_root  # noqa: E402
from hvdtrain.system.exits import Failure  # noqa: E402
from hvdtrain.system.rates import all_reduce_s, goodput_both_ways, parse_rate, show_rate  # noqa: E402

NAMES = "abcdefgh"
STARTERS = ("gloo", "mpirun", "ours", "ours-horovodrun", "ours-gloo")
IDLE_S = 8.0
PAUSE_S = 0.1
QUEUED_UP_TO_BYTES = 1_000_000
"""Smaller transfers may pass through a link's queue faster than the rate"""
MARK = "bench "


def limit_s(hosts: int, size: int, rate_bit_s: int) -> float:
    """Seconds that the network needs for an allreduce of `size` bytes over `hosts` hosts."""
    return all_reduce_s(size, hosts, goodput_both_ways(rate_bit_s))


def repeats(expected_s: float) -> int:
    """Return how often one run times one size: at most five times and about 20 s."""
    return max(1, min(5, int(20 / expected_s)))


# --- one rank --------------------------------------------------------------------------------------------------------


def rank_program(work: Sequence[tuple[int, int]], idle_s: float) -> None:
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
    if idle_s:
        time.sleep(1)
        before = net.counters("eth0")
        time.sleep(idle_s)
        after = net.counters("eth0")
        report["idle_bit_s"] = max(8 * (new - old) / idle_s for old, new in zip(before, after, strict=True))
    hvd.allreduce(torch.zeros(1), name="end")
    if hvd.rank() == 0:
        print(MARK + json.dumps(report), flush=True)
    hvd.shutdown()


# --- the cluster -----------------------------------------------------------------------------------------------------


def cluster(*arguments: str) -> None:
    run_uninterrupted([f"{ROOT}/tools/cluster.sh", *arguments], os.environ)


def throttle(name: str, rate_bit_s: int) -> None:
    run_uninterrupted([f"{ROOT}/tools/throttle.sh", show_rate(rate_bit_s), "--name", name], os.environ)


def starter(kind: str, hosts: str, ranks: int) -> list[str]:
    """Return the launcher's command line. Horovod's launchers get the options they need to run, but no tuning."""
    if kind == "gloo":
        # Gloo's timeout of 30 s would end long transfers; it does not affect speed.
        return ["env", "HOROVOD_GLOO_TIMEOUT_SECONDS=1800", "horovodrun", "--gloo", "-np", str(ranks), "-H", hosts]
    if kind == "mpirun":
        interface = ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
        passed = ["-x", "PATH", "-x", "OPAL_PREFIX"]
        return ["mpirun", "-np", str(ranks), "-H", hosts, "--bind-to", "none", *interface, *passed]
    launchers = {"ours": ["launch/mpirun.sh"], "ours-gloo": ["launch/horovodrun.sh", "--gloo"]}
    return [*launchers.get(kind, ["launch/horovodrun.sh"]), "-np", str(ranks), "-H", hosts]


def measure(name: str, kind: str, hosts: str, ranks: int, program: Sequence[str]) -> Any:
    """Run a program of ranks with one launcher and return what rank 0 reports (MARK and a JSON document)."""
    words = ["tools/cluster.sh", "exec", "--name", name, "a", "--", *starter(kind, hosts, ranks)]
    done = subprocess.run([*words, sys.executable, *program], cwd=ROOT, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if MARK + "{" in line:
            return json.loads(line[line.index("{") :])
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "hvdtrain:" in line]
    reason = errors[0] if errors else done.stderr[-600:]
    raise Failure(f"{kind} over {hosts} printed no report (exit code {done.returncode}): {reason}")


def check_throttle(what: str, seconds: float, nbytes: int, limit: float) -> None:
    """Raises Failure for a transfer that was faster than its links."""
    if nbytes >= QUEUED_UP_TO_BYTES and seconds < limit / 1.2:
        reason = f"{what} took {seconds:.4f} s, but the network needs {limit:.4f} s"
        raise Failure(f"{reason}; hint: another program may have removed the throttle")


# --- the table -------------------------------------------------------------------------------------------------------


def case(options: argparse.Namespace, rate: int, hosts: int) -> list[dict[str, Any]]:
    """Run all launchers in turn at one rate; return one row per launcher and size."""
    listed = ",".join(f"{host}:{options.ranks_per_host}" for host in NAMES[:hosts])
    work = [(size, repeats(limit_s(hosts, size, rate))) for size in options.sizes]
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    idle: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds):
        for kind in options.starters:
            program = ["tools/bench_network.py", "--rank", json.dumps(work), "--idle-s", str(options.idle_s)]
            report = measure(options.name, kind, listed, hosts * options.ranks_per_host, program)
            for size, times in report["seconds"].items():
                seconds[kind, int(size)] += times
            idle[kind].append(100 * report["idle_bit_s"] / rate)
            print(f"{show_rate(rate)}, {listed}, round {turn + 1}: {kind} done", file=sys.stderr, flush=True)
    rows = []
    for (kind, size), times in seconds.items():
        median, limit = statistics.median(times), limit_s(hosts, size, rate)
        check_throttle(f"{kind}: {size} bytes", median, size, limit)
        rows.append(
            {
                "rate_mbit": rate / 1e6,
                "hosts": hosts,
                "ranks_per_host": options.ranks_per_host,
                "starter": kind,
                "bytes": size,
                "repetitions": len(times),
                "median_s": median,
                "least_s": min(times),
                "most_s": max(times),
                "limit_s": limit,
                "share_of_limit": limit / median,
                "idle_percent": statistics.median(idle[kind]),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table, ordered by rate, hosts and size."""
    table = pd.DataFrame(rows).sort_values(["rate_mbit", "hosts", "bytes"], kind="stable")
    print(table.drop(columns="ranks_per_host").to_string(index=False, float_format="{:.4g}".format))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def options_of(about: str | None, hosts: list[int], name: str) -> Parser:
    """A parser with the options of every benchmark on a throttled cluster."""
    top = Parser(description=about)
    top.add_argument("--rates", type=lambda text: [parse_rate(part) for part in text.split(",")], metavar="RATES")
    listed = ",".join(map(str, hosts))
    top.add_argument("--hosts", type=numbers, default=hosts, metavar="N", help=f"numbers of hosts (default: {listed})")
    top.add_argument("--name", default=name, help=f"name of the virtual cluster (default: {name})")
    top.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    top.add_argument("--rank", help=argparse.SUPPRESS)
    top.set_defaults(rates=[10_000_000, 100_000_000, 1_000_000_000])
    return top


def parser() -> Parser:
    top = options_of(__doc__, [2, 4], "tbench")
    top.add_argument("--sizes-kb", type=numbers, default=[64, 1000, 5000, 25000, 85000], metavar="KB")
    top.add_argument("--ranks-per-host", type=int, default=1, metavar="N")
    top.add_argument("--rounds", type=int, default=2, metavar="N", help="rounds of all launchers (default: 2)")
    top.add_argument("--starters", type=lambda text: text.split(","), default=list(STARTERS[:3]), metavar="NAMES")
    top.add_argument(
        "--idle-s", type=float, default=IDLE_S, metavar="SECONDS", help="time for idle traffic (default: 8)"
    )
    return top


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.rank:
        rank_program([(size, times) for size, times in json.loads(options.rank)], options.idle_s)
        return 0
    options.sizes = [1000 * size for size in options.sizes_kb]
    unknown = set(options.starters) - set(STARTERS)
    if unknown or max(options.hosts) > len(NAMES) or min(options.hosts) < 2:
        print(f"bench_network: --starters are {', '.join(STARTERS)}; --hosts 2 to {len(NAMES)}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    need_root("the benchmark's virtual cluster")
    cluster("up", "--name", options.name, "--hosts", ",".join(NAMES[: max(options.hosts)]))
    try:
        for rate in options.rates:
            throttle(options.name, rate)
            for hosts in options.hosts:
                rows += case(options, rate, hosts)
    finally:
        cluster("down", "--name", options.name)
    print(json.dumps({"schema": "hvdtrain/bench-network/1", "rows": rows})) if options.json else show(rows)
    return 0


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
