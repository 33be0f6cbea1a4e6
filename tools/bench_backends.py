"""The TCP backend, Gloo (torch.distributed) and Open MPI (mpi4py) on virtual hosts with throttled links.

    sudo make bench-backends BENCH_ARGS='--rates 100mbit --hosts 4 --ranks-per-host 1,4'

`over_mpi` is `--backend mpi`: the TCP backend's algorithms, whose messages between hosts MPI carries. An operation is
sum-KB, a float32 sum over all ranks, or pairs-KB, in which each host sends KB kilobytes to each other host. bf16-KB,
int8-KB and int4-KB are sums by a reducer, which only the first two backends have. The TCP backend sums the vectors of
a host's ranks first; Gloo and Open MPI get one flat operation over all ranks, as their users would call it. Pairs are
measured with one rank per host, because only one rank per host takes part.

Every rank connects all four, and each repetition runs them in turn. Seconds are the median over repetitions of the
slowest rank's time; CPU seconds are the median of all ranks' processor time together. `limit_s` is the time that the
network needs at 0.936 of the rate, TCP's share with both directions busy. A CPU limit gives each host an equal part
of this machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bench import check_throttle, document, hosts_up, limit_s, listed, on_host, options_of, say, show, throttle

from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.strategies import Layout, parse
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import goodput_both_ways, parse_rate

BACKENDS = ("tcp", "over_mpi", "gloo", "mpi")
OPERATIONS = ["sum-1", "sum-5340", "pairs-40", "pairs-667"]
REDUCERS = ("bf16", "int8", "int4")
"""Sums by a reducer, which only hvdtrain's backends have. Equal numbers, as here, lose hardly anything"""
REPEAT_S = 6.0
"""Seconds that the repetitions of one operation may take per backend"""
PAUSE_S = 0.05


def parse_operation(operation: str) -> tuple[str, int]:
    """Return the kind of an operation and its bytes. Raises Failure (2)."""
    kind, _, kilobytes = operation.partition("-")
    if kind not in ("sum", "pairs", *REDUCERS) or not kilobytes.isdecimal() or int(kilobytes) == 0:
        hint = f"write sum-KB, pairs-KB or {'-KB, '.join(REDUCERS)}-KB"
        raise Failure(f"{operation!r} is not an operation; hint: {hint}", exits.USAGE)
    return kind, 1000 * int(kilobytes)


def able(operation: str) -> tuple[str, ...]:
    """Return the backends that have an operation."""
    return BACKENDS[:2] if parse_operation(operation)[0] in REDUCERS else BACKENDS


