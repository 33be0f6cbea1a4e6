"""Which arrays of a model are sent as low-rank factors, as matrices of which shape, and with which rank.

An array with several dimensions becomes the most square matrix possible. PyTorch's kernels (out, in, h, w) and
TensorFlow's (h, w, in, out) then give transposed matrices.

All matrices send the same number of values, not the same rank: a matrix of mean size has the rank of the setting,
smaller ones a higher rank, larger ones a lower. With one rank for all, most of the error would be in the smallest
matrices (last layer, 1x1 shortcuts, stem), where a higher rank costs least. Measured with ResNet-34 at width 0.25 on
digits of 128x128 pixels at rank 2, with 11 % fewer bytes: the relative error of the output's momentum (0.9) falls from
25 to 8 % in steps 12 to 40, and from 36 to 27 % in steps 62 to 90.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.strategies.cost import Shape

HIGHEST = 32
"""Maximum rank of small matrices: the cost of making a factor orthonormal grows with the square of its rank"""


class Cut(NamedTuple):
    """Array `number`, at `span` of the vector, as a matrix (rows, columns) that is sent as factors of `rank`."""

    number: int
    span: slice
    rows: int
    columns: int
    rank: int


def plan(shapes: Sequence[Shape], rank: int, among: Sequence[Shape] | None = None) -> tuple[list[Cut], list[slice]]:
    """Return the matrices sent as factors and the spans sent whole, if a matrix of mean size has this rank.

    The mean is over the arrays `among`, by default over `shapes`.
    """
    sides = [rows + math.prod(shape) // rows for shape in among or shapes if (rows := most_square(shape)) > 1]
    cuts: list[Cut] = []
    whole: list[slice] = []
    start = 0
    for number, shape in enumerate(shapes):
        rows, size = most_square(shape), math.prod(shape)
        span, columns = slice(start, start + size), size // rows
        even = rank * sum(sides) // (len(sides) * (rows + columns)) if rows > 1 else 0
        own = min(max(1, even), max(rank, HIGHEST))
        # If the requested rank is full, factors save nothing.
        if rank < min(rows, columns) and own * (rows + columns) < size:
            cuts.append(Cut(number, span, rows, columns, own))
        else:
            whole.append(span)
        start += size
    return cuts, whole


def most_square(shape: Shape) -> int:
    """Return the rows of the most square matrix that an array of this shape can be reshaped to; 1 for a vector."""
    size = math.prod(shape)
    options = (max(1, math.prod(shape[:at])) for at in range(len(shape)))
    return min(options, key=lambda rows: rows + size // rows, default=1)


def payload(cuts: Sequence[Cut], whole: Sequence[slice]) -> tuple[int, int]:
    """Return how many numbers are in the first and in the second sum."""
    short = sum(cut.rank * min(cut.rows, cut.columns) for cut in cuts)
    long = sum(cut.rank * max(cut.rows, cut.columns) for cut in cuts)
    return short + sum(span.stop - span.start for span in whole), long
