"""Dropout from a step's key, in PyTorch: equal keys, equal masks, on a device and at any precision."""

from __future__ import annotations

import torch
from torch import Tensor


def dropped(x: Tensor, share: float, key: Tensor | None) -> Tensor:
    """x without a share of its values, and the others larger, so that the mean stays; x itself without a key.

    key: (2,) int64 (see `hvdtrain.data.halves`), on the device of x. A model's layers have keys of their own, key + 1
    for the second, so that what one draws does not depend on who computes the others.
    """
    if key is None or not share:
        return x
    low, high = (int(half) & 0xFFFFFFFF for half in key.tolist())
    # PyTorch's CPU generator looks at the lower 32 bits of a seed only, so both halves must be in these.
    random = torch.Generator(key.device).manual_seed(high * 0x9E3779B1 + low)
    # A third of the time of `bernoulli_`, which F.dropout uses; masks are the same at any precision.
    kept = torch.rand(x.shape, generator=random, device=x.device).ge_(share)
    return x * kept.div_(1 - share).to(x.dtype)
