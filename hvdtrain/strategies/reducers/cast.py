"""Half the bytes: every number is sent in 16 bits (bfloat16) and added up in 32.

Each of h hosts owns 1/h of the vector, rounded up to m numbers. It receives the other hosts' 16-bit versions of its
part, adds them in float32 to its own numbers, rounds the sum once, and sends it to all. Each host sends 2(h-1) messages
of 2m bytes, in two phases.

A bfloat16 is the upper half of a float32, rounded to the nearest, ties to even: 8 significant bits and float32's range
(Wang and Kanwar, "BFloat16: the secret to high performance on Cloud TPUs", 2019). The error is bounded by
|out - sum| <= 2^-8 (|sum| + sum of all |x|), to first order. Infinity and NaN are preserved. The reducer has no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

BLOCK = 1 << 15
"""Numbers converted at a time, so that intermediate arrays stay in the processor's cache"""


class BF16(Reducer):
    """Sends the upper half of each float32."""

    supports_buckets = True
    _messages = np.zeros((0, 0), np.uint16)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        numbers = elements(shapes)
        return Cost(phases=two_phases(numbers, hosts, 2 * -(-numbers // hosts), "bf16"))

    def all_reduce(self, values: np.ndarray, leaders: LeaderGroup) -> None:
        if not values.size:
            return
        size = -(-values.size // leaders.count)
        parts = [values[host * size : (host + 1) * size] for host in range(leaders.count)]
        if self._messages.shape != (leaders.count, size):
            self._messages = np.zeros((leaders.count, size), np.uint16)  # the last parts may be shorter
        messages = self._messages
        own = parts[leaders.index]

        def encoded(host: int) -> np.ndarray:
            encode(parts[host], messages[host])
            return messages[host]

        for _, received in leaders.all_to_all_streamed(encoded, even=True):
            decode(received.view(np.uint16), own, add=True)
        for host, received in leaders.all_gather_streamed(encoded(leaders.index)):
            decode(received.view(np.uint16), parts[host])


def encode(values: np.ndarray, message: np.ndarray) -> None:
    """Write float32 numbers into a uint16 message of at least their size."""
    for begin in range(0, values.size, BLOCK):
        piece = values[begin : begin + BLOCK]
        message[begin : begin + piece.size] = to_bf16(piece)


def decode(message: np.ndarray, values: np.ndarray, add: bool = False) -> None:
    """Copy the float32 numbers of a message into `values`, or add them."""
    for begin in range(0, values.size, BLOCK):
        piece = values[begin : begin + BLOCK]
        numbers = from_bf16(message[begin : begin + piece.size])
        if add:
            piece += numbers
        else:
            piece[:] = numbers
