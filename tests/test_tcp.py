"""The TCP backend: sums equal NumPy's with the same bits everywhere, and faults are reported.

Some tests use real ranks under both launchers, the others threads of this process with real sockets.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_S, PROGRAMS, ROOT, document, environment, launch, until
from hypothesis import given, settings
from hypothesis import strategies as some
from programs.calls_ranks import turns
from thread_ranks import ThreadRendezvous, at_once, meetings, reach

from hvdtrain import strategies
from hvdtrain.comm import stream as streams
from hvdtrain.comm.backends.base import RankGroup
from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.comm.backends.tcp import (
    QUEUE_BYTES,
    SMALL_BYTES,
    TcpCommunicator,
    TcpLeaderGroup,
    all_reduce_hops,
    all_to_all_hops,
)
from hvdtrain.comm.errors import PeerLost, lost_peer
from hvdtrain.comm.stream import Stream
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.sentinel import auth
from hvdtrain.system.exits import Failure

# --- real ranks -------------------------------------------------------------------------------------------------------


def host_sends(hosts: int, size: int, item_bytes: int) -> tuple[int, int]:
    """Return the minimum and maximum payload that a host sends for a sum."""
    whole = size * item_bytes
    if whole <= SMALL_BYTES or size < hosts:
        return (hosts - 1) * whole, (hosts - 1) * whole
    chunks = {size // hosts * item_bytes, -(-size // hosts) * item_bytes}
    return min(whole + (hosts - 2) * c for c in chunks), max(whole + (hosts - 2) * c for c in chunks)


@functools.cache
def reported(ranks: int, per_host: int, launcher: str, *backend: str) -> Any:
    return document(launch(ranks, [str(PROGRAMS / "tcp_ranks.py"), str(per_host), *backend], launcher))


@pytest.mark.parametrize(
    ("ranks", "per_host", "launcher"), [(3, 2, "mpirun"), (4, 1, "mpirun"), (4, 2, "horovodrun --gloo")]
)
def test_ranks_sum_as_numpy_does_and_send_the_expected_bytes(ranks: int, per_host: int, launcher: str) -> None:
    report = reported(ranks, per_host, launcher)
    hosts = report["hosts"]
    assert hosts == -(-ranks // per_host)
    for case in report["sums"]:
        assert case["identical"], case
        rounding = 0 if case["dtype"] == "int64" else 4 * ranks * np.finfo(case["dtype"]).eps * ranks
        assert case["error"] <= rounding, case
        for rank, (sent, local) in enumerate(case["sent_bytes"]):
            if rank % per_host:
                assert (sent, local) == (0, case["bytes"]), "a member sends its vector to its leader"
                continue
            members = min(per_host, ranks - rank) - 1
            least, most = host_sends(hosts, case["size"], np.dtype(case["dtype"]).itemsize)
            assert least <= sent <= most, case
            assert local == members * case["bytes"]
        if case["size"] == 1_330_000 and per_host == 1:
            assert case["sent_bytes"][0][0] == pytest.approx(2 * (hosts - 1) / hosts * case["bytes"], rel=1e-5)
    assert all(report["leaders_exchange"])
    assert report["gathered"] == ["x" * 1000 * rank for rank in range(ranks)]
    assert report["sum"] == [[ranks, sum(range(ranks))]]
    assert report["broadcast"] == [[1, 2], [3, 0]]


@pytest.mark.parametrize(("ranks", "per_host"), [(3, 2), (4, 1)])
def test_mpi_between_hosts_gives_the_same_bits(ranks: int, per_host: int) -> None:
    assert reported(ranks, per_host, "mpirun", "mpi") == reported(ranks, per_host, "mpirun")


@pytest.mark.parametrize(
    ("engine", "error", "dying"),
    [("tcp", "PeerLost", 0), ("tcp", "PeerLost", 3), ("calls", "HorovodInternalError", 0)],
    ids=["leader", "member of another host", "calls"],
)
def test_every_rank_notices_that_a_rank_died(engine: str, error: str, dying: int, tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAMS / "tcp_dying.py"), str(tmp_path)]
    processes = [
        subprocess.Popen([*words, str(rank), str(dying), engine], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL)
        for rank in range(4)
    ]
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [-9 if rank == dying else 0 for rank in range(4)]
    for rank in set(range(4)) - {dying}:
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["error"] == error, report
        assert report["lost_peer"], report


# --- threads of this process ------------------------------------------------------------------------------------------


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@contextlib.contextmanager
def connected(count: int) -> Iterator[list[TcpLeaderGroup]]:
    """Connect each pair of hosts by a stream."""
    table: list[list[Stream | None]] = [[None] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            one, other = socket_pair()
            table[i][j], table[j][i] = Stream(one, j), Stream(other, i)
    try:
        yield [TcpLeaderGroup(row) for row in table]
    finally:
        for stream in (stream for row in table for stream in row if stream is not None):
            stream.socket.close()


dtypes = some.sampled_from(["float32", "float64", "int64", "uint8"])


@settings(max_examples=20)
@given(count=some.integers(2, 5), sizes=some.lists(some.integers(0, 3000), min_size=1, max_size=4), dtype=dtypes)
def test_sums_of_any_size_in_succession(count: int, sizes: list[int], dtype: str) -> None:
    random = np.random.default_rng(count)
    inputs = [[(100 * random.normal(size=size)).astype(dtype) for size in sizes] for _ in range(count)]

    def host(hosts: TcpLeaderGroup) -> tuple[list[np.ndarray], int]:
        vectors = [values.copy() for values in inputs[hosts.index]]
        for values in vectors:
            hosts.all_reduce(values)
        return vectors, hosts.sent_bytes

    with connected(count) as all_hosts:
        results = at_once([lambda hosts=hosts: host(hosts) for hosts in all_hosts])
    limits = [host_sends(count, size, np.dtype(dtype).itemsize) for size in sizes]
    for vectors, sent in results:
        assert sum(least for least, _ in limits) <= sent <= sum(most for _, most in limits)
        for index, values in enumerate(vectors):
            assert values.tobytes() == results[0][0][index].tobytes()
            expected = np.sum([vectors[index] for vectors in inputs], axis=0, dtype=dtype)
            np.testing.assert_allclose(values, expected, atol=1e-3)


@settings(max_examples=20)
@given(data=some.data(), count=some.integers(1, 5), dtype=dtypes)
def test_all_to_all_delivers_every_part_to_its_host(data: some.DataObject, count: int, dtype: str) -> None:
    lengths = [[data.draw(some.integers(0, 2000)) for _ in range(count)] for _ in range(count)]
    table = [[np.arange(n).astype(dtype) + np.array(i, dtype) for n in row] for i, row in enumerate(lengths)]
    with connected(count) as all_hosts:
        results = at_once([lambda hosts=hosts: hosts.all_to_all(table[hosts.index]) for hosts in all_hosts])
        sent = [hosts.sent_bytes for hosts in all_hosts]
    for target, parts in enumerate(results):
        assert [array.dtype for array in parts] == [dtype] * count
        for source, array in enumerate(parts):
            np.testing.assert_array_equal(array, table[source][target])
    item = np.dtype(dtype).itemsize
    assert sent == [item * (sum(row) - row[host]) for host, row in enumerate(lengths)]


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("size", [100, QUEUE_BYTES // 4 + 1, 200_000])
def test_long_parts_of_equal_length_arrive_separately(count: int, size: int) -> None:
    table = np.random.default_rng(count).normal(size=(count, count, size)).astype(np.float32)
    parts = [[row[to, : 0 if to == me else size] for to in range(count)] for me, row in enumerate(table)]
    with connected(count) as all_hosts:
        results = at_once([lambda h=hosts: h.all_to_all(parts[h.index], even=True) for hosts in all_hosts])
        gathered = at_once(
            [lambda h=hosts: dict(h.all_to_all_streamed(lambda _: table[h.index, 0], even=True)) for hosts in all_hosts]
        )
        assert [hosts.sent_bytes for hosts in all_hosts] == [2 * (count - 1) * 4 * size] * count
    for target, source in itertools.permutations(range(count), 2):
        np.testing.assert_array_equal(gathered[target][source].view(np.float32), table[source, 0])
        np.testing.assert_array_equal(results[target][source], table[source, target])


def test_received_arrays_are_writable_and_inputs_do_not_change() -> None:
    """A reducer works in place on the arrays that it receives."""
    with connected(3) as all_hosts:
        part = np.ones(4, np.float32)
        results = at_once([lambda hosts=hosts: hosts.all_gather(part) for hosts in all_hosts])
    for index, parts in enumerate(results):
        for array in (array for host, array in enumerate(parts) if host != index):
            array *= 2
    np.testing.assert_array_equal(part, np.ones(4))


class Delayed(TcpLeaderGroup):
    """A host whose messages arrive one latency after they were sent; `clock` counts the latencies that passed here."""

    clock = 0

    def _swap(self, target: int | None, data: np.ndarray | None, source: int | None, *rest: object) -> np.ndarray:
        if target is not None and data is not None:
            super()._swap(target, np.array([self.clock + 1]), None)
            super()._swap(target, data, None)
        if source is None:
            return np.empty(0, np.uint8)
        arrival = super()._swap(None, None, source).view(np.int64)
        self.clock = max(self.clock, int(arrival[0]))
        return super()._swap(None, None, source, *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("nbytes", [400, SMALL_BYTES, SMALL_BYTES + 4, QUEUE_BYTES // 4, QUEUE_BYTES + 4])
def test_exchanges_take_the_declared_number_of_hops(count: int, nbytes: int) -> None:
    """`cost()` computes with these numbers."""
    vector = np.ones(nbytes // 4, np.float32)
    calls = {
        "all_reduce": (lambda hosts: hosts.all_reduce(vector.copy()), all_reduce_hops(nbytes, count)),
        "all_gather": (lambda hosts: hosts.all_gather(vector), all_to_all_hops(nbytes, count)),
        "even": (lambda hosts: hosts.all_gather(vector, even=True), all_to_all_hops(nbytes, count, even=True)),
    }
    for name, (call, hops) in calls.items():
        with connected(count) as hosts:
            delayed = [Delayed(host._streams) for host in hosts]
            at_once([lambda call=call, host=host: call(host) for host in delayed])
        assert [host.clock for host in delayed] == [hops] * count, name
    assert all_reduce_hops(nbytes, 1) == all_to_all_hops(nbytes, 1) == 0


def test_hosts_that_disagree_on_a_length_get_an_error() -> None:
    with connected(2) as (one, other):
        results = at_once(
            [lambda: one.all_reduce(np.ones(1000)), lambda: other.all_reduce(np.ones(1002))], RuntimeError
        )
    assert all(isinstance(error, RuntimeError) for error in results)
    assert str(results[0]) == "rank 1 sent 4008 bytes where 4000 were expected"
    assert not any(lost_peer(error) for error in results)


@pytest.mark.parametrize("size", [4, 1_000_000], ids=["small", "large"])
def test_a_closed_stream_is_a_lost_peer(size: int) -> None:
    with connected(2) as (one, other):
        stream = other._streams[0]
        assert stream is not None
        closing = threading.Timer(0.2, stream.socket.close)
        closing.start()
        (error,) = at_once([lambda: one.all_reduce(np.ones(size))], PeerLost)
        closing.join()
    assert isinstance(error, PeerLost) and str(error).startswith("rank 1") and lost_peer(error)


@pytest.mark.parametrize("size", [4, 4_000_000], ids=["small", "large"])
def test_a_rank_whose_script_has_ended_is_named(size: int) -> None:
    """Also to ranks that have sent it more than fits into the buffers."""

    def program(meeting: ThreadRendezvous) -> None:
        world = TcpCommunicator(meeting, reach(meeting.rank))
        world.sum(np.ones(4, np.float32), "first")
        if meeting.rank == 1:
            world.leave()
        with pytest.raises(PeerLost, match="the script of rank 1 has ended" if meeting.rank == 0 else "rank 0"):
            world.gather_bytes(bytes(size))
        world.shutdown()

    at_once([functools.partial(program, meeting) for meeting in meetings(2)])


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("Horovod has been shut down"), False),
        (ValueError("PeerLost: no such file"), False),
        (concurrent.futures.CancelledError(), False),
        (type("UnavailableError", (Exception,), {"__module__": "__main__"})("the database"), False),
        (internal_error()("Horovod has been shut down"), True),
        (internal_error()("Mismatched allreduce tensor shapes"), False),
        (PeerLost("rank 1 closed its connection"), True),
    ],
    ids=repr,
)
def test_only_errors_of_the_libraries_are_a_lost_peer(error: Exception, lost: bool) -> None:
    """A script's own errors keep their traceback, whatever their message is."""
    with pytest.raises(type(error)) as raised:
        raise error
    assert lost_peer(raised.value) is lost
    with pytest.raises(OSError, match="wrapped") as wrapped:
        raise OSError("wrapped") from error
    assert lost_peer(wrapped.value) is lost


