"""Lock a run folder for one job. Two jobs that save there would destroy each other's checkpoints.

The first rank of each host holds flock(2) on a file in the folder until the run ends. The kernel releases the lock
however the process ends, so no lock is ever stale; the file's content only names the holder. Linux enforces flock on
NFS between clients (nfs(5), `local_lock=none`). With `nolock` or `local_lock=flock` a lock counts on its host only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hvdtrain.system import exits, files
from hvdtrain.system.exits import Failure

NAME = ".lock"
LONGEST_BYTES = 512
HOLDER_WAIT_S = 0.2
"""Wait before reading the holder's name, which the holder writes after it has locked the file."""
RETRY_S = 0.5
_job = ""
"""The job of this process, from `take` until `release`"""
_held: list[int] = []
"""Descriptors that hold the locks. They stay open until `release` or the end of this process."""


def take(folder: Path, job: str, since_utc: str) -> None:
    """Lock the existing `folder` for a job. Other processes of the same job may hold the lock too.

    Follows no symbolic link and changes no file but the lock. Raises Failure (73) if another job holds it, or OSError.
    """
    global _job
    _job, path = job, folder / NAME
    file = files.open_lock(path, write=True)
    try:
        if os.fstat(file).st_size and "job" not in _holder(file):
            raise Failure(f"{path} is not an hvdtrain lock file; hint: move it away", exits.CANNOT_WRITE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(HOLDER_WAIT_S)
            holder = _holder(file)
            if holder.get("job") == job:  # another host of this job shares the folder
                os.close(file)
                return
            pid, host, utc = (re.sub(r"[^\w.:-]", "?", str(holder.get(key)))[:64] for key in ("pid", "host", "utc"))
            message = f"{folder} is in use by another job (process {pid} on {host}, since {utc})"
            raise Failure(f"{message}; hint: wait until it ends, or stop it", exits.CANNOT_WRITE) from None
        except OSError as error:
            if error.errno not in files.UNSUPPORTED:
                raise
            warning = "another job can use this folder at the same time, because its file system has no locks"
            print(f"hvdtrain: {path}: {error.strerror}: {warning}", file=sys.stderr)
        words = json.dumps({"job": job, "pid": os.getpid(), "host": os.uname().nodename, "utc": since_utc})
        os.pwrite(file, words.ljust(LONGEST_BYTES).encode(), 0)
        os.fsync(file)
    except BaseException:
        os.close(file)
        raise
    _held.append(file)


def take_over(folder: Path, since_utc: str) -> None:
    """Lock the folder for the job of this process, which another process of it has locked and is lost.

    A host that is cut off holds the lock until it ends its ranks. So this waits in the background. Raises as `take`.
    """

    def retry() -> None:
        while _job and not _held:
            time.sleep(RETRY_S)
            with contextlib.suppress(Failure, OSError):
                take(folder, own, since_utc)

    own = _job
    take(folder, own, since_utc)
    if not _held:
        threading.Thread(target=retry, name="hvdtrain-lock", daemon=True).start()


def job() -> str:
    """Return the job for which this process takes locks; empty for none."""
    return _job


def join(other: str) -> None:
    """Belong to a job whose other processes have locked the folder."""
    global _job
    _job = other


def holds() -> bool:
    """Whether this process holds a lock."""
    return bool(_held)


def release() -> None:
    """Release all locks of this process."""
    global _job
    _job = ""
    while _held:
        os.close(_held.pop())


def _holder(file: int) -> dict[str, Any]:
    """The lock's holder as its file names it. Empty if hvdtrain did not write the content."""
    try:
        holder = json.loads(os.pread(file, LONGEST_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}
