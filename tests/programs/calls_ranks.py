"""Checks each collective call of horovod_api.calls against NumPy, on real ranks; used by test_own_calls.py.

Every rank can draw the inputs of all ranks, because their seeds are known. Rank 0 prints the errors of each rank as
JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.rendezvous import join
from hvdtrain.horovod_api.arithmetic import BFLOAT16
from hvdtrain.horovod_api.calls import Calls, Op

TYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16"]
SHAPES = [(), (0,), (1,), (7,), (5, 3), (0, 4), (4, 0), (3, 2, 5), (20_011,), (301, 77)]
FOLDS = {Op.SUM: np.add, Op.AVERAGE: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}


def drawn(dtype: str, shape: tuple[int, ...], *seed: int) -> np.ndarray:
    draw = np.random.default_rng([*seed, *shape])
    if dtype == "bfloat16":
        values = draw.integers(-8, 8, shape).astype(np.float32)
        return np.asarray(np.asarray(values).view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)
    low = 0 if dtype.startswith("u") or dtype == "bool" else -3
    return np.asarray(draw.integers(low, 2 if dtype == "bool" else 4, shape), dtype)


def wide(array: np.ndarray) -> np.ndarray:
    if array.dtype == BFLOAT16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def folded(parts: list[np.ndarray], op: Op, scales: tuple[float, float] = (1.0, 1.0)) -> np.ndarray:
    """NumPy's result. It is exact because the values are small, except for the divisions of an average."""
    exact = np.float64 if parts[0].dtype.kind in "fV" else np.int64 if parts[0].dtype.kind != "b" else bool
    total = wide(parts[0]).astype(exact)
    for part in parts[1:]:
        total = FOLDS[op](total, wide(part).astype(exact))
    if op is Op.AVERAGE and total.dtype != bool:
        total = total / len(parts) if total.dtype == np.float64 else np.trunc(total / len(parts)).astype(np.int64)
    return total


def same(result: np.ndarray, expected: np.ndarray, original: np.ndarray) -> None:
    assert result.dtype == original.dtype, (result.dtype, original.dtype)
    assert result.shape == expected.shape, (result.shape, expected.shape)
    if original.dtype.kind in "fV":
        rtol = {2: 5e-3 if original.dtype == np.float16 else 2e-2, 4: 1e-6}.get(original.itemsize, 1e-12)
        np.testing.assert_allclose(wide(result).astype(np.float64), expected, rtol=rtol, atol=1e-7)
    else:
        np.testing.assert_array_equal(result, expected.astype(original.dtype))


