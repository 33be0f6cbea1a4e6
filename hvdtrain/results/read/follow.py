"""Follows the record files of a run that may still be written to."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

from hvdtrain import records
from hvdtrain.results.read.folders import exists
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Follower:
    """Reads what was appended to one JSONL file since the last call.

    The file is opened each time, because NFS shows the writes of another host only to a file that is opened later.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """`last_bytes`: begin about this far before the end of the file; None: at its beginning."""
        self._path, self._last_bytes, self._at, self._inode = path, last_bytes, 0, 0
        self.changed_unix_s: float | None = None
        """When the file was last written, by its file system's clock; None if there is no file yet"""

    def new(self) -> Iterator[records.Record]:
        """The records appended since the last call, without damaged lines. An incomplete last line waits for its end.

        Raises Failure (65, 74, 77).
        """
        if not exists(self._path):
            return
        with records.open_plain(self._path) as stream:
            about = os.fstat(stream.fileno())
            self.changed_unix_s = about.st_mtime
            if about.st_size < self._at or about.st_ino != self._inode:  # replaced by another file
                self._at, self._inode = 0, about.st_ino
            if self._last_bytes is not None:
                self._at, self._last_bytes = max(0, about.st_size - self._last_bytes), None
                if self._at:  # continue after the end of this line
                    stream.seek(self._at - 1)
                    self._at += len(stream.readline(records.LONGEST_LINE_BYTES)) - 1
            stream.seek(self._at)
            while line := stream.readline(records.LONGEST_LINE_BYTES + 1):
                if len(line) > records.LONGEST_LINE_BYTES:
                    raise Failure(f"{self._path}: a line of {len(line)} bytes is not a record", exits.BAD_DATA)
                if not line.endswith(b"\n"):
                    return
                where = f"{self._path}, byte {self._at}"
                self._at += len(line)
                text = line.removeprefix(codecs.BOM_UTF8).strip()
                if text and (record := records.decode(text, where)) is not None:
                    yield record
