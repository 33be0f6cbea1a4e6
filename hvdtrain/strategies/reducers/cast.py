"""Half the bytes: every number crosses the network in 16 bits, and is added up in 32.

Each of h hosts owns 1/h of the vector, rounded up to m numbers. It receives the others' 16-bit versions of its part,
adds them in float32 to its own numbers, which are never rounded, rounds the sum once, and sends that to all. Two
phases; each host sends 2(h-1) messages of 2m bytes (fp16: 2m + 2).

fp16 (IEEE binary16): 11 significant bits, but nothing above 65504 and little below 6e-8, where gradients that were
divided by the number of samples often are. So each message carries a power of two by which its largest number comes
near 65504 (after Micikevicius et al., "Mixed precision training", 2018, where one such factor is guessed for the whole
loss): what is representable arrives exactly, nothing overflows, and what is lost below is 2^-40 of the largest number.

bf16 (Wang and Kanwar, "BFloat16: the secret to high performance on Cloud TPUs", 2019): the upper half of a float32,
rounded to the nearest, ties to even: 8 significant bits, float32's range, no factor.

The law: |out - sum| <= u (|sum| + sum of all |x|) to first order, u being 2^-11 for fp16 and 2^-8 for bf16. Infinity
and NaN pass on; fp16 then makes no promise for the rest of that part: the step is lost anyway. No state.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

BLOCK = 1 << 15
"""Numbers converted at a time, so that what lies between stays in the processor's cache"""


class Half(Reducer):
    """Rounds what it sends; how is said by the two classes below."""

    divisible = True
    head = 0
    """Numbers of 16 bits in front of each message"""
    _messages = np.zeros((0, 0), np.uint16)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        numbers = elements(shapes)
        return two_phases(numbers, hosts, 2 * (hosts - 1) * 2 * (cls.head + -(-numbers // hosts)))

    @abc.abstractmethod
    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        """Fills a uint16 message of `head` + len(values) numbers."""

    @abc.abstractmethod
    def decode(self, message: np.ndarray, values: np.ndarray, add: bool = False) -> None:
        """The float32 numbers of a message into `values`, or added to them."""

    def sum_between_hosts(self, values: np.ndarray, hosts: LeaderGroup) -> None:
        if not values.size:
            return
        size = -(-values.size // hosts.count)
        parts = [values[host * size : (host + 1) * size] for host in range(hosts.count)]
        if self._messages.shape != (hosts.count, self.head + size):
            self._messages = np.zeros((hosts.count, self.head + size), np.uint16)  # the last parts may be shorter
        messages = self._messages
        mine, message = parts[hosts.index], messages[hosts.index]

        def coded(host: int) -> np.ndarray:
            self.encode(parts[host], messages[host, : self.head + parts[host].size])
            return messages[host]

        for _, theirs in hosts.all_to_all_streamed(coded, even=True):
            self.decode(theirs.view(np.uint16)[: self.head + mine.size], mine, add=True)
        coded(hosts.index)
        for host, theirs in hosts.all_to_all_streamed(lambda _: message, even=True):
            self.decode(theirs.view(np.uint16)[: self.head + parts[host].size], parts[host])
        self.decode(message[: self.head + mine.size], mine)


class BF16(Half):
    """The upper half of each float32."""

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        for begin in range(0, values.size, BLOCK):
            message[begin : begin + BLOCK] = to_bf16(values[begin : begin + BLOCK])

    def decode(self, message: np.ndarray, values: np.ndarray, add: bool = False) -> None:
        for begin in range(0, values.size, BLOCK):
            part = values[begin : begin + BLOCK]
            put(part, from_bf16(message[begin : begin + BLOCK]), add)


class FP16(Half):
    """binary16 of each number times a power of two, whose exponent heads the message.

    NumPy converts one number after the other and takes 20 times as long for the smallest ones. Here the integers are
    rounded instead: 2^-112 gives a float32 the exponent bits of a binary16, whose mantissa is 13 bits shorter.
    """

    head = 1
    AS_IT_IS = 999
    """Instead of an exponent: there are infinite numbers or NaN, NumPy converted the message, with factor 1"""
    SHIFT = np.float32(2.0**-112)
    UNSHIFT = np.float32(2.0**112)

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        exponent = scale_exponent(values)
        message[0] = np.int16(exponent).view(np.uint16)
        if exponent == self.AS_IT_IS:
            with np.errstate(over="ignore"):
                message[1:] = values.astype(np.float16).view(np.uint16)
            return
        factor = np.float32(2.0**exponent)
        for begin in range(0, values.size, BLOCK):
            scaled = values[begin : begin + BLOCK] * factor
            scaled *= self.SHIFT
            bits = scaled.view(np.uint32)
            rounded = bits >> 13
            rounded &= 1
            rounded += 0xFFF
            rounded += bits
            sign = (bits >> 16) & 0x8000
            rounded >>= 13
            rounded &= 0x7FFF
            rounded |= sign
            message[1 + begin : 1 + begin + BLOCK] = rounded

    def decode(self, message: np.ndarray, values: np.ndarray, add: bool = False) -> None:
        exponent = int(message[:1].view(np.int16)[0])
        if exponent == self.AS_IT_IS:
            put(values, message[1:].view(np.float16).astype(np.float32), add)
            return
        factor = np.float32(2.0**-exponent)
        for begin in range(0, values.size, BLOCK):
            halves = message[1 + begin : 1 + begin + BLOCK].view(np.int16)
            bits = np.left_shift(halves, 13, dtype=np.int32)  # the sign fills bits 28 to 31: 28 to 30 are cleared
            bits &= ~0x70000000
            scaled = bits.view(np.float32)
            scaled *= self.UNSHIFT
            scaled *= factor
            put(values[begin : begin + BLOCK], scaled, add)


def scale_exponent(values: np.ndarray) -> int:
    """The largest e for which no |value| * 2^e rounds to more than 65504."""
    largest = float(max(values.max(), -values.min())) if values.size else 0.0
    if not math.isfinite(largest):
        return FP16.AS_IT_IS
    mantissa, exponent = math.frexp(largest)  # mantissa in [0.5, 1)
    exponent = (16 if mantissa * 2**16 < 65520 else 15) - exponent
    return min(exponent, 126) if largest else 0  # both factors are normal float32


def put(values: np.ndarray, new: np.ndarray, add: bool) -> None:
    if add:
        values += new
    else:
        values[:] = new
