"""ResNet-34 in PyTorch: walks the plan of `resnet.py`."""

from __future__ import annotations

import contextlib
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.models.resnet import (
    NORM_EPSILON,
    NORM_MOMENTUM,
    POOL_SIZE,
    POOL_STRIDE,
    ConvNorm,
    ResNetSpec,
    buffers,
    parameters,
    plan,
)


class ResNetTorch(nn.Module):
    """The network of `spec`. Its arrays hold zeros until `load_state_dict` brings the neutral state.

    `state_dict()` has exactly the names and shapes of `resnet.parameters` and `resnet.buffers`.
    """

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.plan = plan(spec)
        for name, shape in parameters(spec).items():
            owner, leaf = self._owner(name)
            owner.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
        for name, shape in buffers(spec).items():
            owner, leaf = self._owner(name)
            owner.register_buffer(leaf, torch.zeros(shape))
        self.statistics = dict.fromkeys(buffers(spec), NORM_MOMENTUM)
        self._owners = dict(self.named_modules())

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, classes) float32 of images (N, H, W, channels)."""
        # A view, no copy: PyTorch's channels-last. Activations stay so; the weights stay contiguous, so that their
        # gradients lie in memory as strategies and checkpoints want them. On CPUs that is within 10 % of weights in
        # channels-last, slower or faster by image size; all in channels-first loses 20 % on larger images when narrow.
        x = images.permute(0, 3, 1, 2)
        x = F.relu_(self._conv_norm(self.plan.stem, x))
        x = F.max_pool2d(x, POOL_SIZE, POOL_STRIDE, POOL_SIZE // 2)
        for block in self.plan.blocks:
            shortcut = self._conv_norm(block.shortcut, x) if block.shortcut else x
            x = F.relu_(self._conv_norm(block.first, x))
            x = self._conv_norm(block.second, x)
            x = F.relu_(x.add_(shortcut))
        with torch.autocast(x.device.type, enabled=False):
            features = x.mean((2, 3), dtype=torch.float32)
            return F.linear(features, self._array("fc.weight"), self._array("fc.bias"))

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the cross-entropies, and how many images are classified correctly; labels (N,) int64."""
        logits = self(images)
        return F.cross_entropy(logits, labels, reduction="sum"), {"correct": (logits.argmax(1) == labels).sum()}

    def _conv_norm(self, layer: ConvNorm, x: Tensor) -> Tensor:
        # In half precision on CPUs, PyTorch 2.13 leaves the gradients of a strided kernel's outer columns unset where
        # the picture is one pixel wide (docs/LOG.md).
        whole = x.device.type == "cpu" and x.shape[3] == 1 and layer.stride > 1
        with torch.autocast(x.device.type, enabled=False) if whole else contextlib.nullcontext():
            x = x.float() if whole else x
            x = F.conv2d(x, self._array(f"{layer.conv}.weight"), stride=layer.stride, padding=layer.padding)
        return F.batch_norm(
            x,
            self._array(f"{layer.norm}.running_mean"),
            self._array(f"{layer.norm}.running_var"),
            self._array(f"{layer.norm}.weight"),
            self._array(f"{layer.norm}.bias"),
            self.training,
            NORM_MOMENTUM,
            NORM_EPSILON,
        )

    def _array(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        return cast(Tensor, getattr(self._owners[owner], leaf))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The (new, if need be) submodule that holds the array `name`, and the array's name in it."""
        owner: nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = cast(nn.Module, getattr(owner, part))
        return owner, leaf
