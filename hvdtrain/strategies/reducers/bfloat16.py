"""bfloat16, the upper half of a float32. NumPy has no such type, so the numbers are stored as uint16."""

from __future__ import annotations

import numpy as np


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round each float32 to the nearest bfloat16, ties to even; returns uint16. Above 3.39e38 that is infinity."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    lost = np.isnan(values)  # the carry would turn some into numbers
    if lost.any():
        rounded[lost] = 0x7FC0
    return rounded.astype(np.uint16)


def from_bf16(halves: np.ndarray) -> np.ndarray:
    """Convert bfloat16 numbers, as uint16, to float32."""
    return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)