def network_s(operation: str, hosts: int, rate_bit_s: int) -> float:
    """Seconds that the network needs for an operation."""
    kind, nbytes = parse_operation(operation)
    if kind == "sum":
        return limit_s(hosts, nbytes, rate_bit_s)
    if kind in REDUCERS:
        cost = parse(kind).cost([(nbytes // 4,)], Layout(ranks=hosts, hosts=hosts), buckets=False)
        return cost.sent_bytes * 8 / goodput_both_ways(rate_bit_s)
    return (hosts - 1) * nbytes * 8 / goodput_both_ways(rate_bit_s)


def rank_program(work: Sequence[tuple[str, int]]) -> None:
    """Time each (operation, repetitions). Rank 0 prints one JSON line."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    from hvdtrain.comm.backends.ddp import DdpCommunicator
    from hvdtrain.comm.backends.mpi import MpiCommunicator
    from hvdtrain.comm.backends.tcp import TcpCommunicator
    from hvdtrain.comm.launch_env import launch_env
    from hvdtrain.comm.rendezvous import join
    from hvdtrain.strategies.spec import component

    torch.set_num_threads(1)
    rendezvous, endpoint = join(launch_env()), Endpoint(socket.gethostname(), "eth0")
    ours, over_mpi = TcpCommunicator(rendezvous, endpoint), MpiCommunicator(rendezvous, endpoint)
    gloo = DdpCommunicator(rendezvous, endpoint, gpu=False)

    def sum_ours(ranks: TcpCommunicator, vector: np.ndarray) -> np.ndarray:
        ranks.reduce(vector)
        return vector

    def sum_gloo(vector: np.ndarray) -> np.ndarray:
        dist.all_reduce(torch.from_numpy(vector))
        return vector

    def sum_mpi(vector: np.ndarray) -> np.ndarray:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, vector)
        return vector

    def pairs_ours(ranks: TcpCommunicator, parts: np.ndarray) -> Sequence[np.ndarray]:
        assert ranks.leaders is not None
        ranks.leaders.max_message_bytes = parts.nbytes
        return ranks.leaders.all_to_all(list(parts), even=True)

    def pairs_gloo(parts: np.ndarray) -> Sequence[np.ndarray]:
        dist.all_to_all_single(torch.from_numpy(received := np.empty_like(parts)), torch.from_numpy(parts))
        return list(received)

    def pairs_mpi(parts: np.ndarray) -> Sequence[np.ndarray]:
        MPI.COMM_WORLD.Alltoall(parts, received := np.empty_like(parts))
        return list(received)

    mine = {"tcp": ours, "over_mpi": over_mpi}
    sums: dict[str, Callable[[np.ndarray], Any]] = {"gloo": sum_gloo, "mpi": sum_mpi}
    pairs: dict[str, Callable[[np.ndarray], Any]] = {"gloo": pairs_gloo, "mpi": pairs_mpi}
    sums |= {name: functools.partial(sum_ours, ranks) for name, ranks in mine.items()}
    pairs |= {name: functools.partial(pairs_ours, ranks) for name, ranks in mine.items()}

    def by_reducer(ranks: TcpCommunicator, kind: str, vector: np.ndarray) -> np.ndarray:
        reducer = component(kind, "")
        ranks.reduce(vector, vector.size, reducer.cls([vector.shape], reducer.settings))
        return vector

    def timed(backend: str, kind: str, nbytes: int) -> tuple[float, float]:
        """Return this rank's seconds and CPU seconds for one operation, after checking its result."""
        call: Callable[[np.ndarray], Any]
        if kind in REDUCERS:
            call = functools.partial(by_reducer, mine[backend], kind)
        else:
            call = {"sum": sums, "pairs": pairs}[kind][backend]
        values = np.full((*([ours.size] if kind == "pairs" else []), nbytes // 4), 1 + ours.rank, np.float32)
        time.sleep(PAUSE_S)
        sums[backend](np.zeros(1, np.float32))  # all ranks start together
        before, began = time.process_time(), time.perf_counter()
        received = call(values)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - before
        ranks = np.arange(1, ours.size + 1)
        expected = [[total] for total in ranks] if kind == "pairs" else ranks.sum()
        if not np.allclose(received, expected, rtol=0.01 if kind in REDUCERS else 0.0, atol=0.0):
            raise RuntimeError(f"{backend}: {kind} of {nbytes} bytes gave a wrong result")
        return seconds, cpu_s

    report = {}
    for operation, times in work:
        for backend in able(operation):
            timed(backend, *parse_operation(operation)) if times > 3 else None
        own = [{each: timed(each, *parse_operation(operation)) for each in able(operation)} for _ in range(times)]
        everyone = ours.gather(own)
        report[operation] = {
            backend: {
                "seconds": [max(ranks[turn][backend][0] for ranks in everyone) for turn in range(times)],
                "cpu_s": [sum(ranks[turn][backend][1] for ranks in everyone) for turn in range(times)],
            }
            for backend in able(operation)
        }
    if ours.rank == 0:
        print(json.dumps(report), flush=True)
    gloo.shutdown()
    ours.shutdown()


def main(arguments: list[str]) -> int:
    rates = ["10mbit", "100mbit", "1gbit"]
    top = options_of(__doc__, "backends", rates=rates, hosts=[2, 4, 8], ranks_per_host=[1, 4], operations=OPERATIONS)
    top.add_argument("--rank", help=argparse.SUPPRESS)
    options = top.parse_args(arguments)
    if options.rank:
        rank_program(json.loads(options.rank))
        return 0
    operations = {each: parse_operation(each) for each in options.operations}
    rows = []
    for hosts in options.hosts:
        with hosts_up(options.name, hosts, (os.cpu_count() or 1) / hosts):
            for rate, per_host in ((rate, per_host) for rate in options.rates for per_host in options.ranks_per_host):
                throttle(options.name, rate)
                limits = {
                    name: network_s(name, hosts, parse_rate(rate))
                    for name, (kind, _) in operations.items()
                    if per_host == 1 or kind != "pairs"
                }
                work = json.dumps([(name, max(3, min(10, int(REPEAT_S / each)))) for name, each in limits.items()])
                program = ["launch/mpirun.sh", "-np", hosts * per_host, "-H", listed(hosts, per_host), sys.executable]
                found = document(on_host(options.name, [*program, "tools/bench.py", "backends", "--rank", work]))
                for name, backends in found.items():
                    row: dict[str, Any] = {"rate": rate, "hosts": hosts, "ranks_per_host": per_host, "operation": name}
                    row |= {"limit_s": limits[name]}
                    for what, suffix in (("seconds", "s"), ("cpu_s", "cpu_s")):
                        row |= {f"{each}_{suffix}": statistics.median(backends[each][what]) for each in backends}
                    check_throttle(name, min(row[f"{each}_s"] for each in backends), operations[name][1], limits[name])
                    if "gloo" in backends:
                        row["s_over_gloo"] = row["tcp_s"] / row["gloo_s"]
                        row["cpu_over_gloo"] = row["tcp_cpu_s"] / row["gloo_cpu_s"]
                    rows.append(row)
                say(f"{rate}, {hosts} hosts, {per_host} per host: done")
    return show(options, rows)
