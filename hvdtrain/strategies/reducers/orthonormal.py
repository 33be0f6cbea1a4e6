"""Makes the columns of many matrices orthonormal, all matrices at once.

Gram-Schmidt: from each column, the span of the columns before it in its matrix is subtracted, and the rest is scaled to
length 1. The first columns of all matrices are handled together, then the second ones, and so on, so fifty matrices
take as many NumPy calls as one. Only NumPy's own products and sums are used, whose order is fixed, and no linear
algebra library: the result has the same bits on all hosts, whatever their processors. Double precision avoids
underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NEGLIGIBLE = 1e-9
"""A column with less than this share left is rounding error of the columns before it (float32: 6e-8)"""


class Row(NamedTuple):
    """Column k of all matrices that have more than k columns."""

    matrices: list[int]
    starts: np.ndarray
    """Offsets of the columns when they are concatenated"""
    lengths: np.ndarray
    flat: np.ndarray
    """Indices of their numbers in the vector that holds the matrices"""


def arranged(sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """Arrange matrices that follow each other in a vector, column by column; `sizes`: columns, length of a column.

    Matrices with most columns come first, so that each row begins with the same matrices as the previous one.
    """
    begins = np.cumsum([0, *(columns * length for columns, length in sizes)])
    rows = []
    for number in range(max((columns for columns, _ in sizes), default=0)):
        some = [at for at in sorted(range(len(sizes)), key=lambda at: -sizes[at][0]) if sizes[at][0] > number]
        lengths = np.array([sizes[at][1] for at in some])
        flat = [begins[at] + number * sizes[at][1] + np.arange(sizes[at][1]) for at in some]
        rows.append(Row(some, np.cumsum(lengths) - lengths, lengths, np.concatenate(flat)))
    return rows


def orthonormalise(values: np.ndarray, rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Orthonormalise in place. Columns that depend on earlier ones become 0; their (matrix, column) are returned.

    Projections are subtracted twice, because the first pass leaves rounding errors in nearly dependent columns.
    """
    lost = []
    done = np.empty((len(rows), len(rows[0].flat)))
    for number, (matrices, starts, lengths, flat) in enumerate(rows):
        earlier, column = done[:number, : len(flat)], done[number, : len(flat)]
        column[:] = values[flat]
        before = np.add.reduceat(column * column, starts)
        for _ in range(2 if number else 0):
            shares = np.add.reduceat(earlier * column, starts, axis=1)
            column -= (np.repeat(shares, lengths, axis=1) * earlier).sum(axis=0)
        after = np.add.reduceat(column * column, starts)
        kept = after > NEGLIGIBLE**2 * before
        column *= np.repeat(np.divide(1, np.sqrt(after), out=np.zeros_like(after), where=kept), lengths)
        values[flat] = column
        lost += [(matrices[at], number) for at in np.flatnonzero(~kept)]
    return lost
