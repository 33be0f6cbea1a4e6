"""Make a folder of prepared data, which appears when it is complete. A kill at any time does no harm.

The work is done in `.NAME.unfinished`, locked by one process. What a killed process has left there is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.system import files
from hvdtrain.system.exits import BAD_CONFIG, CANNOT_WRITE, FAILED, IO_ERROR, Failure


def check_destination(source: str, folder: str) -> None:
    """Raises Failure for a destination that exists or is inside the source."""
    destination = Path(folder).absolute()
    if Path(os.path.realpath(destination)).is_relative_to(os.path.realpath(source)):
        raise Failure(f"{destination} is inside the source; hint: choose another destination", BAD_CONFIG)
    if destination.exists():
        raise Failure(f"{destination} exists; hint: remove it, or choose another destination", CANNOT_WRITE)


@contextmanager
def explained(destination: Path) -> Iterator[None]:
    """Turns an OSError or a lost worker into a one-line error that says what to do."""
    try:
        yield
    except BrokenProcessPool:
        message = "a worker process was killed, perhaps for lack of memory"
        raise Failure(f"{message}; hint: use fewer --workers", FAILED) from None
    except OSError as error:
        where = error.filename or destination
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise Failure(f"{where}: {error.strerror}; hint: choose another destination", CANNOT_WRITE) from None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = f"{'free some space and ' if full else ''}run the same command again"
        raise Failure(f"{where}: {error.strerror}; hint: {hint}", IO_ERROR) from None


@contextmanager
def making(destination: Path) -> Iterator[Path]:
    """A new folder, which becomes the destination at the end of the block. It is removed if an error occurs.

    The system releases the lock of a killed process.
    """
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    with explained(destination), ExitStack() as stack:
        unfinished.mkdir(parents=True, exist_ok=True)
        if unfinished.is_symlink():
            raise Failure(f"{unfinished} is a link; hint: remove it, or choose another destination", CANNOT_WRITE)
        if unfinished.stat().st_uid != os.geteuid():  # its owner may have put links into it
            raise Failure(f"{unfinished} belongs to another user; hint: choose another destination", CANNOT_WRITE)
        try:
            stack.enter_context(files.locked(unfinished / "lock", wait=False))
        except BlockingIOError:
            raise Failure(f"{unfinished}: another process is working there; hint: wait for it", CANNOT_WRITE) from None
        except OSError as error:
            if error.errno not in files.UNSUPPORTED:
                raise
            print(f"hvdtrain: warning: {unfinished}: cannot lock ({error.strerror})", file=sys.stderr)
        result = unfinished / "result"
        try:
            if result.exists():
                shutil.rmtree(result)
            result.mkdir()
            yield result
            result.rename(destination)
            files.sync(destination.parent)
        finally:
            shutil.rmtree(unfinished)


def seal(result: Path, about: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Writes the index: `about`, and size and SHA-256 of the files with these names."""
    index: dict[str, Any] = {**about, "files": {}}
    for name in names:
        with (result / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            index["files"][name] = {"bytes": file.tell(), "sha256": digest}
        files.sync(result / name)
    write_json(result / "index.json", index)
    files.sync(result)
    return index


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replaces the file atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=1) + "\n")
    files.sync(draft)
    draft.replace(path)
