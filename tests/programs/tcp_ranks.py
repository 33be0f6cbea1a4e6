"""Every operation of the TCP and MPI backends on real ranks. Rank 0 prints the results as JSON. Used by test_tcp.py.

    tcp_ranks.py RANKS_PER_HOST [mpi]

One machine plays several hosts: each group of ranks has its own loopback address (127.0.0.1, 127.0.0.2, ...), and
ranks with different addresses count as different hosts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys

import numpy as np

from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.comm.backends.mpi import MpiCommunicator
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.rendezvous import join

LARGE = [("float32", 1_330_000), ("float64", 100_003), ("int64", 100_003)]


def random_vector(dtype: str, size: int, rank: int) -> np.ndarray:
    random = np.random.default_rng([size, rank])
    if np.issubdtype(dtype, np.integer):
        return random.integers(-(2**40), 2**40, size).astype(dtype)
    return random.normal(size=size).astype(dtype)


def summed(ranks: TcpCommunicator, dtype: str, size: int) -> dict:
    """The sum of a vector over ranks, compared with NumPy's, and the bytes that each rank sent."""
    values = random_vector(dtype, size, ranks.rank)
    before = np.array([ranks.sent_bytes, ranks.local_sent_bytes])
    ranks.reduce(values)
    sent = (np.array([ranks.sent_bytes, ranks.local_sent_bytes]) - before).tolist()
    exact = np.int64 if dtype == "int64" else np.float64
    expected = np.sum([random_vector(dtype, size, rank) for rank in range(ranks.size)], axis=0, dtype=exact)
    error = float(np.max(np.abs(values - expected), initial=0))
    reports = ranks.gather([hashlib.sha256(values.tobytes()).hexdigest(), error, sent])
    digests, errors, sent_bytes = zip(*reports, strict=True)
    return {
        "dtype": dtype,
        "size": size,
        "bytes": values.nbytes,
        "identical": len(set(digests)) == 1,
        "sha256": digests[0],
        "error": max(errors),
        "sent_bytes": sent_bytes,  # to the network, and inside the host
    }


def part(source: int, target: int) -> np.ndarray:
    """What one host sends to another. Lengths differ: some are 0, one is larger than any socket buffer."""
    length = 3_000_000 if (source, target) == (0, 1) else (source + 2 * target) % 4
    return np.arange(length, dtype=np.int64) + 100 * source + target


def leaders_exchange(ranks: TcpCommunicator) -> bool:
    """Whether all_to_all and all_gather of the leaders deliver the parts that were sent."""
    hosts = ranks.leaders
    if hosts is None:
        return True
    parts = hosts.all_to_all([part(hosts.index, target) for target in range(hosts.count)])
    correct = all(np.array_equal(parts[source], part(source, hosts.index)) for source in range(hosts.count))
    assert all(array.dtype == np.int64 for array in parts)
    for dtype in ("uint8", "float32", "float64"):
        gathered = hosts.all_gather(np.arange(hosts.index % 3, dtype=dtype))
        correct &= all(np.array_equal(gathered[host], np.arange(host % 3)) for host in range(hosts.count))
        assert all(array.dtype == dtype for array in gathered)
    return correct


def main() -> None:
    per_host, environment = int(sys.argv[1]), launch_env()
    rendezvous = join(environment)
    address = f"127.0.0.{1 + environment.rank // per_host}"
    made = MpiCommunicator if sys.argv[2:] == ["mpi"] else TcpCommunicator
    ranks = made(rendezvous, Endpoint(address, "lo", loopback=True))
    sizes = (0, 1, 3, ranks.hosts_count - 1, 512, 513)
    cases = [*itertools.product(("float32", "float64", "int64"), sizes), *LARGE]
    report = {
        "hosts": ranks.hosts_count,
        "sums": [summed(ranks, dtype, size) for dtype, size in cases],
        "leaders_exchange": ranks.gather(leaders_exchange(ranks)),
        "gathered": ranks.gather("x" * 1000 * ranks.rank),
        "sum": ranks.sum(np.array([[1.0, ranks.rank]]), "sum").tolist(),
        "broadcast": ranks.broadcast(np.array([[1, 2], [3, ranks.rank]], np.int32), "broadcast").tolist(),
    }
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    ranks.shutdown()


main()
