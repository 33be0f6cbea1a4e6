"""The networks of Martin Lopez (2019) that look ahead in irradiance: 30 pyramids by name, and a CNN as data.

A pyramid is `mlp.py`'s network with hidden layers n, n / 2 and n / 4, as many of them as its depth says, for n = 50 *
2^k: `p2-k5` has 1600 and 800. The third layer is 13 * 2^k, since 50 / 4 was rounded up before it was doubled.

    maps (N, 50, 50)
      conv1      3x3 convolution without padding, ReLU -> 32 channels
      conv2      the same                              -> 64 channels
      pool       2x2 maximum; dropout 0.25; flattened in the order height, width, channel
      dense1     linear, ReLU; dropout 0.5             -> 128
      dense2     linear
    outputs (N, 1)

Names and shapes are PyTorch's: convolutions (out, in, height, width), linear (out, in).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hvdtrain.models.layers import Arrays, Layer, Shapes, glorot
from hvdtrain.system.exits import BAD_CONFIG, Failure

CHANNELS = (32, 64)
KERNEL, POOL, DENSE = 3, 2, 128
SMALLEST = 2 * (KERNEL - 1) + POOL


def pyramid(name: str) -> tuple[int, ...]:
    """Hidden layers of the pyramid of a name, p1-k0 to p3-k9. Raises Failure (BAD_CONFIG) for another name."""
    found = re.fullmatch(r"p([1-3])-k(\d)", name)
    if found is None:
        told = "give p1, p2 or p3 (hidden layers) and -k0 to -k9 (the first has 50 x 2^k units), or cnn"
        raise Failure(f"--net {name}: {told}", BAD_CONFIG)
    depth, doubled = int(found[1]), 2 ** int(found[2])
    return (50 * doubled, 25 * doubled, 13 * doubled)[:depth]


@dataclass(frozen=True, kw_only=True)
class CNNSpec:
    """The sizes of the CNN. Raises Failure (BAD_CONFIG) for a value that makes no network."""

    side: int = 50
    """Pixels of a map's side"""
    dropout: tuple[float, float] = (0.25, 0.5)
    """Share of values that each step leaves out before either dense layer"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dropout", tuple(self.dropout))  # JSON brings a list
        if self.side < SMALLEST:
            raise Failure(f"model: maps of {self.side} pixels' side; give at least {SMALLEST}", BAD_CONFIG)
        if len(self.dropout) != 2 or not all(0 <= share < 1 for share in self.dropout):
            raise Failure(f"model: dropout is {self.dropout}; give two shares from 0 to below 1", BAD_CONFIG)


def sides(spec: CNNSpec) -> tuple[int, int, int]:
    """Pixels of a side behind conv1, conv2 and the pooling."""
    first = spec.side - KERNEL + 1
    second = first - KERNEL + 1
    return first, second, second // POOL


def rows(spec: CNNSpec) -> dict[str, Shapes]:
    """What follows each other, each with its trained arrays: both convolutions, and the dense layers."""
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


def parameters(spec: CNNSpec, part: range | None = None) -> Shapes:
    """Name and shape of every trained array, in the order of the layers; `part`: of these `layers` only."""
    every = list(rows(spec).values())
    return {name: shape for number in part or range(len(every)) for name, shape in every[number].items()}


def layers(spec: CNNSpec) -> list[Layer]:
    """The network as a row of layers; dropout belongs to the layer behind it."""
    outputs = {"convolutions": CHANNELS[-1] * sides(spec)[2] ** 2, "dense1": DENSE, "dense2": 1}
    maps = sum(side**2 * count for side, count in zip(sides(spec), CHANNELS, strict=False)) + outputs["convolutions"]
    return [
        Layer(
            name=name,
            arrays=tuple(shapes),
            output=(outputs[name],),
            multiply_adds=sum(_work(spec, shapes).values()),
            held=maps if name == "convolutions" else None,
        )
        for name, shapes in rows(spec).items()
    ]


def _work(spec: CNNSpec, shapes: Shapes) -> dict[str, int]:
    """Multiply-adds of each of these weights for one map, forward."""
    first, second, _ = sides(spec)
    pixels = {"conv1.weight": first**2, "conv2.weight": second**2}
    return {name: math.prod(shape) * pixels.get(name, 1) for name, shape in shapes.items() if name.endswith("weight")}


def dense(spec: CNNSpec) -> dict[str, int]:
    """Weights of dense layers: name -> rows of inputs per sample."""
    return {"dense1.weight": 1, "dense2.weight": 1}


def multiply_adds(spec: CNNSpec) -> float:
    """Multiply-adds of one layer for one map, forward, mean over the layers; threads are chosen by it."""
    work = _work(spec, parameters(spec)).values()
    return sum(work) / len(work)


def initial_state(spec: CNNSpec, seed: int, part: range | None = None) -> Arrays:
    """Parameters before the first step, float32, a pure function of `spec` and `seed`; `part`: of these layers.

    Keras' distributions, which the study used (see `layers.glorot`). Raises Failure (BAD_CONFIG) for a negative seed.
    """
    return glorot(seed, parameters(spec, part))
