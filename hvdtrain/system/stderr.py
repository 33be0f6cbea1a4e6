"""Drop lines that C++ libraries print on stderr when they start, whatever their log level."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress(patterns: tuple[bytes, ...]) -> Iterator[None]:
    """Inside the block, hold back stderr. At its end, print the lines that contain none of `patterns`."""
    original = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            captured.seek(0)
            for line in captured:
                if not any(pattern in line for pattern in patterns):
                    sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
