"""Description of ResNet-34 for both frameworks: layer plan, array shapes and initial values.

He, Zhang, Ren, Sun: "Deep residual learning for image recognition", CVPR 2016 (arXiv:1512.03385), table 1, 34 layers:

    images (N, H, W, channels)
      stem      7x7 convolution / 2, BatchNorm, ReLU, 3x3 max pooling / 2
      4 stages  3 + 4 + 6 + 3 blocks; a block is relu(BN(conv3x3(relu(BN(conv3x3(x))))) + shortcut(x))
      head      mean over all positions, linear layer
    logits (N, classes)

Each stage halves the image in the first convolution of its first block. If a block changes the shape, its shortcut is a
1x1 convolution with BatchNorm (option B of the paper), otherwise the identity. Every window of size k is padded by
k // 2 on each side, so any image size from 1x1 works. `resnet_torch.py` and `resnet_tf.py` follow the plan below.

Names and shapes are torchvision's (`resnet34`): convolutions (out, in, height, width), linear (out, in).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.models.layers import Arrays, Layer, Shapes, select, stream, uniform

NORM_EPSILON = 1e-5
"""Added to the variance in every BatchNorm."""

NORM_MOMENTUM = 0.1
"""Weight of the newest batch in the running statistics (PyTorch's convention, with the unbiased variance)."""

POOL_SIZE, POOL_STRIDE = 3, 2
"""Window and stride of the stem's max pooling."""

STEM_CHANNELS = 64
STAGES = {"layer1": (64, 3, 1), "layer2": (128, 4, 2), "layer3": (256, 6, 2), "layer4": (512, 3, 2)}
"""Rows of the paper's table: output channels at width 1, number of blocks, stride of the first one."""


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(Checked):
    """Sizes of the network. Raises Failure (BAD_CONFIG) for invalid values."""

    channels: int = bounded(3, least=1)
    """Channels of the images: 1 for gray, 3 for colour."""
    classes: int = bounded(1000, least=1)
    """Number of logits per image."""
    width: float = bounded(1.0, least=1 / STEM_CHANNELS, most=64)
    """Factor on the channels of every layer: 1.0 is ResNet-34; 0.25 has a sixteenth of its parameters."""
    zero_gamma: bool = False
    """Start the last BatchNorm scale of each block at 0, so that blocks start as their shortcuts (arXiv:1706.02677)."""


# --- the layer plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvNorm:
    """A convolution without bias, followed by BatchNorm, with the names of both."""

    conv: str
    norm: str
    inputs: int
    outputs: int
    size: int
    stride: int

    @property
    def padding(self) -> int:
        """Zeros added on each of the four sides."""
        return self.size // 2

    @property
    def trained(self) -> Shapes:
        """Names and shapes of the trained arrays."""
        kernel = (self.outputs, self.inputs, self.size, self.size)
        channels = (self.outputs,)
        return {f"{self.conv}.weight": kernel, f"{self.norm}.weight": channels, f"{self.norm}.bias": channels}

    @property
    def running(self) -> Shapes:
        """Names and shapes of the running statistics."""
        return {f"{self.norm}.running_{kind}": (self.outputs,) for kind in ("mean", "var")}


@dataclass(frozen=True)
class Block:
    """relu(second(relu(first(x))) + shortcut(x)); a shortcut of None is the identity."""

    first: ConvNorm
    second: ConvNorm
    shortcut: ConvNorm | None


@dataclass(frozen=True)
class Plan:
    """The whole network: stem, blocks by name, and the linear layer `fc`, from `features` to the classes."""

    stem: ConvNorm
    blocks: dict[str, Block]
    features: int

    @property
    def layers(self) -> dict[str, list[ConvNorm]]:
        """The convolutions of the stem and of each block, in torchvision's order."""
        blocks = {name: (block.first, block.second, block.shortcut) for name, block in self.blocks.items()}
        return {"stem": [self.stem]} | {name: [layer for layer in block if layer] for name, block in blocks.items()}


def plan(spec: ResNetSpec) -> Plan:
    """The layer plan of `spec`."""
    inputs = round(STEM_CHANNELS * spec.width)
    stem = ConvNorm("conv1", "bn1", spec.channels, inputs, size=7, stride=2)
    blocks = {}
    for stage, (channels, count, first_stride) in STAGES.items():
        outputs = round(channels * spec.width)
        for number in range(count):
            name, stride = f"{stage}.{number}", 1 if number else first_stride
            shortcut = ConvNorm(f"{name}.downsample.0", f"{name}.downsample.1", inputs, outputs, size=1, stride=stride)
            blocks[name] = Block(
                first=ConvNorm(f"{name}.conv1", f"{name}.bn1", inputs, outputs, size=3, stride=stride),
                second=ConvNorm(f"{name}.conv2", f"{name}.bn2", outputs, outputs, size=3, stride=1),
                shortcut=None if (inputs, stride) == (outputs, 1) else shortcut,
            )
            inputs = outputs
    return Plan(stem, blocks, features=inputs)


# --- the arrays -------------------------------------------------------------------------------------------------------


def _joined(shapes: Iterable[Shapes]) -> Shapes:
    return {name: shape for part in shapes for name, shape in part.items()}


def parameters(spec: ResNetSpec, stage: range | None = None) -> Shapes:
    """Name and shape of every trained array, in torchvision's order; `stage`: only these layers."""
    network = plan(spec)
    last: Shapes = {"fc.weight": (spec.classes, network.features), "fc.bias": (spec.classes,)}
    layers = {name: _joined(layer.trained for layer in layers) for name, layers in network.layers.items()}
    return select(layers | {"fc": last}, stage)


def buffers(spec: ResNetSpec, stage: range | None = None) -> Shapes:
    """Name and shape of every BatchNorm running statistic, in torchvision's order; `stage`: only these layers."""
    layers = {name: _joined(layer.running for layer in layers) for name, layers in plan(spec).layers.items()}
    return select(layers | {"fc": {}}, stage)


def layers(spec: ResNetSpec, height: int, width: int) -> list[Layer]:
    """The network as a sequence of layers, for images of this size: the stem, each block, and `fc`."""
    network, result = plan(spec), list[Layer]()
    for name, convolutions in network.layers.items():
        height, width = (-(-side // convolutions[0].stride) for side in (height, width))
        kernels = sum(layer.inputs * layer.outputs * layer.size**2 for layer in convolutions)
        pixels, channels = height * width, sum(layer.outputs for layer in convolutions)
        if name == "stem":
            height, width = (-(-side // POOL_STRIDE) for side in (height, width))
        result.append(
            Layer(
                name=name,
                arrays=tuple(_joined(layer.trained | layer.running for layer in convolutions)),
                output=(height, width, convolutions[0].outputs),
                multiply_adds=kernels * pixels,
                held=2 * channels * pixels,  # outputs of convolutions and norms
            )
        )
    last = Layer(
        name="fc",
        arrays=("fc.weight", "fc.bias"),
        output=(spec.classes,),
        multiply_adds=network.features * spec.classes,
    )
    return [*result, last]


def multiply_adds(spec: ResNetSpec, height: int, width: int) -> float:
    """Mean multiply-adds of a convolution for one image, forward; used to choose the number of threads."""
    work = sum(layer.multiply_adds for layer in layers(spec, height, width)[:-1])
    return work / sum(map(len, plan(spec).layers.values()))


def initial_state(spec: ResNetSpec, seed: int, stage: range | None = None) -> Arrays:
    """Parameters and buffers before the first step, float32; a pure function of `spec` and `seed`. `stage`: only these
    layers.

    The distributions are those of torchvision, so that published recipes apply: He's normal with variance 2 / fan_out
    for convolutions (arXiv:1502.01852 shows that fan_in and fan_out are equally good); uniform within +-1 /
    sqrt(inputs) for the linear layer; 1 for BatchNorm scales (or 0, see `zero_gamma`) and 0 for offsets.

    Raises Failure (BAD_CONFIG) for a negative seed.
    """
    network = plan(spec)
    zeros = {f"{block.second.norm}.weight" for block in network.blocks.values() if spec.zero_gamma}
    state: Arrays = {}
    for name, shape in (parameters(spec, stage) | buffers(spec, stage)).items():
        if len(shape) == 4:
            deviation = math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
            state[name] = stream(seed, name).standard_normal(shape, np.float32) * np.float32(deviation)
        elif name.startswith("fc."):
            state[name] = uniform(seed, name, shape, 1 / math.sqrt(network.features))
        elif name.endswith((".bias", ".running_mean")) or name in zeros:
            state[name] = np.zeros(shape, np.float32)
        else:
            state[name] = np.ones(shape, np.float32)
    return state
