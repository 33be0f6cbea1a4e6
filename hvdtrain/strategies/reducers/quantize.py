"""Whole numbers of 8 or 4 bits cross the network; what rounding takes away is known, and can be sent later.

The vector is cut into blocks of 64 numbers, and each of h hosts owns as many consecutive blocks as any other. A block
is sent as a float32 scale, 1/127 of its largest magnitude (4 bits: 1/7), and each of its numbers as the nearest
multiple of that. Two phases:

    1. Each host sends every other owner its rounded part of that owner's blocks.
    2. The owner adds these to its own part, which is not rounded, rounds the sum, and sends it to all.

What of a host's numbers is in the sum is therefore known: what it sent, and in the blocks that it owns whatever the
others' parts leave of the outcome, the error of phase 2 included. Over all hosts that adds up to the sum, so that who
keeps the rest (error feedback) loses nothing: int8 and int4 add it to the next round. When other ranks go on with a
run, rank 0 gets the sum of all rests. Each host sends 2(h-1) messages of 68 bytes per block (4 bits: 36).

Numbers of a block whose largest magnitude is below 1.5e-36 count as 0. A block with NaN or an infinite number arrives
as NaN.

Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019
(arXiv:1905.05957).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, elements, ring_bytes, two_phases
from hvdtrain.strategies.reducers.base import Reducer

LENGTH = 64
"""Numbers in a block"""
AT_ONCE = 512
"""Blocks converted at a time, so that what lies between stays in the processor's cache"""
TINY = np.float32(1.5e-36)
"""1/127 of it is still a normal float32"""


def total(values: np.ndarray, hosts: LeaderGroup, bits: int) -> np.ndarray:
    """Replaces flat float32 `values` by nearly their sum over hosts, the same bits on all; 32 bits: by the sum itself.

    Returns what of this host's numbers is in it.
    """
    if bits == 32 or not values.size:
        mine = values.copy()
        hosts.all_reduce(values)
        return mine
    me, blocks = hosts.index, blocks_each(values.size, hosts.count)
    parts = np.zeros((hosts.count, blocks, LENGTH), np.float32)
    parts.reshape(-1)[: values.size] = values
    included, theirs = np.empty_like(parts), np.zeros_like(parts[me])

    def coded(host: int) -> np.ndarray:
        message = encode(parts[host], bits)
        decode(message, included[host], bits)
        return message

    for _, received in hosts.all_to_all_streamed(coded, even=True):
        decode(received, theirs, bits, add=True)
    parts[me] += theirs
    outcome = encode(parts[me], bits)
    for host, received in hosts.all_to_all_streamed(lambda _: outcome, even=True):
        decode(received, parts[host], bits)
    decode(outcome, parts[me], bits)
    np.subtract(parts[me], theirs, out=included[me])
    values[:] = parts.reshape(-1)[: values.size]
    return included.reshape(-1)[: values.size]


def total_bytes(numbers: int, hosts: int, bits: int) -> int:
    """What each host sends for the `total` of so many numbers."""
    if bits == 32:
        return ring_bytes(4 * numbers, hosts)
    return 2 * (hosts - 1) * blocks_each(numbers, hosts) * (4 + LENGTH * bits // 8)


def blocks_each(numbers: int, hosts: int) -> int:
    """Of an owner; the last ones may be incomplete or empty."""
    return -(-numbers // (LENGTH * hosts))


@np.errstate(invalid="ignore")  # NaN has no whole number; its scale says it
def encode(blocks: np.ndarray, bits: int) -> np.ndarray:
    """(n, LENGTH) float32 as n scales and then n x LENGTH whole numbers, in one message of bytes."""
    top, size = np.float32(2 ** (bits - 1) - 1), LENGTH * bits // 8
    message = np.empty(len(blocks) * (4 + size), np.uint8)
    scales, numbers = opened(message, len(blocks))
    for begin in range(0, len(blocks), AT_ONCE):
        some = blocks[begin : begin + AT_ONCE]
        largest = np.abs(some).max(axis=1)
        largest[largest < TINY] = 0
        scales[begin : begin + AT_ONCE] = largest / top
        scaled = some * np.divide(top, largest, out=np.zeros_like(largest), where=largest != 0)[:, None]
        whole = np.rint(scaled, out=scaled).astype(np.int8)
        if bits == 4:
            whole = whole[:, ::2] & 15 | whole[:, 1::2] << 4
        numbers[begin : begin + AT_ONCE] = whole
    return message


@np.errstate(invalid="ignore", over="ignore")
def decode(message: np.ndarray, into: np.ndarray, bits: int, add: bool = False) -> None:
    """Puts what a message stands for into (n, LENGTH) float32, or adds it."""
    scales, numbers = opened(message, len(into))
    for begin in range(0, len(into), AT_ONCE):
        whole, some = numbers[begin : begin + AT_ONCE], into[begin : begin + AT_ONCE]
        if bits == 4:
            whole = np.stack([whole << 4 >> 4, whole >> 4], axis=2).reshape(some.shape)
        if add:
            some += whole * scales[begin : begin + AT_ONCE, None]
        else:
            np.multiply(whole, scales[begin : begin + AT_ONCE, None], out=some)


def opened(message: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of a message: n float32 scales, and (n, bytes of a block) int8."""
    return message[: 4 * blocks].view(np.float32), message[4 * blocks :].view(np.int8).reshape(blocks, -1)


class Int8(Reducer):
    """All numbers in 8 bits, a quarter of the bytes; what is lost goes into the next round."""

    remembers = "error"
    divisible = True
    bits = 8

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        super().__init__(shapes, settings)
        self._error = np.zeros(elements(shapes), np.float32)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        numbers = elements(shapes)
        return two_phases(numbers, hosts, total_bytes(numbers, hosts, cls.bits))

    def sum_between_hosts(self, values: np.ndarray, hosts: LeaderGroup) -> None:
        values += self._error
        self._error[:] = values
        self._error -= total(values, hosts, self.bits)

    def state(self) -> dict[str, np.ndarray]:
        return {"error": self._error.copy()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._error[:] = state["error"]


class Int4(Int8):
    """All numbers in 4 bits, an eighth of the bytes."""

    bits = 4
    rung = 1
