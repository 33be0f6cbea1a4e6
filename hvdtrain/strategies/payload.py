"""How many bytes an exchange is given, and how many a ring makes of them."""

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


def elements(shapes: Iterable[Shape]) -> int:
    """Numbers in arrays of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


def ring_bytes(payload_bytes: int, ranks: int) -> int:
    """What each of `ranks` ranks sends in a ring-allreduce: 2(p-1)/p of the payload."""
    return 2 * (ranks - 1) * payload_bytes // ranks
