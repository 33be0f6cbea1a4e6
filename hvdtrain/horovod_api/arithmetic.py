"""The data movement and arithmetic of each collective call.

The members of a call act as the hosts of the TCP backend. Short inputs arrive with the response from rank 0
(`inputs`), so nothing else is sent. Longer sums use the backend's all-reduce, everything else its all-to-all.
Every rank adds the inputs in the same order, so all ranks get the same bits.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hvdtrain.comm.backends.tcp import NOTHING, TcpLeaderGroup
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""NumPy has no bfloat16: view the bits as this type. Arrays of ml_dtypes.bfloat16 can be passed directly"""


class Op(enum.IntEnum):
    """Horovod's numbers for its reductions."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


REDUCTIONS: dict[Op, Callable[..., np.ndarray]] = {
    Op.AVERAGE: np.add,
    Op.SUM: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}


def type_name(dtype: np.dtype) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def is_reducible(dtype: np.dtype) -> bool:
    return dtype.kind in "biuf" or type_name(dtype) == "bfloat16"


def check_splits(array: np.ndarray, splits: Sequence[int] | None, count: int) -> list[int]:
    """The number of rows for each member. Raises ValueError."""
    rows = array.shape[0] if array.ndim else 0
    if splits is None or not len(splits):
        if rows % count:
            raise ValueError(f"alltoall cannot split {rows} rows evenly over {count} ranks; hint: pass splits=")
        return [rows // count] * count
    if np.ndim(splits) != 1 or np.asarray(splits).dtype.kind not in "iu":
        raise ValueError("alltoall takes splits as one list of whole numbers (int32)")
    checked = [int(split) for split in splits]
    if len(checked) != count:
        raise ValueError(f"alltoall got {len(checked)} splits for {count} ranks")
    if min(checked) < 0 or sum(checked) > rows:
        raise ValueError(f"alltoall: splits {checked} exceed the {rows} rows, or are negative")
    return checked


# --- arithmetic in place ----------------------------------------------------------------------------------------------


def _working_copy(flat: np.ndarray) -> np.ndarray:
    """A copy to calculate with; bfloat16 becomes float32."""
    if flat.dtype == BFLOAT16:
        return from_bf16(flat.view(np.uint16))
    return flat.astype(np.float32) if flat.dtype.kind == "V" else flat.copy()


def _convert_back(flat: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == BFLOAT16:
        return to_bf16(flat).view(BFLOAT16)
    return flat.astype(dtype, copy=False)


def _scale(values: np.ndarray, factor: float) -> None:
    """Scales as Horovod does: integers in float64 and then truncated, float16 in float32."""
    if factor != 1.0:
        wide = np.float32(factor) if values.dtype.kind == "f" and values.itemsize <= 4 else np.float64(factor)
        np.multiply(values, wide, out=values, casting="unsafe")


def _average_and_scale(values: np.ndarray, op: Op, count: int, postscale: float) -> None:
    if op is not Op.AVERAGE:
        _scale(values, postscale)
    elif postscale != 1.0:
        _scale(values, postscale / count)
    elif values.dtype.kind == "f":
        values /= count
    elif values.dtype.kind != "b":  # round towards zero, like a C cast
        values -= np.fmod(values, count).astype(values.dtype, copy=False)
        values //= count


def _combine(inputs: Sequence[np.ndarray], op: Op) -> np.ndarray:
    total = inputs[0].copy()
    for array in inputs[1:]:
        REDUCTIONS[op](total, array, out=total)
    return total


def _split(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Views of consecutive pieces."""
    borders = [0, *itertools.accumulate(lengths)]
    return [flat[begin:end] for begin, end in itertools.pairwise(borders)]


