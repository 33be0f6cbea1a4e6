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
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, empty, is_numpy, moved, on_host, placed_like, to_host
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Phase, Shape, all_reduce, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer

LENGTH = 64
"""Numbers in a block"""
AT_ONCE = 512
"""Blocks converted at a time, so that intermediate arrays stay in the processor's cache"""
TINY = 1.5e-36
"""1/127 of this is still a normal float32"""


def quantized_sum(values: Array, leaders: LeaderGroup, bits: int) -> Array:
    """Replace flat float32 `values` by their rounded sum over hosts, with the same bits on all; 32 bits: not rounded.

    Returns the part of this host's numbers that the sum includes.
    """
    xp, size = array_namespace(values), len(values)
    if bits == 32 or not size:
        own = xp.asarray(values, copy=True)
        on_host(values, leaders.all_reduce)
        return own
    index, blocks = leaders.index, blocks_per_owner(size, leaders.count)
    parts = empty((leaders.count, blocks, LENGTH), values)
    padded = xp.reshape(parts, (-1,))
    padded[:size] = values
    padded[size:] = 0
    included, others = xp.empty_like(parts), xp.zeros_like(parts[index])

    def encoded(host: int) -> np.ndarray:
        message = encode(parts[host], bits)
        decode(message, included[host], bits)
        return to_host(message)

    for _, received in leaders.all_to_all_streamed(encoded, even=True):
        decode(placed_like(received, values), others, bits, add=True)
    parts[index] += others
    for host, received in leaders.all_gather_streamed(to_host(encode(parts[index], bits))):
        decode(placed_like(received, values), parts[host], bits)
    xp.subtract(parts[index], others, out=included[index])
    values[:] = padded[:size]
    return xp.reshape(included, (-1,))[:size]


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
def encode(blocks: Array, bits: int) -> Array:
    """Encode (n, LENGTH) float32 numbers as n scales followed by n x LENGTH integers, in one message of bytes."""
    xp, size = array_namespace(blocks), LENGTH * bits // 8
    message = empty(len(blocks) * (4 + size), blocks, "uint8")
    scales, numbers = message_parts(message, len(blocks))
    at_once = AT_ONCE if is_numpy(blocks) else len(blocks)
    for begin in range(0, len(blocks), at_once):
        some = blocks[begin : begin + at_once]
        largest = xp.max(xp.abs(some), axis=1)
        largest[largest < TINY] = 0
        top = xp.full_like(largest, 2 ** (bits - 1) - 1)  # a GPU would multiply by the reciprocal of one number
        scales[begin : begin + at_once] = largest / top
        largest[largest == 0] = xp.inf
        scaled = some * (top / largest)[:, None]
        integers = xp.astype(xp.round(scaled, out=scaled), xp.int8)
        if bits == 4:
            integers = integers[:, ::2] & 15 | integers[:, 1::2] << 4
        numbers[begin : begin + at_once] = integers
    return message


@np.errstate(invalid="ignore", over="ignore")
def decode(message: Array, into: Array, bits: int, add: bool = False) -> None:
    """Decode a message into (n, LENGTH) float32 numbers, or add it to them. Terms are rounded before they are added."""
    xp = array_namespace(into)
    scales, numbers = message_parts(message, len(into))
    at_once = AT_ONCE if is_numpy(into) else len(into)
    for begin in range(0, len(into), at_once):
        integers, some = numbers[begin : begin + at_once], into[begin : begin + at_once]
        if bits == 4:
            integers = xp.reshape(xp.stack([integers << 4 >> 4, integers >> 4], axis=2), some.shape)
        if add:
            some += integers * scales[begin : begin + at_once, None]
        else:
            xp.multiply(integers, scales[begin : begin + at_once, None], out=some)


def message_parts(message: Array, blocks: int) -> tuple[Array, Array]:
    """Return views of a message: n float32 scales, and integers as int8 of shape (n, bytes of a block)."""
    xp = array_namespace(message)
    return message[: 4 * blocks].view(xp.float32), message[4 * blocks :].view(xp.int8).reshape(blocks, -1)


class Int8(Reducer):
    """All numbers in 8 bits, a quarter of the bytes; rounding errors are added to the next vector."""

    residual_key = "error"
    takes_tensors = supports_buckets = True
    bits = 8

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        super().__init__(shapes, settings)
        self._error: Array = np.zeros(elements(shapes), np.float32)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        return Cost(phases=sum_phases(elements(shapes), hosts, cls.bits))

    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None:
        self._error = moved(self._error, values)
        values += self._error
        self._error[:] = values
        self._error -= quantized_sum(values, leaders, self.bits)

    def state(self) -> dict[str, np.ndarray]:
        return {"error": to_host(self._error).copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._error = np.zeros(elements(self.shapes), np.float32)
        self._error[:] = state["error"]


class Int4(Int8):
    """All numbers in 4 bits, an eighth of the bytes."""

    bits = 4
