"""Only the largest numbers are sent; the others are added to the next vector.

Each of h hosts owns one of h equal, contiguous parts of the vector and keeps an error per number. One all-reduce:

    1. error += gradient. Each host sends every other owner the c largest numbers, by magnitude, of that owner's part.
    2. The owner adds them to its own part, of which nothing was left out, and sends the c largest of the sum to all.

The numbers sent are subtracted from the error: in phase 1 the sender's, in phase 2 the owner's. So nothing is lost:

    sum over hosts of (gradient + old error) == output + sum over hosts of the new error

After a resume on other ranks, rank 0 gets the sum of all errors. c is density / h of all numbers, rounded up, so h c
numbers of the output differ from zero, and each host sends 2(h-1) messages of the same length. (Gathering every host's
choice instead would cost (h-1) h c numbers per host, and the output would fill up as hosts are added.)

A message has c values of 16 bits (bfloat16; the rounding error stays in the error as well) and c positions: the number
of positions in each block of 255 numbers as a byte, then each position in its block as a byte. At density 0.01 that is
11 bits per position, of which at least 8.1 are needed.

Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", 2018 (error feedback); Lin et al., "Deep gradient
compression", 2018; Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
compression", 2019 (both phases).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, is_numpy, placed_like, same_place, to_host
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

BLOCK = 1 << 16
"""Numbers compared at a time, so that they stay in the processor's cache"""
SAMPLE = 1 << 14
"""Numbers from which the threshold of the largest ones is estimated"""
POSITIONS = 255
"""Numbers in a block of positions, so that a byte can count them"""


class TopK(Reducer):
    """Sparse sums with error feedback in both phases."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        density: float = bounded(0.01, above=0, most=1, example=0.005)
        """Fraction of the numbers that is sent"""

    residual_key = "errors"
    takes_tensors = True

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        super().__init__(shapes, settings)
        self._size = elements(shapes)
        self._errors: Array = np.zeros(self._size, np.float32)
        """Padded to equal parts once the number of hosts is known"""

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        numbers, density = elements(shapes), (settings or cls.Settings()).density
        return Cost(phases=two_phases(numbers, hosts, Code.of(numbers, hosts, density).message_bytes, "sparse bf16"))

    @np.errstate(invalid="ignore")
    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None:
        if not len(values):
            return
        code = Code.of(len(values), leaders.count, self.settings.density)
        if len(self._errors) != code.size * leaders.count or not same_place(self._errors, values):
            padding = np.zeros(code.size * leaders.count - self._size, np.float32)
            errors = np.concatenate([to_host(self._errors)[: self._size], padding])
            self._errors = placed_like(errors, values)
        self._errors[: self._size] += values
        parts = self._errors.reshape(leaders.count, code.size)
        own = parts[leaders.index]
        for _, message in leaders.all_to_all_streamed(lambda host: extract(parts[host], code), even=True):
            positions, numbers = (placed_like(each, values) for each in code.decode(message))
            own[positions] += numbers
        values[:] = 0
        for host, message in leaders.all_gather_streamed(extract(own, code)):
            positions, numbers = code.decode(message)
            part = values[host * code.size : (host + 1) * code.size]
            inside = positions < len(part)
            part[placed_like(positions[inside], values)] = placed_like(numbers[inside], values)

    def state(self) -> dict[str, np.ndarray]:
        return {"errors": to_host(self._errors[: self._size]).copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._errors = state["errors"].copy()


def extract(part: Array, code: Code) -> np.ndarray:
    """Return the message with the largest numbers of a part, and leave only their rounding errors in the part."""
    xp = array_namespace(part)
    positions = largest(part, code.count)
    numbers = part[positions]
    halves = to_bf16(numbers)
    part[positions] = rest = numbers - from_bf16(halves)
    if not xp.isfinite(rest).all():  # NaN and infinity count as largest: they have been sent and must not be kept
        part[~xp.isfinite(part)] = 0
    return code.encode(to_host(positions), to_host(halves))


def largest(values: Array, count: int) -> Array:
    """Return the positions of the `count` largest |values|, in ascending order; NaN counts as largest.

    In NumPy, a threshold estimated from evenly spaced numbers nearly always leaves a few more candidates than needed.
    If it leaves fewer, all numbers are candidates.
    """
    if not is_numpy(values):
        return values.abs().topk(count, sorted=False).indices.sort().values
    sample = np.abs(values[:: max(1, values.size // SAMPLE)])
    expected = sample.size * count / values.size
    target = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    positions = np.arange(values.size)
    if target < sample.size:
        threshold = np.partition(sample, sample.size - target)[sample.size - target]
        blocks = []
        for begin in range(0, values.size, BLOCK):
            small = np.abs(values[begin : begin + BLOCK]) < threshold
            blocks.append(np.flatnonzero(~small) + begin)
        candidates = np.concatenate(blocks)
        if candidates.size >= count:
            positions = candidates
    if positions.size > count:
        best = np.argpartition(np.abs(values[positions]), positions.size - count)[positions.size - count :]
        positions = np.sort(positions[best])
    return positions


@dataclasses.dataclass(frozen=True)
class Code:
    """Encodes `count` of `size` numbers as a message."""

    size: int
    count: int

    @staticmethod
    def of(numbers: int, hosts: int, density: float) -> Code:
        """Return the code for one of `hosts` parts of a vector with `numbers` numbers."""
        size = -(-numbers // hosts)
        return Code(size, min(size, max(1, math.ceil(density * numbers / hosts))))

    @property
    def blocks(self) -> int:
        return -(-self.size // POSITIONS)

    @property
    def message_bytes(self) -> int:
        return 3 * self.count + self.blocks

    def encode(self, positions: np.ndarray, halves: np.ndarray) -> np.ndarray:
        """Return the message of ascending positions and their values in 16 bits."""
        block, place = np.divmod(positions, POSITIONS)
        counts = np.bincount(block, minlength=self.blocks)
        return np.concatenate([halves.view(np.uint8), counts.astype(np.uint8), place.astype(np.uint8)])

    def decode(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions and the values, float32."""
        halves, counts, place = np.split(message, [2 * self.count, 2 * self.count + self.blocks])
        positions = np.repeat(np.arange(self.blocks) * POSITIONS, counts.astype(np.int64)) + place
        return positions, from_bf16(halves.view(np.uint16))
