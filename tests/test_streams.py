"""TCP streams between ranks: sums are NumPy's and the same bits everywhere, bytes are the formula's, faults are told.

Real ranks under both launchers, and threads of this process with real sockets.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import LIMIT_S, PROGRAMS, ROOT, document, environment, launch, until
from hypothesis import given, settings
from hypothesis import strategies as some
from programs.calls_ranks import turns
from thread_ranks import ThreadMeeting, at_once, meetings, reach

from hvdtrain import strategies
from hvdtrain.comm.backends import tcp
from hvdtrain.comm.backends.base import PeerLost, lost_peer
from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.comm.backends.tcp import QUEUE_BYTES, SMALL_BYTES, Stream, StreamHosts, StreamRanks
from hvdtrain.comm.world import Met, World
from hvdtrain.config.options import TrainConfig
from hvdtrain.sentinel import auth
from hvdtrain.system.exits import Failure

# --- real ranks -------------------------------------------------------------------------------------------------------


def host_sends(hosts: int, size: int, item_bytes: int) -> tuple[int, int]:
    """Least and most payload that one host may send to the others for a sum."""
    whole = size * item_bytes
    if whole <= SMALL_BYTES or size < hosts:
        return (hosts - 1) * whole, (hosts - 1) * whole
    chunks = {size // hosts * item_bytes, -(-size // hosts) * item_bytes}
    return min(whole + (hosts - 2) * c for c in chunks), max(whole + (hosts - 2) * c for c in chunks)


@pytest.mark.parametrize(
    ("ranks", "per_host", "launcher"),
    [(2, 2, "mpirun"), (3, 2, "mpirun"), (4, 1, "mpirun"), (4, 2, "horovodrun --gloo")],
)
def test_ranks_sum_as_numpy_does_and_send_what_the_formula_says(ranks: int, per_host: int, launcher: str) -> None:
    report = document(launch(ranks, [str(PROGRAMS / "streams_ranks.py"), str(per_host)], launcher))
    hosts = report["hosts"]
    assert hosts == -(-ranks // per_host)
    for case in report["sums"]:
        assert case["identical"], case
        rounding = 0 if case["dtype"] == "int64" else 4 * ranks * np.finfo(case["dtype"]).eps * ranks
        assert case["error"] <= rounding, case
        for rank, (sent, local) in enumerate(case["sent_bytes"]):
            if rank % per_host:
                assert (sent, local) == (0, case["bytes"]), "a member hands its vector to its leader"
                continue
            members = min(per_host, ranks - rank) - 1
            least, most = host_sends(hosts, case["size"], np.dtype(case["dtype"]).itemsize)
            assert least <= sent <= most, case
            assert local == members * case["bytes"]
        if case["size"] == 1_330_000 and per_host == 1:
            assert case["sent_bytes"][0][0] == pytest.approx(2 * (hosts - 1) / hosts * case["bytes"], rel=1e-5)
    assert all(report["between_hosts"])
    assert report["gathered"] == ["x" * 1000 * rank for rank in range(ranks)]
    assert report["sum"] == [[ranks, sum(range(ranks))]]
    assert report["broadcast"] == [[1, 2], [3, 0]]


@pytest.mark.parametrize("dying", [0, 3], ids=["a leader", "a member of another host"])
@pytest.mark.parametrize(("carrier", "error"), [("streams", "PeerLost"), ("calls", "HorovodInternalError")])
def test_all_know_that_a_rank_died(carrier: str, error: str, dying: int, tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAMS / "streams_dying.py"), str(tmp_path)]
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(dying), carrier], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL
        )
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
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["error"] == error, told
        assert told["lost_peer"], told


# --- threads of this process ------------------------------------------------------------------------------------------


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@contextlib.contextmanager
def connected(count: int) -> Iterator[list[StreamHosts]]:
    """Hosts with streams between all of them."""
    table: list[list[Stream | None]] = [[None] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            one, other = pair()
            table[i][j], table[j][i] = Stream(one, j), Stream(other, i)
    try:
        yield [StreamHosts(row) for row in table]
    finally:
        for stream in (stream for row in table for stream in row if stream is not None):
            stream.socket.close()


dtypes = some.sampled_from(["float32", "float64", "int64", "uint8"])


@settings(max_examples=40)
@given(count=some.integers(2, 5), sizes=some.lists(some.integers(0, 3000), min_size=1, max_size=4), dtype=dtypes)
def test_sums_of_any_size_one_after_the_other(count: int, sizes: list[int], dtype: str) -> None:
    draw = np.random.default_rng(count)
    given_ = [[(100 * draw.normal(size=size)).astype(dtype) for size in sizes] for _ in range(count)]

    def host(hosts: StreamHosts) -> tuple[list[np.ndarray], int]:
        mine = [values.copy() for values in given_[hosts.index]]
        for values in mine:
            hosts.sum(values)
        return mine, hosts.sent_bytes

    with connected(count) as all_hosts:
        results = at_once([lambda hosts=hosts: host(hosts) for hosts in all_hosts])
    limits = [host_sends(count, size, np.dtype(dtype).itemsize) for size in sizes]
    for mine, sent in results:
        assert sum(least for least, _ in limits) <= sent <= sum(most for _, most in limits)
        for index, values in enumerate(mine):
            assert values.tobytes() == results[0][0][index].tobytes()
            np.testing.assert_allclose(values, np.sum([each[index] for each in given_], axis=0, dtype=dtype), atol=1e-3)


@settings(max_examples=40)
@given(data=some.data(), count=some.integers(1, 5), dtype=dtypes)
def test_exchange_brings_every_part_to_its_host(data: some.DataObject, count: int, dtype: str) -> None:
    lengths = [[data.draw(some.integers(0, 2000)) for _ in range(count)] for _ in range(count)]
    table = [[np.arange(n).astype(dtype) + np.array(i, dtype) for n in row] for i, row in enumerate(lengths)]
    with connected(count) as all_hosts:
        results = at_once([lambda hosts=hosts: hosts.exchange(table[hosts.index]) for hosts in all_hosts])
        sent = [hosts.sent_bytes for hosts in all_hosts]
    for target, found in enumerate(results):
        assert [array.dtype for array in found] == [dtype] * count
        for source, array in enumerate(found):
            np.testing.assert_array_equal(array, table[source][target])
    item = np.dtype(dtype).itemsize
    assert sent == [item * (sum(row) - row[host]) for host, row in enumerate(lengths)]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [100, QUEUE_BYTES // 4 + 1, 200_000])
def test_long_parts_of_one_length_keep_apart_and_arrive(count: int, size: int) -> None:
    table = np.random.default_rng(count).normal(size=(count, count, size)).astype(np.float32)
    parts = [[row[to, : 0 if to == me else size] for to in range(count)] for me, row in enumerate(table)]
    with connected(count) as all_hosts:
        results = at_once([lambda h=hosts: h.exchange(parts[h.index], even=True) for hosts in all_hosts])
        gathered = at_once(
            [lambda h=hosts: dict(h.pairwise(lambda _: table[h.index, 0], even=True)) for hosts in all_hosts]
        )
        assert [hosts.sent_bytes for hosts in all_hosts] == [2 * (count - 1) * 4 * size] * count
    for me in range(count):
        for source in range(count):
            if source != me:
                np.testing.assert_array_equal(gathered[me][source].view(np.float32), table[source, 0])
                np.testing.assert_array_equal(results[me][source], table[source, me])


def test_what_came_can_be_changed_and_what_was_given_stays() -> None:
    """A reducer works in place on what it received."""
    with connected(3) as all_hosts:
        part = np.ones(4, np.float32)
        results = at_once([lambda hosts=hosts: hosts.gather(part) for hosts in all_hosts])
    for index, found in enumerate(results):
        for array in (array for host, array in enumerate(found) if host != index):
            array *= 2
    np.testing.assert_array_equal(part, np.ones(4))


def test_hosts_that_disagree_on_a_length_are_told() -> None:
    with connected(2) as (one, other):
        results = at_once([lambda: one.sum(np.ones(1000)), lambda: other.sum(np.ones(1002))], RuntimeError)
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
        (error,) = at_once([lambda: one.sum(np.ones(size))], PeerLost)
        closing.join()
    assert isinstance(error, PeerLost)
    assert str(error).startswith("rank 1")
    assert lost_peer(error)


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
def test_only_the_libraries_own_errors_are_a_lost_peer(error: Exception, lost: bool) -> None:
    """A script's own errors keep their traceback, whatever their text says."""
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
def test_a_rank_that_waits_neither_computes_nor_sends(size: int) -> None:
    waits: list[int] = []

    def asked() -> None:
        waits.append(threading.get_native_id())
        waiting.sum(np.ones(size))

    def look() -> tuple[list[str], tuple[int, int]]:
        return turns()[waits[0]], segments(waiting._streams[1])

    def asleep() -> bool:
        (began, before), _, (ended, after) = look(), time.sleep(1), look()
        sent, received = (later - sooner for sooner, later in zip(before, after, strict=True))
        if size == 4:
            silent = (sent, received) == (0, 0)
        else:  # the kernel asks a full receiver now and then whether it has room (RFC 9293, 3.8.6.1)
            silent = max(sent, received) < 10
        return began == ended and ended[0] == "S" and silent and after != connected_by

    def slow(hosts: StreamHosts) -> None:
        until(lambda: waits and asleep(), what=lambda: str(look()))
        hosts.sum(np.ones(size))

    with connected(2) as (waiting, late):
        connected_by = segments(waiting._streams[1])
        assert at_once([asked, lambda: slow(late)]) == [None, None]


