"""Locks a run's folder for one job: two jobs that save there would destroy each other's checkpoints.

The first rank of each host holds an flock(2) on a file in the folder until the run ends. The kernel releases it
however the process ends, so no lock is ever stale; the file's content only names the holder. Linux enforces flock on
NFS between clients (nfs(5), `local_lock=none`); with `nolock` or `local_lock=flock` a lock counts on its host only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

NAME = ".lock"
LONGEST_BYTES = 512
TOLD_S = 0.2
"""Wait before reading the holder's name, which it writes after it has locked the file"""
_held: list[int] = []
"""Descriptors that hold the locks, open until `release` or the end of this process"""


def take(folder: Path, job: str, since_utc: str) -> None:
    """Locks `folder`, which exists, for the job of this name. Another process of the same job may hold the lock.

    Follows no symbolic link and changes no file but the lock. Raises Failure (73) if another job holds it, or OSError.
    """
    path = folder / NAME
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        about = os.fstat(file)
        plain = stat.S_ISREG(about.st_mode) and about.st_nlink == 1
        if not plain or (about.st_size and "job" not in _holder(file)):
            raise Failure(f"{path} is no lock of hvdtrain's: move it away", exits.CANNOT_WRITE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TOLD_S)
            holder = _holder(file)
            if holder.get("job") == job:  # another host of this job shares the folder
                os.close(file)
                return
            pid, host, utc = (re.sub(r"[^\w.:-]", "?", str(holder.get(key)))[:64] for key in ("pid", "host", "utc"))
            raise Failure(
                f"{folder} is in use by another job (process {pid} on {host}, since {utc}): wait for its end, or stop "
                "it",
                exits.CANNOT_WRITE,
            ) from None
        except OSError as error:
            if error.errno not in files.UNSUPPORTED:
                raise
            print(f"hvdtrain: {path}: {error.strerror}: nothing keeps another job out of it", file=sys.stderr)
        words = json.dumps({"job": job, "pid": os.getpid(), "host": os.uname().nodename, "utc": since_utc})
        os.pwrite(file, words.ljust(LONGEST_BYTES).encode(), 0)
        os.fsync(file)
    except BaseException:
        os.close(file)
        raise
    _held.append(file)


def release() -> None:
    """Releases all locks of this process."""
    while _held:
        os.close(_held.pop())


def _holder(file: int) -> dict[str, Any]:
    """The holder as the lock file names it; empty if the content is not ours."""
    try:
        said = json.loads(os.pread(file, LONGEST_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
