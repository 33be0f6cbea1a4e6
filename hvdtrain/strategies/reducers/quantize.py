"""Sums rounded to integers of 8 or 4 bits. The rounding error is known, so it can be sent later.

The vector is divided into blocks of 64 numbers, and each of h hosts owns the same number of consecutive blocks. A block
is sent as a float32 scale, 1/127 of its largest magnitude (4 bits: 1/7), and each of its numbers as the nearest
multiple of the scale. There are two phases:

    1. Each host sends every other owner its rounded numbers of that owner's blocks.
    2. The owner adds these to its own numbers, which are not rounded, rounds the sum, and sends it to all.

So each host knows which part of its numbers the sum includes: for other owners' blocks, what it sent; for its own
blocks, the sum minus what the others sent, which includes the error of phase 2. These parts add up to the sum over
hosts, so error feedback loses nothing: int8 and int4 add the rest to the next vector. After a resume on other ranks,
rank 0 gets the sum of all rests. Each host sends 2(h-1) messages of 68 bytes per block (4 bits: 36).

A block whose largest magnitude is below 1.5e-36 counts as 0. A block with NaN or infinity arrives as NaN.

Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019
(arXiv:1905.05957).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Phase, Shape, all_reduce, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer

LENGTH = 64
"""Numbers in a block"""
AT_ONCE = 512
"""Blocks converted at a time, so that intermediate arrays stay in the processor's cache"""
TINY = np.float32(1.5e-36)
"""1/127 of this is still a normal float32"""


def quantized_sum(values: np.ndarray, leaders: LeaderGroup, bits: int) -> np.ndarray:
    """Replace flat float32 `values` by their rounded sum over hosts, with the same bits on all; 32 bits: not rounded.

    Returns the part of this host's numbers that the sum includes.
    """
    if bits == 32 or not values.size:
        own = values.copy()
        leaders.all_reduce(values)
        return own
    index, blocks = leaders.index, blocks_per_owner(values.size, leaders.count)
    parts = np.zeros((leaders.count, blocks, LENGTH), np.float32)
    parts.reshape(-1)[: values.size] = values
    included, others = np.empty_like(parts), np.zeros_like(parts[index])

    def encoded(host: int) -> np.ndarray:
        message = encode(parts[host], bits)
        decode(message, included[host], bits)
        return message

    for _, received in leaders.all_to_all_streamed(encoded, even=True):
        decode(received, others, bits, add=True)
    parts[index] += others
    for host, received in leaders.all_gather_streamed(encode(parts[index], bits)):
        decode(received, parts[host], bits)
    np.subtract(parts[index], others, out=included[index])
    values[:] = parts.reshape(-1)[: values.size]
    return included.reshape(-1)[: values.size]


def sum_phases(numbers: int, hosts: int, bits: int) -> tuple[Phase, ...]:
    """Return the phases of `quantized_sum` for this number of numbers."""
    if bits == 32:
        return all_reduce(numbers, hosts)
    message_bytes = blocks_per_owner(numbers, hosts) * (4 + LENGTH * bits // 8)
    return two_phases(numbers, hosts, message_bytes, f"int{bits}")


def blocks_per_owner(numbers: int, hosts: int) -> int:
    """Return the blocks that each host owns; the last ones may be incomplete or empty."""
    return -(-numbers // (LENGTH * hosts))


@np.errstate(invalid="ignore")  # NaN is not an integer; the block's scale is NaN
def encode(blocks: np.ndarray, bits: int) -> np.ndarray:
    """Encode (n, LENGTH) float32 numbers as n scales followed by n x LENGTH integers, in one message of bytes."""
    top, size = np.float32(2 ** (bits - 1) - 1), LENGTH * bits // 8
    message = np.empty(len(blocks) * (4 + size), np.uint8)
    scales, numbers = message_parts(message, len(blocks))
    for begin in range(0, len(blocks), AT_ONCE):
        some = blocks[begin : begin + AT_ONCE]
        largest = np.abs(some).max(axis=1)
        largest[largest < TINY] = 0
        scales[begin : begin + AT_ONCE] = largest / top
        scaled = some * np.divide(top, largest, out=np.zeros_like(largest), where=largest != 0)[:, None]
        integers = np.rint(scaled, out=scaled).astype(np.int8)
        if bits == 4:
            integers = integers[:, ::2] & 15 | integers[:, 1::2] << 4
        numbers[begin : begin + AT_ONCE] = integers
    return message


@np.errstate(invalid="ignore", over="ignore")
def decode(message: np.ndarray, into: np.ndarray, bits: int, add: bool = False) -> None:
    """Decode a message into (n, LENGTH) float32 numbers, or add it to them."""
    scales, numbers = message_parts(message, len(into))
    for begin in range(0, len(into), AT_ONCE):
        integers, some = numbers[begin : begin + AT_ONCE], into[begin : begin + AT_ONCE]
        if bits == 4:
            integers = np.stack([integers << 4 >> 4, integers >> 4], axis=2).reshape(some.shape)
        if add:
            some += integers * scales[begin : begin + AT_ONCE, None]
        else:
            np.multiply(integers, scales[begin : begin + AT_ONCE, None], out=some)


def message_parts(message: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return views of a message: n float32 scales, and integers as int8 of shape (n, bytes of a block)."""
    return message[: 4 * blocks].view(np.float32), message[4 * blocks :].view(np.int8).reshape(blocks, -1)


class Int8(Reducer):
    """All numbers in 8 bits, a quarter of the bytes; rounding errors are added to the next vector."""

    residual_key = "error"
    supports_buckets = True
    bits = 8

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        super().__init__(shapes, settings)
        self._error = np.zeros(elements(shapes), np.float32)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        return Cost(phases=sum_phases(elements(shapes), hosts, cls.bits))

    def all_reduce(self, values: np.ndarray, leaders: LeaderGroup) -> None:
        values += self._error
        self._error[:] = values
        self._error -= quantized_sum(values, leaders, self.bits)

    def state(self) -> dict[str, np.ndarray]:
        return {"error": self._error.copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._error[:] = state["error"]


class Int4(Int8):
    """All numbers in 4 bits, an eighth of the bytes."""

    bits = 4
