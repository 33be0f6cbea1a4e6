"""The columns of many matrices, made orthonormal all at once.

Gram-Schmidt: of each column, what those before it in its matrix do not span, made as long as 1. The first columns of
all matrices are one row of numbers, the second ones another, and so on: as many NumPy calls for fifty matrices as for
one. By NumPy's own products and sums, whose order is fixed, and by no linear algebra library: the same bits on all
hosts, whatever their processors. In double precision nothing underflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NEGLIGIBLE = 1e-9
"""A column of which less than this share is left is rounding of those before it (float32: 6e-8)"""


class Row(NamedTuple):
    """The columns of one number in all matrices that have so many."""

    matrices: list[int]
    starts: np.ndarray
    """Where each begins when they are put in a row"""
    lengths: np.ndarray
    flat: np.ndarray
    """Where all that is in the vector that holds the matrices"""


def arranged(sizes: Sequence[tuple[int, int]]) -> list[Row]:
    """Of matrices that lie one after the other in a vector, column by column; `sizes`: columns, length of a column.

    Most columns first, so that each row begins with the same matrices as the one before.
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
    """In place. Returns matrix and number of the columns that are 0 or depend on those before them: they become 0.

    What others span is subtracted twice, because the first time leaves rounding in nearly dependent columns.
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
