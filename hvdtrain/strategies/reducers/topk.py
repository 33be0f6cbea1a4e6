"""Only the largest numbers are sent; what is left out is added to the next step's.

Each of h hosts owns one of h equal, contiguous parts of the vector and keeps an error per number. A round:

    1. error += gradient. Of each part that another host owns, the c largest (by magnitude) go to the owner.
    2. The owner adds them to its own part, of which nothing was left out, and sends the c largest of the sum to all.

What was sent is taken off the error: in phase 1 the sender's, in phase 2 the owner's. So nothing is ever lost:
sum over hosts of (gradient + old error) == output + sum over hosts of the new error. When other ranks go on with
a run, rank 0 gets the sum of all errors. c is density / h of all numbers, rounded up, so h c numbers of the output
differ from zero, and each host sends 2(h-1) messages of the same length. (To gather everybody's choice instead costs
(h-1) h c numbers per host, and the output fills up as hosts are added.)

A message is c values of 16 bits (bfloat16: the rounding stays in the error as well) and c positions: how many there are
in each block of 255 numbers, a byte, and where in their block, a byte; that is 11 bits per number at density 0.01,
where 8.1 are the least possible. Blocks of 65535 with two bytes each where density is below 0.004, one bit per number
of the part where it is above 0.12.

Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018 (error feedback); Lin et al., "Deep gradient
compression", 2018; Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
compression", 2019 (both phases).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

BLOCK = 1 << 16
"""Numbers looked at at a time, so that they stay in the processor's cache"""
SAMPLE = 1 << 14
"""Numbers from which the limit of the largest ones is guessed"""


class TopK(Reducer):
    """Sparse sums with error feedback in both phases."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        density: float = bounded(0.01, above=0, most=1, example=0.005)
        """Share of the numbers that is sent"""

    remembers = "errors"
    rung = 1

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        super().__init__(shapes, settings)
        self._size = elements(shapes)
        self._errors = np.zeros(self._size, np.float32)
        """Padded to equal parts once the number of hosts is known"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        density = (settings or cls.Settings()).density
        message_bytes = Code.of(elements(shapes), hosts, density).message_bytes
        return two_phases(elements(shapes), hosts, 2 * (hosts - 1) * message_bytes)

    @np.errstate(invalid="ignore")
    def sum_between_hosts(self, values: np.ndarray, hosts: LeaderGroup) -> None:
        if not values.size:
            return
        code = Code.of(values.size, hosts.count, self.settings.density)
        if self._errors.size != code.size * hosts.count:
            self._errors = np.concatenate(
                [self._errors[: self._size], np.zeros(code.size * hosts.count - self._size, np.float32)]
            )
        self._errors[: self._size] += values
        parts = self._errors.reshape(hosts.count, code.size)
        mine = parts[hosts.index]
        for _, message in hosts.all_to_all_streamed(lambda host: take(parts[host], code), even=True):
            positions, numbers = code.decode(message)
            mine[positions] += numbers
        values[:] = 0
        outcome = take(mine, code)
        for host, message in itertools.chain(
            hosts.all_to_all_streamed(lambda _: outcome, even=True), [(hosts.index, outcome)]
        ):
            positions, numbers = code.decode(message)
            part = values[host * code.size : (host + 1) * code.size]
            inside = positions < part.size
            part[positions[inside]] = numbers[inside]

    def state(self) -> dict[str, np.ndarray]:
        return {"errors": self._errors[: self._size].copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._errors = state["errors"].copy()


def take(part: np.ndarray, code: Code) -> np.ndarray:
    """Takes the largest numbers out of a part, leaves their rounding errors; the message with them."""
    positions = largest(part, code.count)
    numbers = part[positions]
    halves = to_bf16(numbers)
    part[positions] = left = numbers - from_bf16(halves)
    if not np.isfinite(left).all():  # infinity and NaN count as largest, so they have been sent; they are not kept
        part[~np.isfinite(part)] = 0
    return code.encode(positions, halves)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` largest |values|, ascending; NaN counts as largest.

    A limit from evenly spaced numbers leaves a few more candidates than wanted, nearly always; if not, all are.
    """
    sample = np.abs(values[:: max(1, values.size // SAMPLE)])
    expected = sample.size * count / values.size
    aim = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    found = np.arange(values.size)
    if aim < sample.size:
        limit = np.partition(sample, sample.size - aim)[sample.size - aim]
        blocks = []
        for begin in range(0, values.size, BLOCK):
            small = np.abs(values[begin : begin + BLOCK]) < limit
            blocks.append(np.flatnonzero(~small) + begin)
        candidates = np.concatenate(blocks)
        if candidates.size >= count:
            found = candidates
    if found.size > count:
        best = np.argpartition(np.abs(values[found]), found.size - count)[found.size - count :]
        found = np.sort(found[best])
    return found


@dataclasses.dataclass(frozen=True)
class Code:
    """How `count` of `size` numbers are written down."""

    size: int
    count: int

    @staticmethod
    def of(numbers: int, hosts: int, density: float) -> Code:
        """For one of `hosts` parts of a vector of so many numbers."""
        size = -(-numbers // hosts)
        return Code(size, min(size, max(1, math.ceil(density * numbers / hosts))))

    @property
    def position_bytes(self) -> int:
        return min(self._blocked_bytes(1), self._blocked_bytes(2), -(-self.size // 8))

    @property
    def message_bytes(self) -> int:
        return 2 * self.count + self.position_bytes

    def _blocked_bytes(self, width: int) -> int:
        """With blocks of the numbers that `width` bytes can count."""
        return width * (-(-self.size // (256**width - 1)) + self.count)

    @property
    def _width(self) -> int:
        return next((width for width in (1, 2) if self._blocked_bytes(width) == self.position_bytes), 0)

    def encode(self, positions: np.ndarray, halves: np.ndarray) -> np.ndarray:
        """The message of ascending positions and their values in 16 bits."""
        if width := self._width:
            kind, length = (np.uint8, np.uint16)[width - 1], 256**width - 1
            block, place = np.divmod(positions, length)
            counts = np.bincount(block, minlength=-(-self.size // length))
            coded = np.concatenate([counts.astype(kind), place.astype(kind)]).view(np.uint8)
        else:
            bits = np.zeros(self.size, np.bool_)
            bits[positions] = True
            coded = np.packbits(bits)
        return np.concatenate([halves.view(np.uint8), coded])

    def decode(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions and values, float32."""
        halves, coded = message[: 2 * self.count].view(np.uint16), message[2 * self.count :]
        if width := self._width:
            kind, length = (np.uint8, np.uint16)[width - 1], 256**width - 1
            numbers = coded.view(kind)
            counts, place = numbers[: -self.count], numbers[-self.count :]
            positions = np.repeat(np.arange(counts.size) * length, counts.astype(np.int64)) + place
        else:
            positions = np.flatnonzero(np.unpackbits(coded, count=self.size))
        return positions, from_bf16(halves)
