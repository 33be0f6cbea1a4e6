"""Every operation of collectives.streams on real ranks; rank 0 prints as JSON what came out. Used by test_streams.py.

    streams_ranks.py RANKS_PER_HOST

One machine plays several hosts: every so many ranks have a loopback address of their own (127.0.0.1, 127.0.0.2 ...),
and ranks of different addresses are on different hosts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys

import numpy as np

from hvdtrain.comm.backends.base import Reach
from hvdtrain.comm.backends.tcp import StreamRanks
from hvdtrain.comm.rendezvous import meet
from hvdtrain.comm.world import place

LARGE = [("float32", 1_330_000), ("float64", 100_003), ("int64", 100_003)]


def drawn(dtype: str, size: int, rank: int) -> np.ndarray:
    draw = np.random.default_rng([size, rank])
    if np.issubdtype(dtype, np.integer):
        return draw.integers(-(2**40), 2**40, size).astype(dtype)
    return draw.normal(size=size).astype(dtype)


def summed(ranks: StreamRanks, dtype: str, size: int) -> dict:
    """A vector's sum over ranks, compared with NumPy's; what each rank sent."""
    values = drawn(dtype, size, ranks.rank)
    before = np.array([ranks.sent_bytes, ranks.local_sent_bytes])
    with ranks.hosts(values) as hosts:
        if hosts is not None:
            hosts.sum(values)
    sent = (np.array([ranks.sent_bytes, ranks.local_sent_bytes]) - before).tolist()
    exact = np.int64 if dtype == "int64" else np.float64
    expected = np.sum([drawn(dtype, size, rank) for rank in range(ranks.size)], axis=0, dtype=exact)
    error = float(np.max(np.abs(values - expected), initial=0))
    told = ranks.gather(json.dumps([hashlib.sha256(values.tobytes()).hexdigest(), error, sent]).encode())
    digests, errors, sent_bytes = zip(*(json.loads(each) for each in told), strict=True)
    return {
        "dtype": dtype,
        "size": size,
        "bytes": values.nbytes,
        "identical": len(set(digests)) == 1,
        "error": max(errors),
        "sent_bytes": sent_bytes,  # to the network, and inside the host
    }


def part(source: int, target: int) -> np.ndarray:
    """What one host sends to another: lengths differ, some are empty, one is larger than any buffer of a socket."""
    length = 3_000_000 if (source, target) == (0, 1) else (source + 2 * target) % 4
    return np.arange(length, dtype=np.int64) + 100 * source + target


def between_hosts(ranks: StreamRanks) -> bool:
    """Whether exchange and gather of the leaders bring what was sent."""
    hosts = ranks.network
    if hosts is None:
        return True
    found = hosts.exchange([part(hosts.index, target) for target in range(hosts.count)])
    right = all(np.array_equal(found[source], part(source, hosts.index)) for source in range(hosts.count))
    assert all(array.dtype == np.int64 for array in found)
    for dtype in ("uint8", "float32", "float64"):
        gathered = hosts.gather(np.arange(hosts.index % 3, dtype=dtype))
        right &= all(np.array_equal(gathered[host], np.arange(host % 3)) for host in range(hosts.count))
        assert all(array.dtype == dtype for array in gathered)
    return right


def main() -> None:
    per_host, where = int(sys.argv[1]), place()
    meeting = meet(where)
    address = f"127.0.0.{1 + where.rank // per_host}"
    ranks = StreamRanks(meeting, Reach(address, "lo", loopback=True))
    sizes = (0, 1, 3, ranks.hosts_count - 1, 512, 513)
    cases = [*itertools.product(("float32", "float64", "int64"), sizes), *LARGE]
    report = {
        "hosts": ranks.hosts_count,
        "sums": [summed(ranks, dtype, size) for dtype, size in cases],
        "between_hosts": [each == b"True" for each in ranks.gather(str(between_hosts(ranks)).encode())],
        "gathered": [each.decode() for each in ranks.gather(b"x" * 1000 * ranks.rank)],
        "sum": ranks.sum(np.array([[1.0, ranks.rank]]), "sum").tolist(),
        "broadcast": ranks.broadcast(np.array([[1, 2], [3, ranks.rank]], np.int32), "broadcast").tolist(),
    }
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    ranks.leave()


main()
