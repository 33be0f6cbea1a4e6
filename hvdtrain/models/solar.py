"""The forecasting networks of Martin Lopez (2019): 30 pyramids by name, and the description of a CNN.

A pyramid is `mlp.py`'s network with up to three hidden layers of n, n / 2 and n / 4 units, where n = 50 * 2^k: `p2-k5`
has layers of 1600 and 800. The third layer has 13 * 2^k units, since the study rounded 50 / 4 up before doubling.

    maps (N, 50, 50)
      conv1      3x3 convolution without padding, ReLU -> 32 channels
      conv2      the same                              -> 64 channels
      pool       2x2 maximum; dropout 0.25; flattened in the order height, width, channel
      dense1     linear, ReLU; dropout 0.5             -> 128
      dense2     linear
    outputs (N, 1)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.models.layers import Arrays, Layer, Shapes, glorot, select
from hvdtrain.system.exits import BAD_CONFIG, Failure

CHANNELS = (32, 64)
KERNEL, POOL, DENSE = 3, 2, 128
SMALLEST = 2 * (KERNEL - 1) + POOL


def pyramid(name: str) -> tuple[int, ...]:
    """Hidden layers of the pyramid with this name, p1-k0 to p3-k9. Raises Failure (BAD_CONFIG) for another name."""
    match = re.fullmatch(r"p([1-3])-k(\d)", name)
    if match is None:
        hint = "give p1, p2 or p3 (hidden layers) and -k0 to -k9 (the first has 50 x 2^k units), or cnn"
        raise Failure(f"--net {name} is unknown; hint: {hint}", BAD_CONFIG)
    depth, doubled = int(match[1]), 2 ** int(match[2])
    return (50 * doubled, 25 * doubled, 13 * doubled)[:depth]


@dataclass(frozen=True, kw_only=True)
class CNNSpec(Checked):
    """Sizes of the CNN. Raises Failure (BAD_CONFIG) for invalid values."""

    side: int = bounded(50, least=SMALLEST)
    """Width and height of a map in pixels"""
    dropout: tuple[float, float] = (0.25, 0.5)
    """Dropout before each of the two linear layers"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dropout", tuple(self.dropout))  # JSON contains a list
        super().__post_init__()
        if len(self.dropout) != 2 or not all(0 <= share < 1 for share in self.dropout):
            raise Failure(f"model: dropout is {self.dropout}; hint: give two shares from 0 to below 1", BAD_CONFIG)


def sides(spec: CNNSpec) -> tuple[int, int, int]:
    """Width and height in pixels after conv1, conv2 and the pooling."""
    first = spec.side - KERNEL + 1
    second = first - KERNEL + 1
    return first, second, second // POOL


def layer_shapes(spec: CNNSpec) -> dict[str, Shapes]:
    """The layers in order, each with its trained arrays: both convolutions together, and the two linear layers."""
    first, second = CHANNELS
    return {
        "convolutions": {
            "conv1.weight": (first, 1, KERNEL, KERNEL),
            "conv1.bias": (first,),
            "conv2.weight": (second, first, KERNEL, KERNEL),
            "conv2.bias": (second,),
        },
        "dense1": {"dense1.weight": (DENSE, second * sides(spec)[2] ** 2), "dense1.bias": (DENSE,)},
        "dense2": {"dense2.weight": (1, DENSE), "dense2.bias": (1,)},
    }


def parameters(spec: CNNSpec, stage: range | None = None) -> Shapes:
    """Name and shape of every trained array, in the order of the layers; `stage`: only these layers."""
    return select(layer_shapes(spec), stage)


def layers(spec: CNNSpec) -> list[Layer]:
    """The network as a sequence of layers; dropout belongs to the layer after it."""
    outputs = {"convolutions": CHANNELS[-1] * sides(spec)[2] ** 2, "dense1": DENSE, "dense2": 1}
    return [
        Layer(name=name, arrays=tuple(shapes), output=(outputs[name],), multiply_adds=sum(_work(spec, shapes).values()))
        for name, shapes in layer_shapes(spec).items()
    ]


def _work(spec: CNNSpec, shapes: Shapes) -> dict[str, int]:
    """Multiply-adds of each weight for one map, forward."""
    first, second, _ = sides(spec)
    pixels = {"conv1.weight": first**2, "conv2.weight": second**2}
    return {name: math.prod(shape) * pixels.get(name, 1) for name, shape in shapes.items() if name.endswith("weight")}


def multiply_adds(spec: CNNSpec) -> float:
    """Mean multiply-adds of a layer for one map, forward; used to choose the number of threads."""
    work = _work(spec, parameters(spec)).values()
    return sum(work) / len(work)


def initial_state(spec: CNNSpec, seed: int, stage: range | None = None) -> Arrays:
    """Parameters before the first step, float32; a pure function of `spec` and `seed`. `stage`: only these layers.

    The distributions are those of Keras, which the study used.
    """
    return glorot(seed, parameters(spec, stage))
