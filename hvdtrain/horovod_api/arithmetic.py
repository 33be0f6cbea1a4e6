"""What a collective call does with the arrays of its ranks, once it is agreed: sums, averages, cuts and joins.

The members of a call are the hosts of `comm.backends.tcp.TcpLeaderGroup`, one rank each. Short inputs of
all members come with the answer to the call (`inputs`), so that nothing more is sent; what is longer goes round a ring
(sums) or from each to each (all else). Every rank folds in the same order, so all have the same bits.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hvdtrain.comm.backends.tcp import NOTHING, TcpLeaderGroup
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""NumPy has no bfloat16: view its bits as this; arrays of ml_dtypes.bfloat16 are taken as they are"""


class Op(enum.IntEnum):
    """Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


FOLDS: dict[Op, Callable[..., np.ndarray]] = {
    Op.AVERAGE: np.add,
    Op.SUM: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}


class Members(TcpLeaderGroup):
    """The ranks of a call, in order; `index` is this rank's."""

    def trade(self, other: int, mine: np.ndarray) -> np.ndarray:
        """Sends a vector to one other member, which sends one of the same length here."""
        return self._swap(other, mine, other, np.empty_like(mine))


def type_name(dtype: np.dtype) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def zeros(name: str, shape: Sequence[int]) -> np.ndarray:
    """What a rank that has joined adds to a sum."""
    return np.zeros(shape, BFLOAT16 if name == "bfloat16" else np.dtype(name))


def reducible(dtype: np.dtype) -> bool:
    return dtype.kind in "biuf" or type_name(dtype) == "bfloat16"