def segments(stream: Stream | None) -> tuple[int, int]:
    """TCP segments sent and received so far (tcp_info in linux/tcp.h)."""
    assert stream is not None
    sent, received = struct.unpack_from("II", stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 136)
    return sent, received


@pytest.mark.parametrize("size", [4, 1_000_000], ids=["small", "large"])
def test_a_waiting_rank_neither_computes_nor_sends(size: int) -> None:
    thread: list[int] = []

    def wait() -> None:
        thread.append(threading.get_native_id())
        waiting.all_reduce(np.ones(size))

    def look() -> tuple[list[str], tuple[int, int]]:
        return turns()[thread[0]], segments(waiting._streams[1])

    def asleep() -> bool:
        (began, before), _, (ended, after) = look(), time.sleep(1), look()
        sent, received = (later - sooner for sooner, later in zip(before, after, strict=True))
        if size == 4:
            silent = (sent, received) == (0, 0)
        else:  # the kernel asks a full receiver from time to time whether it has room (RFC 9293, 3.8.6.1)
            silent = max(sent, received) < 10
        return began == ended and ended[0] == "S" and silent and after != at_connection

    def be_late(hosts: TcpLeaderGroup) -> None:
        until(lambda: thread and asleep(), what=lambda: str(look()))
        hosts.all_reduce(np.ones(size))

    with connected(2) as (waiting, late):
        at_connection = segments(waiting._streams[1])
        assert at_once([wait, lambda: be_late(late)]) == [None, None]


