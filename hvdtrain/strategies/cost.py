"""The cost of an exchange for each host, as phases from which bytes, latencies and times are computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from hvdtrain.comm.backends.tcp import all_reduce_hops, all_to_all_hops
from hvdtrain.system.rates import ring_bytes

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks that take part in an exchange, and on how many hosts they are."""

    ranks: int
    hosts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One message to each of some peers. The next phase starts when all messages of this one have arrived.

    Times are in backward passes: 0 is the start of this step's backward pass, 1 its end, 2 the end of the next step's.
    """

    bytes_per_peer: float
    """Payload bytes that a host sends to each peer"""
    peers: int
    """Hosts that it sends to; 1 in a ring"""
    hops: int
    """Network latencies, one after the other"""
    codec: str = "fp32"
    """Format of the numbers sent"""
    numbers: float = 0.0
    """Numbers that the host's leader rounds, selects or multiplies"""
    ready_at: float = 1.0
    """When the gradients that it sends are computed"""
    needed_at: float = 1.0
    """When its result is needed"""
    received_per_peer: float | None = None
    """Payload bytes from each peer, if the phase is that of a central host; None: as many as it sends"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of an exchange for each host; the properties are means per training step."""

    phases: tuple[Phase, ...] = ()
    """In the order in which they run; empty if nothing is sent"""
    every: int = 1
    """Training steps per exchange"""
    share: float = 1.0
    """Share of the model in an exchange"""
    exact: bool = False
    """Whether whole gradients are summed in full precision, with the bytes of an all-reduce"""
    independent: bool = False
    """Whether a rank waits for a server only, while the other ranks compute"""

    @property
    def sent_bytes(self) -> float:
        """Payload bytes that each host sends to the network; on a single host, that each rank sends."""
        return sum(phase.bytes_per_peer * phase.peers for phase in self.phases) / self.every

    @property
    def hops(self) -> float:
        """Network latencies, one after the other."""
        return sum(phase.hops for phase in self.phases) / self.every

    @property
    def numbers(self) -> float:
        """Numbers that the host's leader rounds, selects or multiplies."""
        return sum(phase.numbers for phase in self.phases) / self.every

    @property
    def overlaps_with(self) -> str:
        """The computation during the exchange, in words; empty if all ranks wait for it."""
        if self.independent:
            return "other ranks' steps"
        steps = round(max((phase.needed_at for phase in self.phases), default=1.0)) - 1
        if steps > 0:
            return "the next step" if steps == 1 else f"the next {steps} steps"
        return "backward" if any(phase.ready_at < 1 for phase in self.phases) else ""

    def as_json(self) -> dict[str, object]:
        """The phases and the means per step."""
        return {
            "sent_bytes": self.sent_bytes,
            "hops": self.hops,
            "numbers": self.numbers,
            "overlaps_with": self.overlaps_with,
            **dataclasses.asdict(self),
        }


def elements(shapes: Iterable[Shape]) -> int:
    """Numbers in arrays of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def ring(payload_bytes: int, ranks: int, *, codec: str = "fp32", exact: bool = False) -> Cost:
    """Cost of a ring all-reduce between ranks, which starts with the first gradient of backward."""
    if ranks == 1:
        return Cost(exact=exact)
    phase = Phase(
        bytes_per_peer=ring_bytes(payload_bytes, ranks), peers=1, hops=2 * (ranks - 1), codec=codec, ready_at=0.0
    )
    return Cost(phases=(phase,), exact=exact)


def all_reduce(numbers: int, hosts: int) -> tuple[Phase, ...]:
    """Phases of the TCP backend's all-reduce of float32 numbers."""
    nbytes = 4 * numbers
    if hosts == 1 or not numbers:
        return ()
    hops = all_reduce_hops(nbytes, hosts)
    if hops == 1:  # small vectors are sent whole to all hosts
        return (Phase(bytes_per_peer=nbytes, peers=hosts - 1, hops=hops),)
    return (Phase(bytes_per_peer=ring_bytes(nbytes, hosts), peers=1, hops=hops),)


def two_phases(numbers: int, hosts: int, message_bytes: int, codec: str) -> tuple[Phase, ...]:
    """Phases of a sum in two phases over the TCP backend: coded parts to their owners, then coded sums to all hosts.

    `message_bytes`: length of a part's message. The first phase encodes all numbers but the own part's and adds what
    arrives; the second encodes the own part and decodes all parts.
    """
    if hosts == 1 or not numbers:
        return ()
    scatter = Phase(
        bytes_per_peer=message_bytes,
        peers=hosts - 1,
        hops=all_to_all_hops(message_bytes, hosts, even=True),
        codec=codec,
        numbers=2 * numbers * (hosts - 1) / hosts,
    )
    return scatter, dataclasses.replace(scatter, numbers=numbers * (hosts + 1) / hosts)
