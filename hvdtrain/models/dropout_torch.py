"""Dropout from a step's key, in PyTorch: equal keys, equal masks, on a device and at any precision."""

from __future__ import annotations

import torch
from torch import Tensor


def generator(key: Tensor) -> torch.Generator:
    """On the key's device; key (2,) int64 (see `hvdtrain.data.halves`)."""
    low, high = (int(half) & 0xFFFFFFFF for half in key.tolist())
    # PyTorch's CPU generator looks at the lower 32 bits of a seed only, so both halves must be in these.
    return torch.Generator(key.device).manual_seed(high * 0x9E3779B1 + low)


def dropped(x: Tensor, share: float, random: torch.Generator | None) -> Tensor:
    """x without a share of its values, and the others larger, so that the mean stays; x itself without a generator."""
    if random is None or not share:
        return x
    # A third of the time of `bernoulli_`, which F.dropout uses; masks are the same at any precision.
    kept = torch.rand(x.shape, generator=random, device=x.device).ge_(share)
    return x * kept.div_(1 - share).to(x.dtype)
