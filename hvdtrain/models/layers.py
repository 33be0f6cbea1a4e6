"""Descriptions of layers, from which pipeline stages are made; initial values of arrays; terms of regression errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.exits import BAD_CONFIG, Failure

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer whose only input is the output of the layer before."""

    name: str
    arrays: tuple[str, ...]
    """Names of its parameters and running statistics."""
    output: tuple[int, ...]
    """Shape of its output for one sample: (height, width, channels) of an image, (words, values) of a sentence of mean
    length. The first number may differ between batches."""
    multiply_adds: float
    """Multiply-adds for one sample, forward."""


def select(layers: Mapping[str, Shapes], stage: range | None) -> Shapes:
    """Name and shape of every array of these layers, in order; None: of all layers."""
    shapes = list(layers.values())
    return {name: shape for number in stage or range(len(shapes)) for name, shape in shapes[number].items()}


def stream(seed: int, name: str) -> np.random.Generator:
    """Random numbers for one array, keyed by its name, so that arrays are independent. Raises Failure (BAD_CONFIG) for
    a negative seed."""
    if seed < 0:
        raise Failure(f"model: seed is {seed}, but must not be negative", BAD_CONFIG)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=tuple(name.encode())))


def uniform(seed: int, name: str, shape: tuple[int, ...], bound: float) -> NDArray[np.float32]:
    """Uniform random values within +-bound, a pure function of `seed` and the array's name."""
    values = stream(seed, name).random(shape, np.float32)
    values *= 2  # in place, since a layer may have hundreds of millions of weights
    values -= 1
    values *= np.float32(bound)
    return values


def glorot(seed: int, shapes: Shapes) -> Arrays:
    """Keras' initial values: 0 for biases, Glorot's uniform within +-sqrt(6 / (fan_in + fan_out)) for weights."""
    return {
        name: np.zeros(shape, np.float32)
        if len(shape) == 1
        else uniform(seed, name, shape, math.sqrt(6 / (math.prod(shape[2:]) * (shape[0] + shape[1]))))
        for name, shape in shapes.items()
    }


def regression_terms(outputs: Any, targets: Any) -> dict[str, Any]:
    """Each sample's terms in the sums of `metrics.Regression`, for numbers of equal shapes, in either framework."""
    error = outputs - targets
    return {"absolute": abs(error), "squared": error**2, "signed": error, "truth": targets, "truth_squared": targets**2}