def check_reductions(calls: Calls) -> None:
    everyone = range(calls.size)
    for number, (dtype, shape) in enumerate((dtype, shape) for dtype in TYPES for shape in SHAPES):
        inputs = [drawn(dtype, shape, number, rank) for rank in everyone]
        own, kept = inputs[calls.rank], inputs[calls.rank].copy()
        one = list(FOLDS)[number % len(FOLDS)]
        for op in FOLDS if shape in ((7,), (20_011,)) else [one]:
            same(calls.call("allreduce", own, op=op), folded(inputs, op), own)
            assert own.tobytes() == kept.tobytes(), "the input has changed"
        into = own.copy()
        result = calls.call("allreduce", into, op=one, out=into)
        assert result is into
        same(into, folded(inputs, one), own)
        if shape:
            rows = [shape[0] // calls.size + (rank < shape[0] % calls.size) for rank in everyone]
            begin = sum(rows[: calls.rank])
            op = (Op.SUM, Op.AVERAGE)[number % 2]
            expected = folded(inputs, op)[begin : begin + rows[calls.rank]]
            same(calls.call("reducescatter", own, op=op), expected, own)


def check_moves(calls: Calls) -> None:
    everyone = range(calls.size)
    for number, (dtype, shape) in enumerate((dtype, shape) for dtype in TYPES for shape in SHAPES):
        root = number % calls.size
        inputs = [drawn(dtype, shape, number, rank) for rank in everyone]
        own = inputs[calls.rank]
        result = calls.call("broadcast", own, root=root)
        assert result.dtype == own.dtype
        assert result.shape == shape
        assert result.tobytes() == inputs[root].tobytes()
        into = own.copy()
        assert calls.call("broadcast", into, root=root, out=into) is into
        assert into.tobytes() == inputs[root].tobytes()
        apart = np.stack([own, own], axis=-1)[..., 0]
        assert calls.call("broadcast", own, root=root, out=apart) is apart
        assert apart.tobytes() == inputs[root].tobytes(), "the output is not contiguous"
        if not shape:
            continue
        uneven = [drawn(dtype, (shape[0] + rank, *shape[1:]), number, rank) for rank in everyone]
        result = calls.call("allgather", uneven[calls.rank])
        assert result.shape == (sum(len(each) for each in uneven), *shape[1:])
        assert result.tobytes() == b"".join(each.tobytes() for each in uneven)
        splits = [[(rank + 2 * other + number) % 5 for other in everyone] for rank in everyone]
        outgoing = [drawn(dtype, (sum(splits[rank]) + rank, *shape[1:]), number, rank) for rank in everyone]
        result, received = calls.call("alltoall", outgoing[calls.rank], splits=np.array(splits[calls.rank], np.int32))
        begins = [sum(splits[rank][: calls.rank]) for rank in everyone]
        parts = [outgoing[rank][begins[rank] : begins[rank] + splits[rank][calls.rank]] for rank in everyone]
        assert received.dtype == np.int32
        assert received.tolist() == [len(part) for part in parts]
        assert result.shape == (sum(map(len, parts)), *shape[1:])
        assert result.tobytes() == b"".join(part.tobytes() for part in parts)


def check_scales(calls: Calls) -> None:
    """Scaling before and after the sum truncates integers, as C does."""
    for dtype in ("int32", "float16", "float32", "float64"):
        for size in (9, 5000):
            inputs = [drawn(dtype, (size,), rank) for rank in range(calls.size)]
            scaled = [(part.astype(np.float64) * 1.7).astype(dtype) for part in inputs]
            total = np.sum(scaled, axis=0, dtype=np.float64)
            for op, factor in ((Op.SUM, 0.6), (Op.AVERAGE, 0.6 / calls.size)):
                expected = total * factor if dtype.startswith("f") else np.trunc(total * factor)
                result = calls.call("allreduce", inputs[calls.rank], op=op, prescale=1.7, postscale=0.6)
                np.testing.assert_allclose(result, expected, rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2)
                result = calls.call("reducescatter", inputs[calls.rank], op=op, prescale=1.7, postscale=0.6)
                rows = [size // calls.size + (rank < size % calls.size) for rank in range(calls.size)]
                begin = sum(rows[: calls.rank])
                part = expected[begin : begin + rows[calls.rank]]
                np.testing.assert_allclose(result, part, rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2)


def check_groups(calls: Calls) -> None:
    """One call can take a list of arrays of several types."""
    kinds = [("float32", (5, 2)), ("int64", (3,)), ("float32", (4000,)), ("float16", ()), ("float32", (0,))]
    for kind in ("allreduce", "allgather", "reducescatter"):
        inputs = [
            [drawn(dtype, shape or ((1,) if kind != "allreduce" else ()), rank) for dtype, shape in kinds]
            for rank in range(calls.size)
        ]
        result = calls.call(kind, inputs[calls.rank], op=Op.SUM, name="group")
        assert isinstance(result, list)
        alone = [calls.call(kind, array, op=Op.SUM) for array in inputs[calls.rank]]
        for one, other in zip(result, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3)
    into = [array.copy() for array in inputs[calls.rank]]
    calls.call("allreduce", into, op=Op.SUM, out=into)
    same(into[1], folded([each[1] for each in inputs], Op.SUM), into[1])
    assert calls.call("allreduce", []) == []


def check_orders(calls: Calls) -> None:
    """Ranks may start the same calls in different orders and from several threads, and finish them in any order."""
    names = [f"tensor {number}" for number in range(60)]
    arrays = {name: drawn("float32", (1 + 300 * (at % 7),), at, calls.rank) for at, name in enumerate(names)}
    mixed = random.Random(calls.rank).sample(names, len(names))
    handles: dict[str, int] = {}

    def begin(part: list[str]) -> None:
        for name in part:
            handles[name] = calls.start("allreduce", arrays[name], name=name, op=Op.SUM)

    threads = [threading.Thread(target=begin, args=(mixed[at::3],)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(handles.values())) == len(names)
    for name in reversed(names):
        at = names.index(name)
        parts = [drawn("float32", arrays[name].shape, at, rank) for rank in range(calls.size)]
        same(calls.finish(handles[name]), folded(parts, Op.SUM), arrays[name])
    late = calls.start("barrier")
    raises(ValueError, "handle", lambda: calls.finish(10**9))
    calls.finish(late)
    raises(ValueError, "has been finished", lambda: calls.finish(late))


def check_is_asynchronous(calls: Calls) -> None:
    if calls.rank == 0:
        handle = calls.start("allreduce", np.ones(3), name="late")
        assert not calls.done(handle), "the other ranks have not started it"
        calls.call("barrier")
    else:
        calls.call("barrier")
        handle = calls.start("allreduce", np.ones(3), name="late")
    assert calls.finish(handle).tolist() == [1, 1, 1]


def raises(kind: type[BaseException], words: str, action: Callable[[], Any]) -> str:
    try:
        action()
    except kind as error:
        assert words in str(error), (words, str(error))
        return str(error)
    raise AssertionError(f"no {kind.__name__}: {words}")


def check_disagreements(calls: Calls) -> list[str]:
    """All ranks get the same errors, and later calls still work."""
    own, last = calls.rank, calls.size - 1
    odd = calls.rank == last
    failed = internal_error()
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("shape is [3] on rank 0 and [4]", lambda: calls.call("allreduce", np.ones(4 if odd else 3))),
        ("number of dimensions", lambda: calls.call("allreduce", np.ones((3, 1) if odd else 3))),
        ("data type is float64", lambda: calls.call("allreduce", np.ones(3, np.int32 if odd else np.float64))),
        ("reduction is sum", lambda: calls.call("allreduce", np.ones(3), op=Op.MIN if odd else Op.SUM)),
        ("prescale", lambda: calls.call("allreduce", np.ones(3), prescale=2.0 if odd else 1.0)),
        ("root rank is 0 on rank 0", lambda: calls.call("broadcast", np.ones(3), root=last if odd else 0)),
        ("shape after the first", lambda: calls.call("allgather", np.ones((2, 3 + odd)))),
        ("operation is allreduce", lambda: calls.call("allgather" if odd else "allreduce", np.ones(3))),
        ("number of arrays", lambda: calls.call("allreduce", [np.ones(3)] * (1 + odd))),
        ("scalar", lambda: calls.call("allgather", np.ones(()))),
        ("scalar", lambda: calls.call("reducescatter", np.ones(()))),
        ("data type", lambda: calls.call("alltoall", np.ones(calls.size, np.int32 if odd else np.float32))),
    ]
    messages = [raises(failed, words, action) for words, action in cases]
    local_errors: list[tuple[type[BaseException], str, Callable[[], Any]]] = [
        (ValueError, "root rank 99", lambda: calls.start("broadcast", np.ones(3), root=99)),
        (ValueError, "evenly", lambda: calls.start("alltoall", np.ones(calls.size + 1))),
        (ValueError, "whole numbers", lambda: calls.start("alltoall", np.ones(4), splits=np.ones(calls.size))),
        (ValueError, "splits for", lambda: calls.start("alltoall", np.ones(4), splits=[1])),
        (ValueError, "exceed the 1 rows", lambda: calls.start("alltoall", np.ones(1), splits=[1] * calls.size)),
        (ValueError, "negative", lambda: calls.start("alltoall", np.ones(4), splits=[*[1] * last, -1])),
        (ValueError, "not a member", lambda: calls.start("barrier", ranks=[(own + 1) % calls.size])),
        (TypeError, "convert it", lambda: calls.start("allreduce", np.array(["a"]))),
        (NotImplementedError, "Adasum", lambda: calls.start("allreduce", np.ones(4), op=Op.ADASUM)),
    ]
    for kind, words, action in local_errors:
        raises(kind, words, action)
    first = calls.start("allreduce", np.ones(3), name="twice") if own == 0 else None
    if own == 0:
        raises(ValueError, "in progress", lambda: calls.start("allreduce", np.ones(3), name="twice"))
    calls.call("barrier")
    calls.finish(calls.start("allreduce", np.ones(3), name="twice") if first is None else first)
    return messages


def check_sets(calls: Calls) -> None:
    """Two process sets make calls of the same names at the same time. A root is a rank of the job."""
    members = [rank for rank in range(calls.size) if rank % 2 == calls.rank % 2]
    for size in (3, 4000):
        inputs = {rank: drawn("float32", (size,), rank) for rank in members}
        result = calls.call("allreduce", inputs[calls.rank], op=Op.SUM, ranks=members)
        same(result, folded(list(inputs.values()), Op.SUM), inputs[calls.rank])
        result = calls.call("broadcast", inputs[calls.rank], root=members[-1], ranks=members, name="set")
        assert result.tobytes() == inputs[members[-1]].tobytes()
        result = calls.call("allgather", inputs[calls.rank], ranks=members)
        assert result.tobytes() == b"".join(part.tobytes() for part in inputs.values())
    calls.call("barrier", ranks=members)


def check_idle(calls: Calls) -> None:
    """Without calls, no byte is sent and no other thread wakes up for two seconds."""
    calls.call("barrier")
    before, now = None, (sent_bytes(), turns())
    while before != now:
        before = now
        time.sleep(2)
        now = sent_bytes(), turns()
    # These values are not read again, because a faster rank may be in the barrier already, which wakes a thread.
    assert {state for state, *_ in now[1].values()} == {"S"}, now
    calls.call("barrier")


def turns() -> dict[int, list[str]]:
    """The state of each other thread of this process (S: asleep), and its number of context switches."""
    status = {int(task.name): (task / "status").read_text() for task in Path("/proc/self/task").iterdir()}
    del status[threading.get_native_id()]
    fields = re.compile(r"^(?:State|(?:non)?voluntary_ctxt_switches):\s*(\w+)", re.MULTILINE)
    return {thread: fields.findall(text) for thread, text in status.items()}


def sent_bytes() -> int:
    """Bytes sent and received by this process's TCP sockets: tcpi_bytes_acked and _received (linux/tcp.h)."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(descriptor.name)))
        except OSError:
            continue
        with connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += int.from_bytes(info[120:128], "little") + int.from_bytes(info[128:136], "little")
    return total


def main() -> None:
    rendezvous = join(launch_env())
    calls = Calls(rendezvous, Endpoint("127.0.0.1", "lo", loopback=True))
    check_is_asynchronous(calls)
    check_reductions(calls)
    check_moves(calls)
    check_scales(calls)
    check_groups(calls)
    check_orders(calls)
    messages = check_disagreements(calls) if calls.size > 1 else []
    check_sets(calls)
    check_idle(calls)
    reports = [json.loads(each) for each in rendezvous.gather_bytes(json.dumps(messages).encode())]
    if calls.rank == 0:
        print(json.dumps({"ranks": reports}))
    calls.call("barrier")
    calls.close()
    raises(internal_error(), "no more calls", lambda: calls.start("barrier"))
    rendezvous.shutdown()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
