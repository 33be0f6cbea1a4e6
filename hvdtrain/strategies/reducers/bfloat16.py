"""bfloat16, the upper half of a float32, which NumPy does not have: as uint16."""

from __future__ import annotations

import numpy as np


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of each float32, ties to even, as uint16; above 3.39e38 that is infinite."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    lost = np.isnan(values)  # the carry would make another number of some
    if lost.any():
        rounded[lost] = 0x7FC0
    return rounded.astype(np.uint16)


def from_bf16(halves: np.ndarray) -> np.ndarray:
    """The float32 of each bfloat16."""
    return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)
