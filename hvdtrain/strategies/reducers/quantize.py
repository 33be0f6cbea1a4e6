"""Sums rounded to integers of 8, 4 or 2 bits. The rounding error is known, so it can be sent later.

The vector is divided into blocks of 64 numbers, and each of h hosts owns the same number of consecutive blocks. A block
is sent as a bfloat16 scale, 1/127 of its largest magnitude (4 bits: 1/7, 2 bits: all of it), and each of its numbers as
the nearest multiple of the scale. "2 bits" have three values, of which a byte holds five. There are two phases:

    1. Each host sends every other owner its rounded numbers of that owner's blocks.
    2. The owner adds these to its own numbers, which are not rounded, rounds the sum, and sends it to all.

So each host knows which part of its numbers the sum includes: for other owners' blocks, what it sent; for its own
blocks, the sum minus what the others sent, which includes the error of phase 2. These parts add up to the sum over
hosts, so error feedback loses nothing: int8, int4 and int2 add the rest to the next vector. After a resume on other
ranks, rank 0 gets the sum of all rests. Each host sends 2(h-1) messages of 66 bytes per block (4 bits: 34, 2 bits: 15).

A block whose largest magnitude is below 1.5e-36 counts as 0. A block with NaN or infinity (2 bits: with a magnitude
above 3.39e38) arrives as NaN.

Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019
(arXiv:1905.05957).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, empty, is_numpy, moved, on_host, placed_like, to_host
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Phase, Shape, all_reduce, elements, two_phases
from hvdtrain.strategies.reducers import compiled
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16
from hvdtrain.strategies.reducers.compiled import ADD, SET, SUBTRACT

LENGTH = 64
"""Numbers in a block"""
SCALE_BYTES, FIVES = 2, 13
INTEGER_BYTES = {8: LENGTH, 4: LENGTH // 2, 2: FIVES}
"""Bytes of a block's integers, by bits"""
TINY = 1.5e-36
"""1/127 of this is still a normal float32"""


def quantized_sum(own: Array, into: Array, leaders: LeaderGroup, bits: int, *, rest: bool) -> None:
    """Write the rounded sum over hosts of flat float32 `own` to `into`, with the same bits on all.

    32 bits: not rounded. Afterwards `own` is the part of this host's numbers that the sum includes, or with `rest` the
    part that it lacks.
    """
    xp, size = array_namespace(own), len(own)
    if bits == 32 or not size:
        into[:] = own
        on_host(into, leaders.all_reduce)
        if rest:
            own[:] = 0
        return
    index, blocks = leaders.index, blocks_per_owner(size, leaders.count)
    borders = [min(size, LENGTH * blocks * host) for host in range(leaders.count + 1)]
    spans = [slice(begin, end) for begin, end in itertools.pairwise(borders)]
    mine = spans[index]
    others = xp.zeros_like(own[mine])

    def encoded(host: int) -> np.ndarray:
        message = encode(own[spans[host]], blocks, bits)
        decode(message, own[spans[host]], bits, SUBTRACT if rest else SET)
        return to_host(message)

    for _, received in leaders.all_to_all_streamed(encoded, even=True):
        decode(placed_like(received, own), others, bits, ADD)
    xp.add(own[mine], others, out=into[mine])
    for host, received in leaders.all_gather_streamed(to_host(encode(into[mine], blocks, bits))):
        decode(placed_like(received, own), into[spans[host]], bits)
    xp.subtract(into[mine], others, out=others)
    if rest:
        own[mine] -= others
    else:
        own[mine] = others


def sum_phases(numbers: int, hosts: int, bits: int) -> tuple[Phase, ...]:
    """Return the phases of `quantized_sum` for this number of numbers."""
    if bits == 32:
        return all_reduce(numbers, hosts)
    each = message_bytes(blocks_per_owner(numbers, hosts), bits)
    return two_phases(numbers, hosts, each, f"int{bits}")


