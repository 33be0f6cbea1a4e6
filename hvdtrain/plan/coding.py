"""Measures the processor time of reducers: their own code, with a second host that echoes its messages."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterable, Sequence

import numpy as np

from hvdtrain.comm.backends.tcp import TcpLeaderGroup
from hvdtrain.comm.stream import Stream, swap
from hvdtrain.strategies import Reducer
from hvdtrain.strategies.cost import Cost, Shape, elements
from hvdtrain.strategies.spec import component

REPEATS = 6
REDUCER_S = 1.5
"""Time after which a reducer is not measured again"""
BUFFER_BYTES = 4 << 20
"""Receive buffer. The default one grows only as it is used, over several messages"""
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


class Echo(TcpLeaderGroup):
    """A group of two hosts in one thread: the other host echoes each message."""

    def __init__(self, there: socket.socket, back: socket.socket) -> None:
        self._there, self._back = Stream(there, 1), Stream(back, 1)
        super().__init__([None, self._there])

    def _swap(
        self, target: int | None, data: np.ndarray | None, source: int | None, into: np.ndarray | None = None
    ) -> np.ndarray:
        there, back = (self._there if target else None), (self._back if source else None)
        if data is None or into is None or data.nbytes == into.nbytes:
            return swap(there, data, back, into)
        return np.resize(swap(there, data, back).view(into.dtype), into.size)  # halves of an odd vector


def measure(names: Iterable[str], shapes: Sequence[Shape], budget_s: float) -> dict[str, float]:
    """Return the processor seconds of one all-reduce over two hosts for each reducer, as --strategy writes it.

    They include copying the bytes to and from the operating system. Reducers for which no time is left are missing.
    Helper threads do not count.
    """
    found, began = dict[str, float](), time.perf_counter()
    for name in names:
        if time.perf_counter() - began > budget_s and (found or budget_s <= 0):
            break
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            with socket.create_connection(listener.getsockname()) as there:
                back = listener.accept()[0]
                while back.getpeername() != there.getsockname():  # another program was faster
                    back = listener.accept()[0]
                with back:
                    found[name] = statistics.median(_seconds(name, shapes, Echo(there, back)))
    return found


def _seconds(name: str, shapes: Sequence[Shape], leaders: Echo) -> list[float]:
    """Return the processor seconds of some all-reduces."""
    each = component(*name.partition(":")[::2])
    reducer: Reducer = each.cls([tuple(shape) for shape in shapes], each.settings)
    gradients = np.random.default_rng(1).standard_normal(elements(shapes), np.float32)
    began, seconds = time.perf_counter(), list[float]()
    while len(seconds) <= REPEATS and (len(seconds) < 2 or time.perf_counter() - began < REDUCER_S):
        values = gradients.copy()
        before = time.thread_time()
        reducer.all_reduce(values, leaders)
        seconds.append(time.thread_time() - before)
    return seconds[1:]  # the first one also allocates memory