def rows(first: int, count: int) -> list[int]:
    """How many of `first` rows each member gets of a reducescatter: the first ones get one more."""
    return [first // count + (member < first % count) for member in range(count)]


# --- arithmetic in place ----------------------------------------------------------------------------------------------


def _widened(flat: np.ndarray) -> np.ndarray:
    """A copy to calculate with: bfloat16 as float32."""
    if flat.dtype == BFLOAT16:
        return from_bf16(flat.view(np.uint16))
    return flat.astype(np.float32) if flat.dtype.kind == "V" else flat.copy()


def _narrowed(flat: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == BFLOAT16:
        return to_bf16(flat).view(BFLOAT16)
    return flat.astype(dtype, copy=False)


def _scale(values: np.ndarray, factor: float) -> None:
    """Integers are multiplied in float64 and cut, float16 in float32, as in Horovod."""
    if factor != 1.0:
        wide = np.float32(factor) if values.dtype.kind == "f" and values.itemsize <= 4 else np.float64(factor)
        np.multiply(values, wide, out=values, casting="unsafe")


def _finish(values: np.ndarray, op: Op, count: int, postscale: float) -> None:
    if op is not Op.AVERAGE:
        _scale(values, postscale)
    elif postscale != 1.0:
        _scale(values, postscale / count)
    elif values.dtype.kind == "f":
        values /= count
    elif values.dtype.kind != "b":  # towards zero, as a C cast
        values -= np.fmod(values, count).astype(values.dtype, copy=False)
        values //= count


def _folded(parts: Sequence[np.ndarray], op: Op) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        FOLDS[op](total, part, out=total)
    return total


def _pieces(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    borders = [0, *itertools.accumulate(lengths)]
    return [flat[begin:end] for begin, end in itertools.pairwise(borders)]


def _traded(members: TcpLeaderGroup, parts: Sequence[np.ndarray], *, even: bool = False) -> list[np.ndarray]:
    """parts[j] to member j; what each sent here. Any type."""
    found = members.all_to_all([part.view(np.uint8) for part in parts], even=even)
    return [each.view(parts[0].dtype) for each in found]


def _reduce(flat: np.ndarray, op: Op, members: TcpLeaderGroup) -> None:
    """In place."""
    if FOLDS[op] is np.add:
        members.all_reduce(flat)
    else:
        lengths = rows(flat.size, members.count)
        mine = _folded(_traded(members, _pieces(flat, lengths)), op)
        for piece, theirs in zip(_pieces(flat, lengths), _traded(members, [mine] * members.count), strict=True):
            piece[:] = theirs


def _adasum(flat: np.ndarray, lengths: Sequence[int], members: Members) -> None:
    """Maleki et al. 2020 (arXiv:2006.02924): two gradients are added less the part in which they agree, array by array;
    by recursive doubling, so that 2^n ranks need n rounds."""
    level = 1
    while level < members.count:
        theirs = members.trade(members.index ^ level, flat)
        first, second = (flat, theirs) if members.index & level == 0 else (theirs, flat)
        for a, b, into in zip(*(_pieces(each, lengths) for each in (first, second, flat)), strict=True):
            x, y = a.astype(np.float64), b.astype(np.float64)
            dot, xx, yy = x @ y, x @ x, y @ y
            into[:] = x * (1 - dot / xx / 2 if xx >= TINY else 1) + y * (1 - dot / yy / 2 if yy >= TINY else 1)
        level *= 2


TINY = float(np.sqrt(np.finfo(np.float64).tiny))


# --- the calls --------------------------------------------------------------------------------------------------------


def allreduce(
    arrays: Sequence[np.ndarray],
    out: Sequence[np.ndarray] | None,
    op: Op,
    scales: tuple[float, float],
    members: Members,
    inputs: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """Arrays of one type go together. `out` may be the arrays themselves."""
    found = list(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
        lengths = [arrays[place].size for place in places]
        flat = _one_vector([arrays[place] for place in places], out if len(places) == 1 else None, dtype)
        if inputs is not None:
            parts = [_widened(each) for each in inputs]
            for part in parts:
                _scale(part, scales[0])
            flat[:] = _folded(parts, op)
        else:
            _scale(flat, scales[0])
            if op is Op.ADASUM:
                _adasum(flat, lengths, members)
            else:
                _reduce(flat, op, members)
        _finish(flat, op, members.count, scales[1])
        for place, piece in zip(places, _pieces(_narrowed(flat, dtype), lengths), strict=True):
            found[place] = piece.reshape(arrays[place].shape)
    return found


def _one_vector(arrays: Sequence[np.ndarray], out: Sequence[np.ndarray] | None, dtype: np.dtype) -> np.ndarray:
    """A copy of the arrays to calculate in, or `out` itself where it can be calculated in."""
    if dtype.kind == "V":
        return np.concatenate([_widened(array.reshape(-1)) for array in arrays])
    if out is not None and len(out) == 1 and out[0].flags.c_contiguous:
        if out[0] is not arrays[0]:
            np.copyto(out[0], arrays[0])
        return out[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in arrays])


def reducescatter(
    array: np.ndarray, op: Op, scales: tuple[float, float], members: Members, inputs: Sequence[np.ndarray] | None
) -> np.ndarray:
    row = array[:1].size if array.shape[0] else 0
    lengths = [each * row for each in rows(array.shape[0], members.count)]

    def cut(flat: np.ndarray) -> list[np.ndarray]:
        if scales[0] == 1.0 and flat.dtype.kind != "V":
            return _pieces(flat, lengths)
        wide = _widened(flat)
        _scale(wide, scales[0])
        return _pieces(wide, lengths)

    if inputs is None:
        parts = _traded(members, cut(array.reshape(-1)), even=len(set(lengths)) == 1)
    else:
        parts = [cut(each)[members.index] for each in inputs]
    mine = _folded(parts, op)
    _finish(mine, op, members.count, scales[1])
    return _narrowed(mine, array.dtype).reshape(rows(array.shape[0], members.count)[members.index], *array.shape[1:])


def allgather(
    array: np.ndarray, firsts: Sequence[int], members: Members, inputs: Sequence[np.ndarray] | None
) -> np.ndarray:
    """`firsts`: every member's first dimension."""
    if inputs is None:
        inputs = _traded(members, [array.reshape(-1)] * members.count, even=len(set(firsts)) == 1)
    return np.concatenate(inputs).reshape(sum(firsts), *array.shape[1:])


def alltoall(
    array: np.ndarray, splits: Sequence[Sequence[int]], members: Members, inputs: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """`splits`: every member's."""
    row = int(np.prod(array.shape[1:]))

    def cut(flat: np.ndarray, member: int) -> list[np.ndarray]:
        return _pieces(flat, [each * row for each in splits[member]])

    if inputs is None:
        parts = _traded(members, cut(array.reshape(-1), members.index))
    else:
        parts = [cut(each, member)[members.index] for member, each in enumerate(inputs)]
    received = np.array([each[members.index] for each in splits], np.int32)
    return np.concatenate(parts).reshape(int(received.sum()), *array.shape[1:]), received


def broadcast(
    array: np.ndarray, out: np.ndarray | None, root: int, members: Members, inputs: Sequence[np.ndarray] | None
) -> np.ndarray:
    """`root`: its index. It sends each member a part, which the members then send each other."""
    found = np.empty_like(array) if out is None or not out.flags.c_contiguous else out
    flat = found.reshape(-1).view(np.uint8)
    mine = members.index == root
    if mine and out is not array:
        flat[:] = array.reshape(-1).view(np.uint8)
    if inputs is not None:
        flat[:] = inputs[root].view(np.uint8)
        return found
    pieces = _pieces(flat, rows(flat.size, members.count))
    first = members.all_to_all(pieces if mine else [NOTHING] * members.count)
    own = first[root]
    rest = members.all_to_all([NOTHING if member == root else own for member in range(members.count)])
    if not mine:
        for member, piece in enumerate(pieces):
            piece[:] = own if member == members.index else rest[member]
    return found
