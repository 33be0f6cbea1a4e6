"""The loops of coding.c, which are three to ten times as fast as NumPy's and give the same bits.

They are compiled when a reducer first needs them, into the user's cache. Without a C compiler NumPy does the work, so
the hosts of a job may differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from hvdtrain.system import files
from hvdtrain.system.exits import Failure

SET, ADD, SUBTRACT = range(3)
"""What decoding does with the numbers that are there"""
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
COMPILE_S = 60.0


@functools.cache
def loops() -> ctypes.CDLL | None:
    """Return the library; None if it cannot be compiled or stored here."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    source = Path(__file__).with_name("coding.c")
    if compiler is None:
        return None
    key = hashlib.sha256(" ".join([source.read_text(), *FLAGS, platform.machine(), *platform.libc_ver()]).encode())
    with contextlib.suppress(OSError, Failure, subprocess.SubprocessError):
        library = files.cache_folder() / f"coding-{key.hexdigest()[:16]}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # several ranks may compile it
                made = Path(folder, library.name)
                command = [compiler, *FLAGS, str(source), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
                made.replace(library)
        if library.stat().st_uid in (0, os.getuid()):  # another user could have written it into a shared cache
            return _declared(ctypes.CDLL(str(library)))
    return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the parameters, so that arrays of other types or with gaps are refused. The functions return nothing."""
    number, size = ctypes.c_int, ctypes.c_int64
    floats, halves, message = (
        np.ctypeslib.ndpointer(dtype, flags="C_CONTIGUOUS") for dtype in (np.float32, np.uint16, np.uint8)
    )
    library.encode_integers.argtypes = (floats, size, size, number, message, message)
    library.decode_integers.argtypes = (message, message, size, number, number, floats)
    library.encode_bf16.argtypes = (floats, size, halves)
    library.decode_bf16.argtypes = (halves, size, number, floats)
    library.add_products.argtypes = (floats, floats, size, size, size, floats)
    return library
