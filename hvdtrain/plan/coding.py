"""Measures what reducers cost the processor: their own code, between two threads that a loopback connection joins."""

from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.comm.backends.tcp import TcpLeaderGroup
from hvdtrain.comm.stream import Stream
from hvdtrain.strategies import Reducer
from hvdtrain.strategies.cost import Shape, elements
from hvdtrain.strategies.spec import component

REPEATS = 5
REDUCER_S = 1.0
"""Time after which a reducer is not measured again"""


def measure(names: Iterable[str], shapes: Sequence[Shape], budget_s: float) -> dict[str, float]:
    """Return the processor seconds of one all-reduce over two hosts for each reducer, as --strategy writes it.

    They include copying the bytes to and from the operating system. Reducers for which no time is left are missing.
    Helper threads of a matrix product do not count.
    """
    began, results = time.perf_counter(), dict[str, float]()
    for name in names:
        if time.perf_counter() - began > budget_s:
            break
        results[name] = _seconds(name, shapes)
    return results


def _seconds(name: str, shapes: Sequence[Shape]) -> float:
    each = component(*name.partition(":")[::2])
    stop, barrier = threading.Event(), threading.Barrier(2)
    seconds: list[float] = []
    errors: list[BaseException] = []

    def rank(leaders: LeaderGroup) -> None:
        try:
            reducer: Reducer = each.cls(shapes, each.settings)
            gradients = np.random.default_rng(leaders.index).standard_normal(elements(shapes), np.float32)
            began = time.perf_counter()
            for repeat in itertools.count():
                barrier.wait()  # both see the same `stop`
                if stop.is_set():
                    return
                barrier.wait()
                values = gradients.copy()
                before = time.thread_time()
                reducer.all_reduce(values, leaders)
                if leaders.index == 0:
                    seconds.append(time.thread_time() - before)
                    if repeat == REPEATS or (repeat and time.perf_counter() - began > REDUCER_S):
                        stop.set()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        groups = [TcpLeaderGroup([None, Stream(near, 1)]), TcpLeaderGroup([Stream(far, 0), None])]
        threads = [threading.Thread(target=rank, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return statistics.median(seconds[1:])  # the first one also allocates memory
