"""Reads and writes record files: one JSON record per line, appended. Damaged files cannot exhaust the memory."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from hvdtrain.records.types import SCHEMA, Record, Resumed, Step, Summary, as_json
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

R = TypeVar("R", bound=Record)

_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
LONGEST_LINE_BYTES = 64 << 20
"""Longer lines are rejected, which bounds the memory. A summary of 256 classes and 2,000 epochs fits"""
LONGEST_DOCUMENT_BYTES = 4 << 20
BLOCK_BYTES = 1 << 16


class Writer:
    """Appends records to one JSONL file with one write per line, so that a crash damages at most the last line."""

    def __init__(self, path: Path) -> None:
        """Opens `path` and terminates an incomplete last line of an earlier process. Raises Failure (73, 74)."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except OSError as error:
            raise files.unwritable(path, error, "choose another --run-dir") from error
        self._path = path

    def write(self, record: Record) -> None:
        line = json.dumps(as_json(record), separators=(",", ":")).encode() + b"\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            raise Failure(
                f"{self._path}: {error.strerror}; hint: free some space, then use --resume", exits.IO_ERROR
            ) from error

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Record]:
    """The records of one JSONL file in order, without incomplete lines (after a crash, the last one).

    Raises Failure (65, 74, 77) with file:line for any other line that is not a record. Holds one line in memory.
    """
    for _, record in read_lines(path):
        yield record


def read_lines(path: Path, incomplete: Callable[[int], None] = lambda number: None) -> Iterator[tuple[int, Record]]:
    """Line number and record of each line of a JSONL file; calls `incomplete` with the number of each incomplete line.

    Raises Failure as `read` does, also for a line of more than LONGEST_LINE_BYTES.
    """
    with open_plain(path) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            if len(line) > LONGEST_LINE_BYTES:
                most = f"{LONGEST_LINE_BYTES >> 20} MiB"
                raise Failure(f"{path}:{number}: a line of more than {most} is not a record", exits.BAD_DATA)
            line = line.removeprefix(codecs.BOM_UTF8).strip()
            if not line:
                continue
            record = decode(line, f"{path}:{number}")
            if record is None:
                incomplete(number)
            else:
                yield number, record


def decode(line: bytes, where: str) -> Record | None:
    """The record in one line; None if the line is incomplete. Raises Failure (65) that names `where`."""
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError as error:
        raise _rejected(where, str(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if _is_python_json(line):
            raise _rejected(where, "NaN and Infinity are not JSON") from error
        return None


def _is_python_json(line: bytes) -> bool:
    """Whether Python's parser, which also accepts NaN and Infinity, can read the line."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _rejected(where: str, reason: str) -> Failure:
    return Failure(f"{where}: not a record of {SCHEMA}: {reason}", exits.BAD_DATA)


def summary(folder: Path) -> Summary | None:
    """The summary at the end of rank 0's records of a run folder. Reads only the end of the file."""
    with contextlib.suppress(OSError):
        for record in backwards(folder / "metrics" / "rank0000.jsonl"):
            if isinstance(record, Summary | Step | Resumed):  # a run that went on has not ended yet
                return record if isinstance(record, Summary) else None
    return None


def backwards(path: Path) -> Iterator[Record]:
    """The records of one JSONL file without damaged lines, the last one first. Reads only as much as is asked for.

    Raises OSError.
    """
    with files.open_plain(path) as stream:
        for line in _lines_from_end(stream):
            with contextlib.suppress(Failure):
                if (record := decode(line, "")) is not None:
                    yield record


def _lines_from_end(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, the last one first, without those of more than LONGEST_LINE_BYTES."""
    at, parts = os.fstat(stream.fileno()).st_size, list[bytes]()
    while at > 0:
        size = min(at, BLOCK_BYTES)
        at -= size
        stream.seek(at)
        first, *lines = stream.read(size).split(b"\n")
        if lines:
            yield b"".join([lines.pop(), *reversed(parts)])
            yield from reversed(lines)
            parts = []
        if sum(map(len, parts)) <= LONGEST_LINE_BYTES:
            parts.append(first)
    yield b"".join(reversed(parts))


def read_document(path: Path, cls: type[R]) -> R:
    """The record of type `cls` in a JSON file such as manifest.json. Raises Failure (65, 74, 77)."""
    with open_plain(path) as stream:
        text = stream.read(LONGEST_DOCUMENT_BYTES + 1)
    if len(text) > LONGEST_DOCUMENT_BYTES:
        raise _rejected(str(path), f"larger than {LONGEST_DOCUMENT_BYTES >> 20} MiB")
    try:
        value = files.from_json(text)
    except ValueError as error:
        raise Failure(f"{path}:{getattr(error, 'lineno', 1)}: not JSON ({error})", exits.BAD_DATA) from error
    return from_json(value, f"{path}:1", cls)


def from_json(value: Any, where: str, cls: type[R] = Record) -> R:  # type: ignore[assignment]
    """The record in a JSON value. Raises Failure (65) that names `where`."""
    try:
        return msgspec.convert(value, cls)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise _rejected(where, str(error)) from error


def open_plain(path: Path) -> IO[bytes]:
    """Opens a plain file for reading. Raises Failure, also for pipes and devices, whose reads may never end."""
    try:
        return files.open_plain(path)
    except OSError as error:
        code = exits.BAD_DATA if error.errno == errno.EINVAL else exits.IO_ERROR
        raise files.refused(path, error, code, "check the path, or ask its owner for access") from error


def write_document(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file atomically. Raises Failure (73, 74)."""
    files.put(path, (json.dumps(value, indent=2) + "\n").encode(), "choose another --run-dir")