def _even_lengths(size: int, count: int) -> list[int]:
    """Splits `size` into `count` lengths that differ by at most one."""
    return [size // count + (index < size % count) for index in range(count)]


def _all_to_all(members: TcpLeaderGroup, pieces: Sequence[np.ndarray], *, even: bool = False) -> list[np.ndarray]:
    """Sends pieces[j] to member j and returns the pieces received from each member. Works for any type."""
    received = members.all_to_all([piece.view(np.uint8) for piece in pieces], even=even)
    return [array.view(pieces[0].dtype) for array in received]


def _reduce(flat: np.ndarray, op: Op, members: TcpLeaderGroup) -> None:
    """Reduces over all members, in place."""
    if REDUCTIONS[op] is np.add:
        members.all_reduce(flat)
        return
    pieces = _split(flat, _even_lengths(flat.size, members.count))
    reduced = _combine(_all_to_all(members, pieces), op)
    for piece, result in zip(pieces, _all_to_all(members, [reduced] * members.count), strict=True):
        piece[:] = result


# --- the calls --------------------------------------------------------------------------------------------------------


def allreduce(
    arrays: Sequence[np.ndarray],
    out: Sequence[np.ndarray] | None,
    op: Op,
    scales: tuple[float, float],
    members: TcpLeaderGroup,
    inputs: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """Reduces arrays over all members; arrays of one type travel together. `out` may be the arrays themselves."""
    results = list(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        indices = [index for index, array in enumerate(arrays) if array.dtype == dtype]
        lengths = [arrays[index].size for index in indices]
        flat = _flatten([arrays[index] for index in indices], out if len(indices) == 1 else None, dtype)
        if inputs is not None:
            copies = [_working_copy(array) for array in inputs]
            for copy in copies:
                _scale(copy, scales[0])
            flat[:] = _combine(copies, op)
        else:
            _scale(flat, scales[0])
            _reduce(flat, op, members)
        _average_and_scale(flat, op, members.count, scales[1])
        for index, piece in zip(indices, _split(_convert_back(flat, dtype), lengths), strict=True):
            results[index] = piece.reshape(arrays[index].shape)
    return results


def _flatten(arrays: Sequence[np.ndarray], out: Sequence[np.ndarray] | None, dtype: np.dtype) -> np.ndarray:
    """One vector to calculate in: a copy of the arrays, or the memory of `out` if its layout permits."""
    if dtype.kind == "V":
        return np.concatenate([_working_copy(array.reshape(-1)) for array in arrays])
    if out is not None and len(out) == 1 and out[0].flags.c_contiguous:
        if out[0] is not arrays[0]:
            np.copyto(out[0], arrays[0])
        return out[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in arrays])


def reducescatter(
    array: np.ndarray,
    op: Op,
    scales: tuple[float, float],
    members: TcpLeaderGroup,
    inputs: Sequence[np.ndarray] | None,
) -> np.ndarray:
    """Reduces arrays over all members and returns this member's rows of the result; the first members get one more."""
    rows = _even_lengths(array.shape[0], members.count)
    row_size = array[:1].size if array.shape[0] else 0
    lengths = [count * row_size for count in rows]

    def split(flat: np.ndarray) -> list[np.ndarray]:
        if scales[0] == 1.0 and flat.dtype.kind != "V":
            return _split(flat, lengths)
        copy = _working_copy(flat)
        _scale(copy, scales[0])
        return _split(copy, lengths)

    if inputs is None:
        pieces = _all_to_all(members, split(array.reshape(-1)), even=len(set(lengths)) == 1)
    else:
        pieces = [split(flat)[members.index] for flat in inputs]
    result = _combine(pieces, op)
    _average_and_scale(result, op, members.count, scales[1])
    return _convert_back(result, array.dtype).reshape(rows[members.index], *array.shape[1:])


def allgather(
    array: np.ndarray, rows: Sequence[int], members: TcpLeaderGroup, inputs: Sequence[np.ndarray] | None
) -> np.ndarray:
    """Concatenates the members' arrays along the first dimension. `rows` has each member's number of rows."""
    if inputs is None:
        inputs = _all_to_all(members, [array.reshape(-1)] * members.count, even=len(set(rows)) == 1)
    return np.concatenate(inputs).reshape(sum(rows), *array.shape[1:])


def alltoall(
    array: np.ndarray, splits: Sequence[Sequence[int]], members: TcpLeaderGroup, inputs: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sends consecutive rows to each member. `splits[i][j]` is the number of rows from member i to member j.

    Returns the rows received and their number from each member (int32).
    """
    row_size = int(np.prod(array.shape[1:]))

    def split(flat: np.ndarray, member: int) -> list[np.ndarray]:
        return _split(flat, [rows * row_size for rows in splits[member]])

    if inputs is None:
        pieces = _all_to_all(members, split(array.reshape(-1), members.index))
    else:
        pieces = [split(flat, member)[members.index] for member, flat in enumerate(inputs)]
    received = np.array([rows[members.index] for rows in splits], np.int32)
    return np.concatenate(pieces).reshape(int(received.sum()), *array.shape[1:]), received


def broadcast(
    array: np.ndarray, out: np.ndarray | None, root: int, members: TcpLeaderGroup, inputs: Sequence[np.ndarray] | None
) -> np.ndarray:
    """Copies the array of the member with index `root` to all members.

    A long array is scattered first: the root sends one piece to each member, and the members exchange their pieces.
    """
    result = np.empty_like(array) if out is None or not out.flags.c_contiguous else out
    flat = result.reshape(-1).view(np.uint8)
    is_root = members.index == root
    if is_root and out is not array:
        flat[:] = array.reshape(-1).view(np.uint8)
    if inputs is not None:
        flat[:] = inputs[root].view(np.uint8)
        return result
    pieces = _split(flat, _even_lengths(flat.size, members.count))
    scattered = members.all_to_all(pieces if is_root else [NOTHING] * members.count)
    own_piece = scattered[root]
    gathered = members.all_to_all([NOTHING if member == root else own_piece for member in range(members.count)])
    if not is_root:
        for member, piece in enumerate(pieces):
            piece[:] = own_piece if member == members.index else gathered[member]
    return result
