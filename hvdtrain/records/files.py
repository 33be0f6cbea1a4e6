"""Records to files and back: appended line by line, read back in a memory that a damaged file cannot swell."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from hvdtrain.records.checks import checked, from_json, make
from hvdtrain.records.types import Record, as_json
from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

R = TypeVar("R", bound=Record)

_DECODER = json.JSONDecoder()
LONGEST_LINE_BYTES = 64 << 20
"""A longer line is no record (a summary of 256 classes and 2,000 epochs is one); reading stops there, so memory stays
bounded"""
LONGEST_DOCUMENT_BYTES = 4 << 20


class Writer:
    """Appends records to one JSONL file, one write per line, so that a crash tears at most the last line."""

    def __init__(self, path: Path) -> None:
        """Opens `path`, and ends a line that an earlier process left torn. Raises Failure (73, 74)."""
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
            raise Failure(f"{self._path}: {error.strerror}; free some space and --resume", exits.IO_ERROR) from error

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Any]:
    """The records of one JSONL file in order; a torn line (a crash's last one) is passed over.

    Raises Failure (65, 74) with file:line for a whole line that is no record. Memory is that of one line.
    """
    for _, cls, value in read_values(path):
        yield make(cls, value)


def read_values(
    path: Path, torn: Callable[[int], None] = lambda line: None
) -> Iterator[tuple[int, type[Record], dict[str, Any]]]:
    """Line number, record type and checked JSON value of each line of a JSONL file, as fast as it goes.

    Each torn line is told to `torn` by its number. Raises Failure (65, 74, 77) with file:line, for a line too long too.
    """
    with open_plain(path) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE_BYTES + 1):
            number += 1
            if len(line) > LONGEST_LINE_BYTES:
                most = f"{LONGEST_LINE_BYTES >> 20} MiB"
                raise Failure(f"{path}:{number}: a line of more than {most} is no record", exits.BAD_DATA)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                value, end = _DECODER.raw_decode(text) if text else ({}, 0)
            except (ValueError, RecursionError):
                torn(number)
                continue
            if end != len(text):
                torn(number)
            elif text:
                try:
                    yield number, *checked(value)
                except ValueError as error:
                    raise Failure(f"{path}:{number}: {error}", exits.BAD_DATA) from error


def read_document(path: Path, cls: type[R]) -> R:
    """The record of type `cls` that a JSON file such as manifest.json holds. Raises Failure (65, 74, 77)."""
    with open_plain(path) as stream:
        text = stream.read(LONGEST_DOCUMENT_BYTES + 1)
    if len(text) > LONGEST_DOCUMENT_BYTES:
        raise Failure(f"{path}: more than {LONGEST_DOCUMENT_BYTES >> 20} MiB is no record", exits.BAD_DATA)
    try:
        value = files.from_json(text)
    except json.JSONDecodeError as error:
        raise Failure(f"{path}:{error.lineno}: no JSON ({error.msg})", exits.BAD_DATA) from error
    except ValueError as error:
        raise Failure(f"{path}:1: no JSON ({error})", exits.BAD_DATA) from error
    found = from_json(value, f"{path}:1")
    if not isinstance(found, cls):
        raise Failure(f"{path}:1: a {found.type} record, not a {cls.type}", exits.BAD_DATA)
    return found


def open_plain(path: Path) -> IO[bytes]:
    """Opens a plain file to read; a pipe or device is refused, since reading it may never end. Raises Failure."""
    try:
        return files.open_plain(path)
    except OSError as error:
        code = exits.BAD_DATA if error.errno == errno.EINVAL else exits.IO_ERROR
        raise files.refused(path, error, code, "check the path, or ask its owner for access") from error


def write_document(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all. Raises Failure (73, 74)."""
    files.put(path, (json.dumps(value, indent=2) + "\n").encode(), "choose another --run-dir")
