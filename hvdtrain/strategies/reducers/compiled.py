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
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hvdtrain.comm.launch_env import launch_env
from hvdtrain.system import files
from hvdtrain.system.exits import Failure

SET, ADD, SUBTRACT = range(3)
"""What decoding does with the numbers that are there"""
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
COMPILE_S = 60.0


@functools.cache
def loops() -> ctypes.CDLL | None:
    """Return the library; None, with a line on stderr, if it cannot be compiled here."""
    try:
        return _declared(_library())
    except (OSError, Failure, subprocess.SubprocessError) as error:
        if launch_env().local_rank == 0:
            said = getattr(error, "stderr", None) or str(error).encode()
            reason = said.decode(errors="replace").strip().partition("\n")[0]
            what = f"coding takes 3 to 10 times as long, because C code cannot be compiled: {reason}"
            print(f"hvdtrain: {what}; hint: install gcc, or set CC", file=sys.stderr, flush=True)
        return None


def _library() -> ctypes.CDLL:
    """Load the library from the cache, or compile it. Raises OSError, Failure or SubprocessError."""
    source = Path(__file__).with_name("coding.c")
    key = hashlib.sha256(" ".join([source.read_text(), *FLAGS, platform.machine(), *platform.libc_ver()]).encode())
    cached = None
    with contextlib.suppress(OSError, Failure):  # no cache, or a damaged file in it
        cached = files.cache_folder() / f"coding-{key.hexdigest()[:16]}.so"
        if cached.stat().st_uid in (0, os.getuid()):  # another user could have written it into a shared cache
            return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "coding.so")
        command = [*shlex.split(os.environ.get("CC") or "cc"), *FLAGS, str(source), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
        library = ctypes.CDLL(str(made))
        with contextlib.suppress(OSError):
            if cached is not None:
                cached.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as copy:
                    copy.write(made.read_bytes())
                Path(copy.name).replace(cached)  # several ranks may do so
        return library


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the parameters, so that arrays of other types or with gaps are refused. The functions return nothing."""
    number, size = ctypes.c_int, ctypes.c_int64
    floats, halves, message = (
        np.ctypeslib.ndpointer(dtype, flags="C_CONTIGUOUS") for dtype in (np.float32, np.uint16, np.int8)
    )
    library.encode_integers.argtypes = (floats, size, size, number, halves, message)
    library.decode_integers.argtypes = (halves, message, size, number, number, floats)
    library.encode_bf16.argtypes = (floats, size, halves)
    library.decode_bf16.argtypes = (halves, size, number, floats)
    library.add_products.argtypes = (floats, floats, size, size, size, floats)
    return library