def blocks_per_owner(numbers: int, hosts: int) -> int:
    """Return the blocks that each host owns; the last ones may be incomplete or empty."""
    return -(-numbers // (LENGTH * hosts))


@np.errstate(invalid="ignore")  # NaN is not an integer; the block's scale is NaN
def encode(values: Array, blocks: int, bits: int) -> Array:
    """Encode flat float32 numbers, and zeros after them, in one message of bytes.

    It consists of a scale for each block, followed by the blocks' integers.
    """
    xp = array_namespace(values)
    message = empty(message_bytes(blocks, bits), values, "uint8")
    scales, numbers = message_parts(message, blocks)
    if is_numpy(values) and (c := compiled.loops()):
        c.encode_integers(values, len(values), blocks, bits, scales, numbers)
        return message
    if len(values) < LENGTH * blocks:
        values = xp.concat([values, xp.zeros_like(empty(LENGTH * blocks - len(values), values))])
    whole = xp.reshape(values, (blocks, LENGTH))
    largest = xp.max(xp.abs(whole), axis=1)
    largest[largest < TINY] = 0
    scales[:] = to_bf16(largest * (1 / (2 ** (bits - 1) - 1)))
    scale = from_bf16(scales)
    scale[scale == 0] = xp.inf
    scaled = whole * (xp.ones_like(scale) / scale)[:, None]
    integers = xp.astype(xp.round(scaled, out=scaled), xp.int8)
    if bits == 4:
        integers = integers[:, ::2] & 15 | integers[:, 1::2] << 4
    numbers[:] = _packed(integers) if bits == 2 else integers
    return message


@np.errstate(invalid="ignore", over="ignore")
def decode(message: Array, into: Array, bits: int, how: int = SET) -> None:
    """Decode the first numbers of a message into a flat array: set, add or subtract them, each rounded before.

    Raises RuntimeError if the message has fewer numbers.
    """
    xp, size = array_namespace(into), len(into)
    blocks = len(message) // message_bytes(1, bits)
    if size > LENGTH * blocks or len(message) != message_bytes(blocks, bits):
        raise RuntimeError(f"a message of {len(message)} bytes has fewer than {size} numbers of {bits} bits")
    scales, integers = message_parts(message, blocks)
    if is_numpy(into) and (c := compiled.loops()):
        c.decode_integers(scales, integers, size, bits, how, into)
        return
    if bits == 4:
        integers = xp.stack([integers << 4 >> 4, integers >> 4], axis=2)
    elif bits == 2:
        integers = _unpacked(integers)
    terms = xp.reshape(xp.reshape(integers, (-1, LENGTH)) * from_bf16(scales)[:, None], (-1,))[:size]
    if how == SET:
        into[:] = terms
    elif how == ADD:
        into += terms
    else:
        into -= terms


def _packed(integers: Array) -> Array:
    """Put five numbers of -1, 0 or 1, as digits 0, 1 and 2, into a byte: the first digits in base 3 of byte / 256."""
    xp = array_namespace(integers)
    digits = xp.reshape(xp.concat([integers, xp.zeros_like(integers[:, :1])], axis=1), (-1, 5, FIVES))
    five = functools.reduce(lambda value, digit: 3 * value + digit, [digits[:, place] for place in range(5)])
    value = xp.astype(five, xp.int16) + 121
    return xp.astype(value + (55 * value + 1008 >> 10), xp.uint8).view(xp.int8)  # as in coding.c


def _unpacked(integers: Array) -> Array:
    """Return the numbers that `_packed` has put into each byte."""
    xp, digits = array_namespace(integers), list[Array]()
    left = xp.astype(integers, xp.int16) & 255
    for _ in range(5):  # the integer part of 3 * byte / 256 is the next digit
        left = 3 * left
        digits.append(xp.astype((left >> 8) - 1, xp.int8))
        left &= 255
    return xp.concat(digits, axis=1)[:, :LENGTH]


def message_bytes(blocks: int, bits: int) -> int:
    return blocks * (SCALE_BYTES + INTEGER_BYTES[bits])


def message_parts(message: Array, blocks: int) -> tuple[Array, Array]:
    """Return views of a message: n bfloat16 scales as uint16, and integers as int8 of shape (n, bytes of a block)."""
    xp, scales = array_namespace(message), SCALE_BYTES * blocks
    return message[:scales].view(xp.uint16), message[scales:].view(xp.int8).reshape(blocks, -1 if blocks else 1)


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
        self._error += values
        quantized_sum(self._error, values, leaders, self.bits, rest=True)

    def state(self) -> dict[str, np.ndarray]:
        return {"error": to_host(self._error).copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._error = np.zeros(elements(self.shapes), np.float32)
        self._error[:] = state["error"]


class Int4(Int8):
    """All numbers in 4 bits, 1/7.5 of the bytes."""

    bits = 4


class Int2(Int8):
    """A seventeenth of the bytes: each number is 0, or plus or minus the largest magnitude of its block."""

    bits = 2
