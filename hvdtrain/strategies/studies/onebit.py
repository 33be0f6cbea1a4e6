"""Only signs are sent, one bit per number, and of every 1024 numbers their mean magnitude; what that misses is added to
the next step's.

The model's arrays are cut, one after the other, into blocks of 1024 numbers, and each of h hosts owns as many
consecutive blocks as any other. A round:

    1. error += gradient. The blocks of each other owner go there, as signs and mean magnitudes.
    2. The owner adds what these stand for to its own blocks, of which nothing was left out, and sends the sum, made
       signs and mean magnitudes as well, to all.

What was sent is taken off the error: in phase 1 the sender's, in phase 2 the owner's. So nothing is ever lost:
sum over hosts of (gradient + old error) == output + sum over hosts of the new error. When other ranks go on with a run,
rank 0 gets the sum of all errors.

The smallest arrays, which together are up to 1/64 of all numbers, are sent in 16 bits (bfloat16) instead: they are
unlike each other, and it is they that one sign per number harms. ResNet-34 at width 0.25 on digits of 32x32 pixels,
4 hosts, loss after 60 steps, means of 4 or 5 runs: 0.39 if only arrays below 1024 numbers are spared, 0.20 as it is,
0.10 without compression; blocks of 256 or 8192 numbers made no difference.

Each host sends 2(h-1) messages of the same length: 128 + 4 bytes per block, 2 per number of 1/h of the small arrays.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs", 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019; Tang et
al., "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", 2019.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

LENGTH = 1024
"""Numbers in a block"""
SPARED = 1 / 64
"""Of all numbers, sent in 16 bits: a quarter of a bit for each of them"""
AT_ONCE = 32
"""Blocks converted at a time, so that what lies between stays in the processor's cache"""
SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)
"""(256, 8): what the bits of each byte stand for"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of the flat vector is sent how, and how much of it each of `hosts` owns."""

    hosts: int
    signed: list[tuple[slice, slice]]
    """Pieces of the vector, and where they lie when put one after the other"""
    spared: list[tuple[slice, slice]]
    """Likewise"""

    @staticmethod
    def of(shapes: Sequence[Shape], hosts: int) -> Plan:
        sizes = [math.prod(shape) for shape in shapes]
        order = np.argsort(sizes, kind="stable")
        spared = set(order[np.cumsum(np.array(sizes)[order]) <= SPARED * sum(sizes)].tolist())
        plan, begin = Plan(hosts, [], []), 0
        for number, size in enumerate(sizes):
            pieces = plan.spared if number in spared else plan.signed
            at = length(pieces)
            pieces.append((slice(begin, begin + size), slice(at, at + size)))
            begin += size
        return plan

    @property
    def blocks(self) -> int:
        """Per owner; the last ones may be incomplete or empty."""
        return -(-length(self.signed) // (LENGTH * self.hosts))

    @property
    def halves(self) -> int:
        """Numbers in 16 bits, per owner; the last ones may be empty."""
        return -(-length(self.spared) // self.hosts)

    @property
    def message_bytes(self) -> int:
        return self.blocks * (4 + LENGTH // 8) + 2 * self.halves


def length(pieces: Sequence[tuple[slice, slice]]) -> int:
    return pieces[-1][1].stop if pieces else 0


class Parts:
    """A vector, cut for its owners and padded with zeros to equal parts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.blocks = np.zeros((plan.hosts, plan.blocks, LENGTH), np.float32)
        self.halves = np.zeros((plan.hosts, plan.halves), np.float32)

    def pieces(self, values: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of the same numbers of a flat vector and of this."""
        blocks, halves = self.blocks.reshape(-1), self.halves.reshape(-1)
        pieces = [(values[piece], blocks[place]) for piece, place in self._plan.signed]
        return pieces + [(values[piece], halves[place]) for piece, place in self._plan.spared]

    def unpad(self) -> None:
        """What is behind the last number stands for nothing."""
        self.blocks.reshape(-1)[length(self._plan.signed) :] = 0


class OneBit(Reducer):
    """Sums of signs with error feedback in both phases."""

    remembers = "errors"
    rung = 1

    def __init__(self, shapes: Sequence[Shape], settings: Any = None) -> None:
        super().__init__(shapes, settings)
        self._prepare(1, np.zeros(elements(shapes), np.float32))

    def _prepare(self, hosts: int, errors: np.ndarray) -> None:
        """Buffers for so many hosts."""
        self._plan = plan = Plan.of(self.shapes, hosts)
        self._errors, self._sums = Parts(plan), Parts(plan)
        for theirs, mine in self._errors.pieces(errors):
            mine[:] = theirs
        begins = np.arange(0, hosts * plan.blocks * LENGTH, LENGTH)
        self._counts = np.clip(length(plan.signed) - begins, 1, LENGTH).astype(np.float32).reshape(hosts, -1)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        return two_phases(elements(shapes), hosts, 2 * (hosts - 1) * Plan.of(shapes, hosts).message_bytes)

    @np.errstate(invalid="ignore")
    def sum_between_hosts(self, values: np.ndarray, hosts: LeaderGroup) -> None:
        if hosts.count != self._plan.hosts:
            self._prepare(hosts.count, self.state()["errors"])
        errors, sums, me = self._errors, self._sums, hosts.index
        for theirs, mine in errors.pieces(values):
            mine += theirs
        for _, message in hosts.all_to_all_streamed(self._take, even=True):
            self._give(message, errors, me, add=True)
        errors.unpad()
        outcome = self._take(me)
        for host, message in hosts.all_to_all_streamed(lambda _: outcome, even=True):
            self._give(message, sums, host, add=False)
        self._give(outcome, sums, me, add=False)
        for theirs, mine in sums.pieces(values):
            theirs[:] = mine

    def _take(self, owner: int) -> np.ndarray:
        """Takes what can be sent off the errors in an owner's part; the message with it."""
        errors, counts = self._errors.blocks[owner], self._counts[owner]
        means = np.empty(len(errors), np.float32)
        bits = np.empty((len(errors), LENGTH // 8), np.uint8)
        for begin in range(0, len(errors), AT_ONCE):
            rows = slice(begin, begin + AT_ONCE)
            means[rows] = np.abs(errors[rows]).sum(axis=1) / counts[rows]
            bits[rows] = np.packbits(np.signbit(errors[rows]), axis=1)
            errors[rows] -= decoded(bits[rows], means[rows])
        errors[~np.isfinite(means)] = 0  # infinity and NaN are passed on, never kept
        rest = self._errors.halves[owner]
        halves = to_bf16(rest)
        rest -= from_bf16(halves)
        rest[~np.isfinite(rest)] = 0
        return np.concatenate([part.view(np.uint8).reshape(-1) for part in (means, halves, bits)])

    def _give(self, message: np.ndarray, into: Parts, owner: int, add: bool) -> None:
        """Makes an owner's part what a message stands for, or adds that to it."""
        blocks, rest = into.blocks[owner], into.halves[owner]
        first, second = 4 * len(blocks), 4 * len(blocks) + 2 * len(rest)
        means, bits = message[:first].view(np.float32), message[second:].reshape(-1, LENGTH // 8)
        if not add:
            blocks[:], rest[:] = 0, 0
        for begin in range(0, len(blocks), AT_ONCE):
            rows = slice(begin, begin + AT_ONCE)
            blocks[rows] += decoded(bits[rows], means[rows])
        rest += from_bf16(message[first:second].view(np.uint16))

    def state(self) -> dict[str, np.ndarray]:
        errors = np.empty(elements(self.shapes), np.float32)
        for theirs, mine in self._errors.pieces(errors):
            theirs[:] = mine
        return {"errors": errors}

    def load(self, state: dict[str, np.ndarray]) -> None:
        super().load(state)
        self._prepare(self._plan.hosts, state["errors"])


def decoded(bits: np.ndarray, means: np.ndarray) -> np.ndarray:
    """(blocks, LENGTH) float32."""
    numbers = np.take(SIGNS, bits, axis=0, mode="clip").reshape(len(bits), LENGTH)
    numbers *= means[:, None]
    return numbers
