"""Keeps what C++ libraries print as they start, whatever their log level, out of what users read."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(notes: tuple[bytes, ...]) -> Iterator[None]:
    """Drops the lines with any of `notes` that the process prints on stderr meanwhile; others come out afterwards."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not any(note in line for note in notes):
                    sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
