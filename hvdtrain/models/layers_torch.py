"""What the models in PyTorch are made of."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from hvdtrain.models.layers import Shapes


class Named(nn.Module):
    """A module whose `state_dict()` has exactly these names and shapes: zeros until they are loaded."""

    def __init__(self, parameters: Shapes, buffers: Shapes | None = None) -> None:
        super().__init__()
        for name, shape in (parameters | (buffers or {})).items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = cast(nn.Module, getattr(owner, part))
            if name in parameters:
                owner.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
            else:
                owner.register_buffer(leaf, torch.zeros(shape))
        self._owners = dict(self.named_modules())

    def _array(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        return cast(Tensor, getattr(self._owners[owner], leaf))


def dropped(x: Tensor, share: float, key: Tensor | None) -> Tensor:
    """x without a share of its values, and the others larger, so that the mean stays; x itself without a key. Equal
    keys make equal masks, on a device and at any precision.

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
