"""A model as a row of layers, which stages may be cut from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


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
