"""What the models in PyTorch are made of."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
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

    def _layer(self, name: str) -> tuple[Tensor, Tensor]:
        return self._array(f"{name}.weight"), self._array(f"{name}.bias")


SAFE_CHANNELS = 16
"""Inputs that a strided 1x1 convolution must have. With fewer, in channels-last layout, its backward in oneDNN writes
outside its memory: wrong gradients or a crash (oneDNN's issue 6035; seen with PyTorch 2.13 on AVX2, see docs/LOG.md)"""
FEW_PIXELS = 4
"""Of an output map that is computed as a product of matrices on CPUs"""


def convolved(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding), by what is fastest on a CPU for small maps, and right.

    oneDNN's gradient of a 512x512x3x3 kernel on maps of one pixel takes 20 times as long as one by a product of
    matrices (docs/LOG.md). And in half precision PyTorch 2.13 leaves gradients of a strided kernel's outer columns
    unset where the picture is one pixel wide.
    """
    kernel = weight.shape[2]
    if kernel == 1 and weight.shape[1] < SAFE_CHANNELS:
        x, stride = x[:, :, ::stride, ::stride], 1
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in x.shape[2:])
    if x.device.type != "cpu" or (height * width > FEW_PIXELS and width > 1):
        return F.conv2d(x, weight, None, stride, padding)
    # Rows and columns of the kernel that meet nothing but padding are left out.
    first = [max(0, padding - (count - 1) * stride) for count in (height, width)]
    last = [min(kernel, side + padding) for side in x.shape[2:]]
    met = weight[:, :, first[0] : last[0], first[1] : last[1]]
    around = [padding - skipped for skipped in first]
    windows = F.unfold(x, met.shape[2:], padding=around, stride=stride)
    return F.linear(windows.transpose(1, 2), met.flatten(1)).transpose(1, 2).unflatten(2, (height, width))


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
