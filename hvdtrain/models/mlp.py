"""Description of a multilayer perceptron for both frameworks: linear layers with ReLUs between them.

Names and shapes are PyTorch's: layers.0.weight (out, in), layers.0.bias (out,), layers.1.weight ...
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hvdtrain.models.layers import Arrays, Layer, Shapes, glorot
from hvdtrain.system.exits import BAD_CONFIG, Failure


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """Sizes of the network. Raises Failure (BAD_CONFIG) for invalid values."""

    inputs: int
    """Values per sample."""
    hidden: tuple[int, ...]
    """Units of each hidden layer; () makes the model linear."""
    outputs: int
    """Number of classes, or of predicted numbers per sample."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON contains a list
        if min(self.sizes) < 1:
            sizes = ", ".join(map(str, self.sizes))
            raise Failure(f"model: layers of {sizes} units; hint: each needs at least 1", BAD_CONFIG)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values between layers, including inputs and outputs."""
        return (self.inputs, *self.hidden, self.outputs)


def parameters(spec: MLPSpec, stage: range | None = None) -> Shapes:
    """Name and shape of every trained array, in the order of the layers; `stage`: only these layers."""
    shapes: Shapes = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise(spec.sizes)):
        if stage is None or number in stage:
            shapes[f"layers.{number}.weight"] = (outputs, inputs)
            shapes[f"layers.{number}.bias"] = (outputs,)
    return shapes


def layers(spec: MLPSpec) -> list[Layer]:
    """The network as a sequence of layers; each ReLU belongs to the next layer."""
    return [
        Layer(
            name=f"layers.{number}",
            arrays=(f"layers.{number}.weight", f"layers.{number}.bias"),
            output=(outputs,),
            multiply_adds=inputs * outputs,
        )
        for number, (inputs, outputs) in enumerate(itertools.pairwise(spec.sizes))
    ]


def multiply_adds(spec: MLPSpec) -> float:
    """Mean multiply-adds of a layer for one sample, forward; used to choose the number of threads."""
    pairs = list(itertools.pairwise(spec.sizes))
    return sum(inputs * outputs for inputs, outputs in pairs) / len(pairs)


def initial_state(spec: MLPSpec, seed: int, stage: range | None = None) -> Arrays:
    """Parameters before the first step, float32; a pure function of `spec` and `seed`. `stage`: only these layers.

    The distributions are those of Keras, which Martin (2019) used.
    """
    return glorot(seed, parameters(spec, stage))
