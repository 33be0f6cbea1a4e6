"""ResNet-34 in PyTorch: follows the plan of `resnet.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hvdtrain.models import resnet
from hvdtrain.models.layers_torch import Named, convolved
from hvdtrain.models.resnet import Block, ConvNorm, ResNetSpec


class ResNetTorch(Named):
    """The network of `spec`: see `layers_torch.Named`. With `stage` it has only these layers (`resnet.layers`)."""

    def __init__(self, spec: ResNetSpec, stage: range | None = None) -> None:
        super().__init__(resnet.parameters(spec, stage), resnet.buffers(spec, stage))
        network = resnet.plan(spec)
        self.statistics = dict.fromkeys(resnet.buffers(spec, stage), resnet.NORM_MOMENTUM)
        blocks = [functools.partial(self._block, block) for block in network.blocks.values()]
        layers: list[Callable[[Tensor], Tensor]] = [functools.partial(self._stem, network.stem), *blocks, self._head]
        self._layers = [layers[number] for number in stage or range(len(layers))]

    def forward(self, images: Tensor, *_: Tensor) -> Tensor:
        """Logits (N, classes) float32 of images (N, H, W, channels); for a stage, its output for the previous stage's
        output, both laid out like images."""
        # permute makes a view in PyTorch's channels-last format, and activations stay so. The weights stay contiguous,
        # as strategies and checkpoints need their gradients. On CPUs this is within 10 % of channels-last weights,
        # slower or faster depending on the image size. Channels-first loses 20 % on larger images in narrow networks.
        # For an image of one pixel, strides do not distinguish the two formats, but kernels choose by them. A stage
        # must give its layers the strides of the whole model, or sums would be rounded in another order.
        pixel = images.shape[1:3] == (1, 1)
        x = images.flatten(1)[:, :, None, None] if pixel else images.permute(0, 3, 1, 2)
        for layer in self._layers:
            x = layer(x)
        if x.ndim == 2:
            return x
        return x.flatten(1)[:, None, None, :] if x.shape[2:] == (1, 1) else x.permute(0, 2, 3, 1)

    def loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the cross-entropies, and the number of correctly classified images; labels (N,) int64."""
        logits = self(images)
        return F.cross_entropy(logits, labels, reduction="sum"), {"correct": (logits.argmax(1) == labels).sum()}

    def _stem(self, layer: ConvNorm, x: Tensor) -> Tensor:
        return F.max_pool2d(
            F.relu_(self._conv_norm(layer, x)), resnet.POOL_SIZE, resnet.POOL_STRIDE, resnet.POOL_SIZE // 2
        )

    def _block(self, block: Block, x: Tensor) -> Tensor:
        shortcut = self._conv_norm(block.shortcut, x) if block.shortcut else x
        x = F.relu_(self._conv_norm(block.first, x))
        x = self._conv_norm(block.second, x)
        return F.relu_(x.add_(shortcut))

    def _head(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            features = x.mean((2, 3), dtype=torch.float32)
            return F.linear(features, *self._layer("fc"))

    def _conv_norm(self, layer: ConvNorm, x: Tensor) -> Tensor:
        return F.batch_norm(
            convolved(x, self._array(f"{layer.conv}.weight"), layer.stride, layer.padding),
            self._array(f"{layer.norm}.running_mean"),
            self._array(f"{layer.norm}.running_var"),
            self._array(f"{layer.norm}.weight"),
            self._array(f"{layer.norm}.bias"),
            self.training,
            resnet.NORM_MOMENTUM,
            resnet.NORM_EPSILON,
        )
