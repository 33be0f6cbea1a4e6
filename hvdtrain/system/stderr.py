"""Hides lines that C++ libraries print on stderr at their start, whatever their log level."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress(notes: tuple[bytes, ...]) -> Iterator[None]:
    """Within it, drops lines on stderr that contain one of `notes`; other lines are printed when it ends."""
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
