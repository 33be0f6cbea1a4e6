"""Reads and writes arrays as safetensors files: u64 header length, JSON header, raw little-endian arrays.

This module writes, reads and hashes in a single pass. Any safetensors library can read its files. It also reads the
headers of .npy files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system import files

JSON: TypeAlias = Any  # what json.dumps takes and json.loads gives
Arrays: TypeAlias = dict[str, NDArray[Any]]

_HEAD_BYTES = 16 * files.MIB  # enough for 100,000 arrays
_CHUNK_BYTES = 1 << 20  # fits the processor's cache while it is hashed
_CODES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64", "|b1": "BOOL", "|i1": "I8", "|u1": "U8"}
_CODES |= {"<i8": "I64", "<u8": "U64", "<i4": "I32", "<u4": "U32", "<i2": "I16", "<u2": "U16"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def write(path: Path, data: Iterable[memoryview]) -> dict[str, JSON]:
    """Writes and fsyncs a new file. Returns its SHA-256 and its size in bytes."""
    sha256, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in data:
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                sha256.update(chunk)
                while chunk:
                    chunk = chunk[os.write(file, chunk) :]
            size += len(piece)
        os.fsync(file)
    finally:
        os.close(file)
    return {"sha256": sha256.hexdigest(), "bytes": size}


def stated(path: Path) -> dict[str, JSON]:
    """SHA-256 and size in bytes of a file that another process has written."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": os.fstat(file.fileno()).st_size}


def pieces(arrays: Arrays) -> Iterator[memoryview]:
    """The pieces of a safetensors file. Only arrays that are not contiguous are copied, one at a time."""
    header: dict[str, JSON] = dict.fromkeys(arrays)  # in the caller's order
    by_size = sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)  # this keeps every array aligned
    end = 0
    for name, array in by_size:
        code = _CODES.get(array.dtype.newbyteorder("<").str)
        if code is None or name == "__metadata__":
            raise TypeError(f"array {name!r} of {array.dtype} cannot be stored in safetensors")
        start, end = end, end + array.nbytes
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, array in by_size:
        plain = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        yield plain.reshape(-1).view(np.uint8).data


def read(path: Path, entry: dict[str, JSON]) -> Arrays:
    """The arrays of a safetensors file as views of one buffer, verified by SHA-256. Raises ValueError or OSError."""
    with files.open_plain(path) as stream:
        file = stream.fileno()
        size, done, sha256 = os.fstat(file).st_size, 0, hashlib.sha256()
        if size != entry["bytes"]:
            raise ValueError(f"{path.name} has {size} bytes instead of {entry['bytes']}")
        try:
            buffer = np.empty(size, np.uint8)
        except MemoryError:
            raise ValueError(f"{path.name} has {size} bytes, which exceeds the memory") from None
        while done < size:
            chunk = buffer[done : done + _CHUNK_BYTES].data
            if not (count := os.readv(file, [chunk])):
                raise ValueError(f"{path.name} ends after {done} of {size} bytes")
            sha256.update(chunk[:count])
            done += count
    if sha256.hexdigest() != entry["sha256"]:
        raise ValueError(f"{path.name} is damaged (SHA-256 differs)")
    try:
        return views(buffer)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path.name} is not a valid safetensors file ({type(error).__name__}: {error})") from None


def views(buffer: NDArray[np.uint8]) -> Arrays:
    """The arrays in a file's bytes, as views of them. Raises an error if they do not match the header."""
    data = 8 + int.from_bytes(buffer[:8].tobytes(), "little")
    if not 8 < data <= min(len(buffer), _HEAD_BYTES):
        raise ValueError(f"a header of {data - 8} bytes in a file of {len(buffer)}")
    arrays, end = {}, 0
    header = files.from_json(buffer[8:data].tobytes())
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = np.dtype(_DTYPES[about["dtype"]]), about["shape"], about["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"array {name!r:.80}: shape or offsets are not whole numbers")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"array {name!r:.80} of {shape} does not match its offsets, {start} to {stop}")
        end = stop
        if data + end > len(buffer):
            break
        arrays[name] = buffer[data + start : data + stop].view(dtype).reshape(shape)
    if data + end != len(buffer):
        raise ValueError(f"arrays end at byte {end} of {len(buffer) - data}")
    return {name: arrays[name] for name in header}


def read_npy_head(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and dtype of an .npy file. Leaves the file at the start of its array.

    Raises ValueError for a bad header, OSError if the file cannot be read.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(file)
    except OSError:
        raise
    except Exception as error:  # of many types, because NumPy uses Python's parser
        raise ValueError("its header cannot be read") from error
