"""A model as a row of layers, which stages may be cut from, its arrays' initial values, and the terms of its errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.exits import BAD_CONFIG, Failure

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What goes into it came out of the layer before, and nothing else did."""

    name: str
    arrays: tuple[str, ...]
    """Its parameters and running statistics, by name."""
    output: tuple[int, ...]
    """Shape of what comes out for one sample: (height, width, channels) of an image, (words, values) of a sentence of
    mean length. The first number may differ from batch to batch."""
    multiply_adds: float
    """For one sample, forward."""
    held: float | None = None
    """Numbers that are kept of a sample for the backward, besides what came in; None: those of the output"""


def grouped(children: Iterable[tuple[Layer, bool, bool]]) -> tuple[list[Layer], list[int]]:
    """A sequence of children as a row of layers, and which child each begins with.

    children: each as a layer by itself, whether it has something to train, and whether one tensor of floats with a
    sample's row goes into it, and nothing else. A layer begins with a child of which both are true.
    """
    layers, begins, learning = list[Layer](), list[int](), False
    for number, (child, learns, fits) in enumerate(children):
        if layers and not (learning and learns and fits):
            before = layers.pop()
            child = replace(
                before,
                arrays=tuple(dict.fromkeys((*before.arrays, *child.arrays))),
                output=child.output,
                multiply_adds=before.multiply_adds + child.multiply_adds,
                held=sum(math.prod(each.output) if each.held is None else each.held for each in (before, child)),
            )
        else:
            begins.append(number)
            learning = False
        layers.append(child)
        learning |= learns
    return layers, begins


def stream(seed: int, name: str) -> np.random.Generator:
    """The random numbers of one array, keyed by its name, so that no array depends on the others. Raises Failure
    (BAD_CONFIG) for a negative seed."""
    if seed < 0:
        raise Failure(f"model: seed is {seed}; give 0 or more", BAD_CONFIG)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))


def uniform(seed: int, name: str, shape: tuple[int, ...], bound: float) -> NDArray[np.float32]:
    """Random values within +-bound, a pure function of `seed` and the array's name."""
    values = stream(seed, name).random(shape, np.float32)
    values *= 2  # in place: a layer may have hundreds of millions of weights
    values -= 1
    values *= np.float32(bound)
    return values


def glorot(seed: int, shapes: Shapes) -> Arrays:
    """Keras' initial values: biases 0, weights Glorot's uniform within +-sqrt(6 / (fan_in + fan_out))."""
    return {
        name: np.zeros(shape, np.float32)
        if len(shape) == 1
        else uniform(seed, name, shape, math.sqrt(6 / (math.prod(shape[2:]) * (shape[0] + shape[1]))))
        for name, shape in shapes.items()
    }


def regression_terms(outputs: Any, targets: Any) -> dict[str, Any]:
    """What each sample adds to the sums of `metrics.Regression`, of numbers in equal shapes, in either framework."""
    error = outputs - targets
    return {"absolute": abs(error), "squared": error**2, "signed": error, "truth": targets, "truth_squared": targets**2}