# --- finding each other -----------------------------------------------------------------------------------------------


def test_strangers_at_the_door_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port scanners and other jobs, who are there before the ranks: loud, short, silent, gone and reset. Who waited for
    them would wait for an hour."""
    monkeypatch.setattr(auth, "VISIT_S", 3600.0)
    monkeypatch.setattr(tcp, "PATIENCE_S", 3600.0)
    strangers: list[socket.socket] = []

    def come(told: list[bytes]) -> None:
        for _, address, port in (each.decode().split() for each in told):
            for words in (b"GET / HTTP/1.0\r\nHost: somebody.else\r\n\r\n", b"\0" * 20, b"hi", b""):
                strangers.append(socket.create_connection((address, int(port))))
                strangers[-1].sendall(words)
            socket.create_connection((address, int(port))).close()
            with socket.create_connection((address, int(port))) as reset:
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def rank(meeting: ThreadMeeting) -> list[float]:
        ranks = StreamRanks(meeting, reach(meeting.rank))
        values = ranks.sum(np.array([1.0, meeting.rank]), "sum")
        ranks.leave()
        return list(values)

    results = at_once([lambda meeting=meeting: rank(meeting) for meeting in meetings(3, come)])
    for stranger in strangers:
        stranger.close()
    assert results == [[3.0, 3.0]] * 3


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "PATIENCE_S", 0.5)

    def absent(meeting: ThreadMeeting) -> None:
        meeting.gather(f"{socket.gethostname()} 127.0.0.9 1".encode())

    present, other = meetings(2)
    failure, nothing = at_once([lambda: StreamRanks(present, reach(0)), lambda: absent(other)], Failure)
    assert nothing is None
    assert isinstance(failure, Failure)
    assert failure.code == 69
    assert "rank 1 did not connect within 0.5 s" in str(failure)


@pytest.mark.parametrize("hosts", [1, 2])
def test_hosts_that_share_a_name_are_told_apart_by_their_addresses(hosts: int) -> None:
    """So an exchange between them goes in parts, behind backward."""

    def parts(meeting: ThreadMeeting) -> int:
        world = World("torch", carrier="streams", met=Met(meeting, None, reach(meeting.rank % hosts)))
        found = strategies.parse("powersgd").make(TrainConfig(), world, [(256, 64)] * 4).parts()
        world.leave()
        return len(found)

    assert at_once([functools.partial(parts, each) for each in meetings(2)]) == [4 * (hosts - 1)] * 2


def test_a_host_that_cannot_be_reached_is_named() -> None:
    def unreachable(meeting: ThreadMeeting) -> None:
        with socket.create_server(("127.0.0.9", 0)) as closed:
            port = closed.getsockname()[1]
        meeting.gather(f"{socket.gethostname()} 127.0.0.9 {port}".encode())

    other, present = meetings(2)
    nothing, failure = at_once([lambda: unreachable(other), lambda: StreamRanks(present, reach(1))], Failure)
    assert nothing is None
    assert isinstance(failure, Failure)
    assert failure.code == 69
    assert (
        f"rank 1 on {socket.gethostname()} cannot connect to rank 0 on {socket.gethostname()} at 127.0.0.9, port"
        in str(failure)
    )
