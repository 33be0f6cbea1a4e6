"""What an exchange costs: bytes, rounds and work of each host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Who takes part in an exchange."""

    ranks: int
    hosts: int
    rows: Sequence[int] = ()
    """Of each array: how many rows of inputs a rank multiplies it with in a step, on average; 0, or none told: it is
    not the weight of a dense layer (see `workload.Workload.dense`)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one training step on average, once the strategy is in its stride."""

    sent_bytes: float
    """Payload that each host gives to the network; on one host, what each rank gives to the others"""
    rounds: float
    """Messages of which each waits for the one before: each takes the network's latency"""
    work: float = 0.0
    """Numbers that the first rank of a host rounds, selects or multiplies for the exchange"""
    behind: str = ""
    """What is computed while it is under way; empty: nothing, all wait for it"""
    ways: tuple[str, ...] = ()
    """How single arrays are sent, for people"""
    exact: bool = False
    """Whether hosts sum whole gradients in full precision and send what an allreduce sends"""


def next_steps(count: int) -> str:
    """What so many steps are in `Cost.behind`."""
    return {0: "", 1: "the next step"}.get(count, f"the next {count} steps")


def elements(shapes: Iterable[Shape]) -> int:
    """Numbers in arrays of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def ring_bytes(payload_bytes: int, ranks: int) -> int:
    """What each of `ranks` ranks sends in a ring-allreduce: 2(p-1)/p of the payload."""
    return 2 * (ranks - 1) * payload_bytes // ranks


def ring(payload_bytes: int, ranks: int, *, exact: bool) -> Cost:
    """Of a ring-allreduce that backward starts."""
    return Cost(sent_bytes=ring_bytes(payload_bytes, ranks), rounds=2 * (ranks - 1), behind="backward", exact=exact)


def two_phases(numbers: int, hosts: int, sent_bytes: int) -> Cost:
    """Of a sum in two phases, every number coded in each: by its sender, by its owner, and by all who receive it."""
    return Cost(sent_bytes=sent_bytes, rounds=2 * (hosts > 1), work=numbers * (3 * hosts - 1) / hosts * (hosts > 1))
