"""bfloat16, the upper half of a float32, stored as uint16: the array API has no such type."""

from __future__ import annotations

from array_api_compat import array_namespace

from hvdtrain.comm.arrays import Array


def to_bf16(values: Array) -> Array:
    """Round each float32 to the nearest bfloat16, ties to even; returns uint16. Above 3.39e38 that is infinity."""
    xp = array_namespace(values)
    bits = values.view(xp.int32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded[xp.isnan(values)] = 0x7FC0  # the carry would turn some into numbers
    return xp.astype(rounded, xp.uint16)


def from_bf16(halves: Array) -> Array:
    """Convert bfloat16 numbers, as uint16, to float32."""
    xp = array_namespace(halves)
    wide = xp.astype(halves, xp.int32)
    wide <<= 16
    return wide.view(xp.float32)
