"""Sums in the shared memory of a host's ranks have the bits of a sum in rank order, as sums over TCP do."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import pytest
from conftest import PROGRAMS, document, launch
from thread_ranks import ThreadRendezvous, at_once, meetings, reach

from hvdtrain.comm.backends.shared_memory import BLOCK_BYTES, SHARED_FROM_BYTES
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.errors import PeerLost

AROUND = [SHARED_FROM_BYTES // 4 + more for more in (-1, 0, 1)]
"""Sizes of float32 vectors: over TCP, and in shared memory"""
SIZES = [3, *AROUND, *(blocks * BLOCK_BYTES // 4 + 1 for blocks in (1, 2, 5)), AROUND[1], 0, BLOCK_BYTES // 4]


def vector(size: int, rank: int, dtype: str = "float32") -> np.ndarray:
    return (1000 * np.random.default_rng([size, rank]).normal(size=size)).astype(dtype)


def in_rank_order(vectors: list[np.ndarray]) -> np.ndarray:
    total = vectors[0].copy()
    for other in vectors[1:]:
        total += other
    return total


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sums_have_the_bits_of_a_sum_in_rank_order(count: int) -> None:
    """Vectors of all lengths follow each other at once, so each finds the memory as the previous one left it."""
    cases = [*((size, "float32") for size in SIZES), (BLOCK_BYTES // 8 + 1, "float64"), (BLOCK_BYTES, "int64")]

    def rank(rendezvous: ThreadRendezvous) -> tuple[list[np.ndarray], int]:
        ranks = TcpCommunicator(rendezvous, reach(0))
        assert (ranks._shared is not None) == (count > 1)
        results = []
        for size, dtype in cases:
            values = vector(size, ranks.rank, dtype)
            ranks.reduce(values)
            results.append(values)
        ranks.shutdown()
        return results, ranks.local_sent_bytes

    reports = at_once([functools.partial(rank, each) for each in meetings(count)])
    expected = [in_rank_order([vector(size, number, dtype) for number in range(count)]) for size, dtype in cases]
    for results, _ in reports:
        for values, total, case in zip(results, expected, cases, strict=True):
            assert values.tobytes() == total.tobytes(), case
    passed = sum(total.nbytes for total in expected)
    assert [sent for _, sent in reports] == [(count - 1) * passed, *[passed] * (count - 1)]


@pytest.mark.parametrize("sizes", [(AROUND[1], AROUND[2]), (AROUND[0], AROUND[1])], ids=["shared", "one over TCP"])
def test_ranks_that_disagree_on_a_length_get_an_error(sizes: tuple[int, int]) -> None:
    def rank(rendezvous: ThreadRendezvous) -> None:
        ranks = TcpCommunicator(rendezvous, reach(0))
        try:
            ranks.sum(vector(sizes[ranks.rank], ranks.rank), "sum")
        finally:
            ranks.shutdown()

    leader, _ = at_once([functools.partial(rank, each) for each in meetings(2)], RuntimeError, PeerLost)
    assert isinstance(leader, RuntimeError) and "where" in str(leader) and "expected" in str(leader)


def test_a_rank_that_ends_between_two_blocks_is_a_lost_peer() -> None:
    """It ends while the others add the block that it has written."""

    def rank(rendezvous: ThreadRendezvous) -> None:
        ranks = TcpCommunicator(rendezvous, reach(0))
        values = vector(5 * BLOCK_BYTES // 4, ranks.rank)
        try:
            if ranks.rank == 1:
                assert ranks._memory_for(values) is ranks._shared is not None
                ranks._shared._arrive(values)
                ranks._shared._release(values)
            else:
                ranks.sum(values, "in vain")
        finally:
            ranks.shutdown()

    leader, _, member = at_once([functools.partial(rank, each) for each in meetings(3)], PeerLost)
    assert str(leader).startswith("rank 1") and str(member).startswith("rank 0")


def test_processes_share_memory_or_all_use_tcp() -> None:
    reports = document(launch(4, [str(PROGRAMS / "local_ranks.py")], "mpirun"))["ranks"]
    assert [report["shared"] for report in reports] == [[True, False]] * 4
    for report in reports:
        (file,) = report["files"]
        assert file.startswith("/memfd:"), "a file in a folder would outlive a killed rank"
    (both,) = {tuple(report["sums"]) for report in reports}
    expected = in_rank_order(
        [np.random.default_rng(rank).normal(size=3_000_001).astype(np.float32) for rank in range(4)]
    )
    assert set(both) == {hashlib.sha256(expected.tobytes()).hexdigest()}
