"""A multilayer perceptron as data: its sizes, array shapes and initial values, for both frameworks.

    inputs (N, inputs)
      hidden layers     linear, ReLU
      last layer        linear
    outputs (N, outputs): logits of classes, or the numbers that are to be found

Names and shapes are PyTorch's: layers.0.weight (out, in), layers.0.bias (out,), layers.1.weight ...
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hvdtrain.models.layers import Arrays, Layer, Shapes, glorot
from hvdtrain.system.exits import BAD_CONFIG, Failure


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """The sizes of the network. Raises Failure (BAD_CONFIG) for a value that makes no network."""

    inputs: int
    """Values per sample."""
    hidden: tuple[int, ...]
    """Units of each hidden layer; () makes it linear."""
    outputs: int
    """Classes, or numbers to be found per sample."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON brings a list
        if min(self.sizes) < 1:
            raise Failure(f"model: layers of {', '.join(map(str, self.sizes))}; give at least 1 each", BAD_CONFIG)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values between layers, inputs and outputs included."""
        return (self.inputs, *self.hidden, self.outputs)


def parameters(spec: MLPSpec, part: range | None = None) -> Shapes:
    """Name and shape of every trained array, in the order of the layers; `part`: of these `layers` only."""
    shapes: Shapes = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise(spec.sizes)):
        if part is None or number in part:
            shapes[f"layers.{number}.weight"] = (outputs, inputs)
            shapes[f"layers.{number}.bias"] = (outputs,)
    return shapes


def layers(spec: MLPSpec) -> list[Layer]:
    """The network as a row of layers; the ReLU behind one belongs to the next."""
    return [
        Layer(
            name=f"layers.{number}",
            arrays=(f"layers.{number}.weight", f"layers.{number}.bias"),
            output=(outputs,),
            multiply_adds=inputs * outputs,
        )
        for number, (inputs, outputs) in enumerate(itertools.pairwise(spec.sizes))
    ]


def dense(spec: MLPSpec) -> dict[str, int]:
    """Weights of dense layers: name -> rows of inputs per sample."""
    return {name: 1 for name, shape in parameters(spec).items() if len(shape) > 1}


def multiply_adds(spec: MLPSpec) -> float:
    """Multiply-adds of one layer for one sample, forward, mean over the layers; threads are chosen by it."""
    pairs = list(itertools.pairwise(spec.sizes))
    return sum(inputs * outputs for inputs, outputs in pairs) / len(pairs)


def initial_state(spec: MLPSpec, seed: int, part: range | None = None) -> Arrays:
    """Parameters before the first step, float32, a pure function of `spec` and `seed`; `part`: of these layers.

    Keras' distributions, which Martin (2019) used (see `layers.glorot`). Raises Failure (BAD_CONFIG) for a negative
    seed.
    """
    return glorot(seed, parameters(spec, part))
