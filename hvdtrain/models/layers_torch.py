"""Building blocks of the models in PyTorch."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.models.layers import Shapes


class Predicts(nn.Module):
    """A module that NumPy's arrays can be given to."""

    @torch.inference_mode()
    def outputs(self, inputs: np.ndarray) -> np.ndarray:
        """The outputs, float32, for inputs as in a batch's first array, in evaluation mode; for a model on the CPU."""
        return cast(np.ndarray, self.eval()(torch.from_numpy(inputs)).numpy())


class Named(Predicts):
    """A module whose `state_dict()` has exactly these names and shapes, initially zero."""

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
"""Input channels that a strided 1x1 convolution must have. With fewer, in channels-last layout, oneDNN's backward
writes out of bounds: wrong gradients or a crash (oneDNN issue 6035; PyTorch 2.13 on AVX2; see
docs/project/known-issues.md)"""
FEW_PIXELS = 4
"""Output maps up to this size are computed as a matrix product on CPUs"""


def convolved(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """F.conv2d(x, weight, None, stride, padding), computed in the fastest correct way for small maps on CPUs.

    oneDNN's gradient of a 512x512x3x3 kernel on maps of one pixel takes 20 times as long as a matrix product
    (docs/project/decisions.md). In half precision PyTorch 2.13 leaves gradients of a strided kernel's outer columns
    unset if the image is one pixel wide.
    """
    kernel = weight.shape[2]
    if kernel == 1 and weight.shape[1] < SAFE_CHANNELS:
        x, stride = x[:, :, ::stride, ::stride], 1
    height, width = ((side + 2 * padding - kernel) // stride + 1 for side in x.shape[2:])
    if x.device.type != "cpu" or (height * width > FEW_PIXELS and width > 1):
        return F.conv2d(x, weight, None, stride, padding)
    # Leave out the kernel's rows and columns that cover only padding.
    first = [max(0, padding - (count - 1) * stride) for count in (height, width)]
    last = [min(kernel, side + padding) for side in x.shape[2:]]
    used = weight[:, :, first[0] : last[0], first[1] : last[1]]
    around = [padding - skipped for skipped in first]
    windows = F.unfold(x, used.shape[2:], padding=around, stride=stride)
    return F.linear(windows.transpose(1, 2), used.flatten(1)).transpose(1, 2).unflatten(2, (height, width))


def dropped(x: Tensor, share: float, key: Tensor | None) -> Tensor:
    """Dropout: sets a share of x to 0 and scales the rest, so that the mean stays. Returns x itself without a key. On a
    device the mask is a function of the key, at any precision.

    key: (2,) int64 (see `hvdtrain.data.halves`), on the device of x. Each layer of a model uses a key of its own (key +
    1 for the second), so the layers do not depend on each other.
    """
    if key is None or not share:
        return x
    low, high = (int(half) & 0xFFFFFFFF for half in key.tolist())
    # PyTorch's CPU generator uses only the lower 32 bits of a seed, so both halves must be combined in these.
    random = torch.Generator(key.device).manual_seed(high * 0x9E3779B1 + low)
    # This takes a third of the time of `bernoulli_`, which F.dropout uses, and gives equal masks at any precision.
    mask = torch.rand(x.shape, generator=random, device=x.device).ge_(share)
    return x * mask.div_(1 - share).to(x.dtype)
