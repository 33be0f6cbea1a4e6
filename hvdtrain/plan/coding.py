"""Measures what reducers cost the processor: their own code, between two processes that loopback connections join.

Two threads of one process would wait for each other inside the library of matrix products, whose number of threads is
fixed when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.comm.backends.tcp import TcpLeaderGroup
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.stream import Stream
from hvdtrain.strategies import Reducer
from hvdtrain.strategies.cost import Cost, Shape, elements
from hvdtrain.strategies.spec import component
from hvdtrain.system.exits import Failure

REPEATS = 6
REDUCER_S = 1.5
"""Time after which a reducer is not measured again"""
START_S = 60.0
RECORDED_NS = {"hierarchical": 0.4, "bf16": 0.8, "int8": 1.1, "int4": 1.0, "int2": 1.0, "powersgd": 0.2}
"""Processor time by which `work` multiplies, from `make bench-coding` (Xeon, one thread, compiled loops). powersgd is
the value of rank 4, rank 24 takes 0.08"""


def work(cost: Cost) -> float:
    """Return the numbers that a host codes in an exchange, or its bytes if it sends numbers as they are."""
    return sum(phase.numbers for phase in cost.phases) or sum(each.bytes_per_peer * each.peers for each in cost.phases)


def recorded(names: Iterable[str], shapes: Sequence[Shape]) -> dict[str, float]:
    """Return what `measure` is expected to return, without measuring. Reducers that were never measured are missing."""
    found = {name: component(*name.partition(":")[::2]) for name in names}
    return {
        name: 1e-9 * RECORDED_NS[each.name] * work(each.cls.cost(shapes, 2, each.settings))
        for name, each in found.items()
        if each.name in RECORDED_NS
    }


def measure(names: Iterable[str], shapes: Sequence[Shape], budget_s: float, threads: int = 1) -> dict[str, float]:
    """Return the processor seconds of one all-reduce over two hosts for each reducer, as --strategy writes it.

    They include copying the bytes to and from the operating system. Reducers for which no time is left are missing.
    `threads`: of matrix products; helper threads do not count. Raises Failure (1) if the processes do not answer.
    """
    wanted = list(names)
    if not wanted or budget_s <= 0:
        return {}
    with _python("lead", threads) as process:
        try:
            out, _ = process.communicate(json.dumps([wanted, list(shapes), budget_s]).encode(), budget_s + START_S)
            return json.loads(out)
        except (subprocess.TimeoutExpired, ValueError):
            raise Failure("the processes that measure coding gave no answer; hint: free some memory") from None
        finally:
            process.kill()


def _python(function: str, threads: int | None = None) -> subprocess.Popen[bytes]:
    """Start a Python that calls a function of this module."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if threads:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    command = [sys.executable, "-P", "-c", f"from hvdtrain.plan import coding; coding.{function}()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]


def lead() -> None:
    """Measure the reducers with a second process, and print the seconds as JSON."""
    names, shapes, budget_s = json.load(sys.stdin)
    results = dict[str, float]()
    with socket.create_server(("127.0.0.1", 0)) as listener, _python("follow") as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps([listener.getsockname()[1], names, shapes]).encode())
        process.stdin.close()
        began = None
        for name in names:
            connection, _ = listener.accept()
            began = began or time.perf_counter()
            if results and time.perf_counter() - began > budget_s:
                break
            with connection:
                results[name] = statistics.median(_seconds(name, shapes, TcpLeaderGroup([None, Stream(connection, 1)])))
        process.kill()
    print(json.dumps(results))


def follow() -> None:
    """Take part in all-reduces until all reducers have been measured."""
    port, names, shapes = json.load(sys.stdin)
    for name in names:
        with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(PeerLost):
            for _ in _runs(name, shapes, TcpLeaderGroup([Stream(connection, 0), None])):
                pass


def _seconds(name: str, shapes: Sequence[Shape], leaders: LeaderGroup) -> list[float]:
    began, seconds = time.perf_counter(), list[float]()
    for each in _runs(name, shapes, leaders):
        seconds.append(each)
        if len(seconds) > REPEATS or (len(seconds) > 1 and time.perf_counter() - began > REDUCER_S):
            break
    return seconds[1:]  # the first one also allocates memory


def _runs(name: str, shapes: Sequence[Shape], leaders: LeaderGroup) -> Iterator[float]:
    """Repeat an all-reduce, and yield the processor seconds of each."""
    each = component(*name.partition(":")[::2])
    reducer: Reducer = each.cls([tuple(shape) for shape in shapes], each.settings)
    gradients = np.random.default_rng(leaders.index).standard_normal(elements(shapes), np.float32)
    while True:
        values = gradients.copy()
        before = time.thread_time()
        reducer.all_reduce(values, leaders)
        yield time.thread_time() - before
