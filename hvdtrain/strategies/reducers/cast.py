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
from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array, empty, is_numpy, placed_like, same_place, to_host
from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.strategies.cost import Cost, Shape, elements, two_phases
from hvdtrain.strategies.reducers import compiled
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16
from hvdtrain.strategies.reducers.compiled import ADD, SET


class BF16(Reducer):
    """Sends the upper half of each float32."""

    takes_tensors = supports_buckets = True
    _messages: Array = np.zeros((0, 0), np.uint16)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], hosts: int, settings: Any = None) -> Cost:
        numbers = elements(shapes)
        return Cost(phases=two_phases(numbers, hosts, 2 * -(-numbers // hosts), "bf16"))

    def all_reduce(self, values: Array, leaders: LeaderGroup) -> None:
        if not len(values):
            return
        size = -(-len(values) // leaders.count)
        parts = [values[host * size : (host + 1) * size] for host in range(leaders.count)]
        if self._messages.shape != (leaders.count, size) or not same_place(self._messages, values):
            self._messages = empty((leaders.count, size), values, "uint16")
        messages = self._messages
        own = parts[leaders.index]

        def encoded(host: int) -> np.ndarray:
            encode(parts[host], messages[host])
            return to_host(messages[host])

        for _, received in leaders.all_to_all_streamed(encoded, even=True):
            decode(placed_like(received, values), own, ADD)
        for host, received in leaders.all_gather_streamed(encoded(leaders.index)):
            decode(placed_like(received, values), parts[host])


def encode(values: Array, message: Array) -> None:
    """Write float32 numbers into a uint16 message of at least their size."""
    message[len(values) :] = 0
    if is_numpy(values) and (c := compiled.loops()):
        return c.encode_bf16(values, len(values), message)
    message[: len(values)] = to_bf16(values)
    return None


@np.errstate(over="ignore")
def decode(message: Array, values: Array, how: int = SET) -> None:
    """Set `values` to the float32 numbers of a message of bytes, or add these."""
    halves = message.view(array_namespace(message).uint16)
    if len(halves) < len(values):
        raise RuntimeError(f"a message of {len(message)} bytes has fewer than {len(values)} numbers")
    if is_numpy(values) and (c := compiled.loops()):
        return c.decode_bf16(halves, len(values), how, values)
    numbers = from_bf16(halves[: len(values)])
    if how == ADD:
        values += numbers
    else:
        values[:] = numbers
    return None