# --- connecting -------------------------------------------------------------------------------------------------------


def test_connections_of_strangers_do_not_delay_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port scanners and other jobs connect before the ranks: talkative, terse, silent, closed and reset.

    Waiting for one of them would take an hour.
    """
    monkeypatch.setattr(auth, "VISIT_S", 3600.0)
    monkeypatch.setattr(streams, "PATIENCE_S", 3600.0)
    strangers: list[socket.socket] = []

    def connect_strangers(messages: list[bytes]) -> None:
        for _, address, port in (message.decode().split() for message in messages):
            for words in (b"GET / HTTP/1.0\r\nHost: somebody.else\r\n\r\n", b"\0" * 20, b"hi", b""):
                strangers.append(socket.create_connection((address, int(port))))
                strangers[-1].sendall(words)
            socket.create_connection((address, int(port))).close()
            with socket.create_connection((address, int(port))) as reset:
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def rank(rendezvous: ThreadRendezvous) -> list[float]:
        ranks = TcpCommunicator(rendezvous, reach(rendezvous.rank))
        values = ranks.sum(np.array([1.0, rendezvous.rank]), "sum")
        ranks.shutdown()
        return list(values)

    results = at_once([functools.partial(rank, rendezvous) for rendezvous in meetings(3, connect_strangers)])
    for stranger in strangers:
        stranger.close()
    assert results == [[3.0, 3.0]] * 3


def test_a_rank_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.9", 0)) as closed:
        port = closed.getsockname()[1]

    def absent(rendezvous: ThreadRendezvous) -> None:
        rendezvous.gather_bytes(f"{socket.gethostname()} 127.0.0.9 {port}".encode())

    for number, problem in ((0, "rank 1 did not connect within 0.5 s"), (1, f"at 127.0.0.9, port {port}")):
        ranks = meetings(2)
        present, other = ranks[number], ranks[1 - number]
        failure, _ = at_once(
            [lambda: TcpCommunicator(present, reach(number)), lambda: absent(other)],  # noqa: B023
            Failure,
        )
        assert isinstance(failure, Failure) and failure.code == 69 and problem in str(failure)


@pytest.mark.parametrize("hosts", [1, 2])
def test_hosts_that_share_a_name_are_distinguished_by_address(hosts: int) -> None:
    """So the exchange between them is split, to overlap with backward."""

    def parts(rendezvous: ThreadRendezvous) -> int:
        group = RankGroup(rendezvous, None, reach(rendezvous.rank % hosts))
        communicator = connect("torch", backend="tcp", group=group)
        strategy = strategies.parse("powersgd").make(TrainConfig(), communicator, [(256, 64)] * 4)
        communicator.shutdown()
        return len(strategy.buckets())

    assert at_once([functools.partial(parts, each) for each in meetings(2)]) == [4 * (hosts - 1)] * 2


class Replica:
    """`strategies.Vectors` whose gradients are given."""

    def __init__(self, gradients: np.ndarray) -> None:
        self.memory = np.append(gradients, [0, 1, 0]).astype(np.float32)

    def vector(self) -> np.ndarray:
        return self.memory

    updates_parts = False

    def apply(self, lr: float) -> None:
        """There are no weights."""


def test_all_ranks_use_the_number_of_buckets_that_was_fastest_and_keep_it_after_a_resume() -> None:
    shapes = [(64, 80)] * 4
    random = np.random.default_rng(7)
    gradients = random.normal(size=(40, 2, 4 * 64 * 80)).astype(np.float32)

    def rank(rendezvous: ThreadRendezvous) -> tuple[list[int], list[int], bool, float]:
        group = RankGroup(rendezvous, None, reach(rendezvous.rank))
        ranks = [connect("torch", backend="tcp", group=group) for _ in range(2)]
        made = [strategies.parse("int8").make(TrainConfig(buckets=0), each, shapes) for each in ranks]
        reported = [strategy.buckets() for strategy in made]
        counts, errors, equal = [], [], True

        def step(strategy: strategies.Strategy, number: int) -> np.ndarray:
            replica = Replica(gradients[number, rendezvous.rank])
            for bucket in range(len(reported[0])):
                strategy.on_bucket_ready(bucket, replica.memory)
            strategy.step(replica, 0.1, Clock())
            return replica.memory

        for number in range(40):
            if number in (10, 35):  # the second strategy continues from here, in and after the trial
                made[1].load({name: array.copy() for name, array in made[0].state().items()})
            counts.append(len(made[0]._buckets))
            summed = step(made[0], number)
            if number in (10, 35):
                equal &= np.array_equal(summed, step(made[1], number))
            errors.append(float(np.abs(summed[:-3] - gradients[number].sum(0)).max()))
        state = made[0].state()["buckets"].tolist()
        for each in ranks:
            each.shutdown()
        return counts, state, equal, max(errors)

    (counts, state, equal, error), other = at_once([functools.partial(rank, each) for each in meetings(2)])
    assert counts[3:27:4] == [1, 2, 4, 4, 2, 1] and set(counts[27:]) == {state[1]} and state[0] == -1
    assert counts == other[0] and equal and other[2]
    assert error < 0.2  # int8 rounds to 1/127 of the largest of 64 numbers
