"""A model as a row of layers, which stages may be cut from."""

from __future__ import annotations

from dataclasses import dataclass


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
