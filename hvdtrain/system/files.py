"""Reads files that somebody else may have written: only plain files, only up to a limit; and writes them.

Every reader of a file that a user names, or that lies where others can write, opens it here. A pipe or a device is
refused before it is opened, because reading it may never end; a file beyond the reader's limit is refused before it
fills the memory; a document nested so deeply that it would exhaust the stack is refused as malformed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from hvdtrain.system.exits import CANNOT_WRITE, IO_ERROR, NO_PERMISSION, Failure

MIB = 1 << 20
SETTINGS_BYTES = MIB
"""Limit of a file that people write: TOML, host lists"""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of locking on file systems without locks"""
DEEPEST = 64
"""Most levels of a JSON or TOML document; ours have fewer than ten"""
_NO_KEYS = re.compile(
    rb'''
    """[^"\\]*+ (?: (?: \\.? | "(?!"") ) [^"\\]*+ )* (?: "{3,5} | \Z )  # the last two of five quotes are the string's
    | \'\'\'[^\']*+ (?: \'(?!\'\') [^\']*+ )* (?: \'{3,5} | \Z )
    | "[^"\\\n]*+ (?: \\[^\n] [^"\\\n]*+ )* "?
    | \'[^\'\n]*+ \'?
    | \#[^\n]*+
    ''',
    re.VERBOSE | re.DOTALL,
)
"""Matches strings and comments of TOML. One without an end matches up to where tomllib reports it, so that it cannot
hide a key from the check. Only character classes are repeated possessively: Python before 3.11.5 loses its place in a
group (CPython issue 106052)."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_KERNELS = {"proc", "sysfs", "tracefs", "debugfs", "securityfs", "configfs", "cgroup", "cgroup2", "bpf", "pstore"}
"""Types of file systems without files of anybody's"""


def open_plain(path: str | Path) -> BufferedReader:
    """Opens a plain file for reading. Raises OSError; for another kind its text is "a pipe, not a plain file", say."""
    _plain(path, Path(path).stat())  # before it is opened, because opening a device may have an effect
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _plain(path, os.fstat(file))
        return os.fdopen(file, "rb")
    except OSError:
        os.close(file)
        raise


def _plain(path: str | Path, about: os.stat_result) -> None:
    kind = None if stat.S_ISREG(about.st_mode) else _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
    if kind is None and not about.st_size and _of_kernel(about.st_dev):
        kind = "a pseudo-file of the kernel"
    if kind is not None:
        raise OSError(errno.EINVAL, f"{kind}, not a plain file", str(path))


def _of_kernel(device: int) -> bool:
    """Whether the kernel makes up the files of this file system: /proc/kmsg, say, calls itself a plain file of 0 bytes,
    and reading it never ends. See proc(5), mountinfo."""
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().decode(errors="replace").split("\n")
    except OSError:
        return False
    return any(f" {name} " in mount and mount.partition(" - ")[2].split(" ")[0] in _KERNELS for mount in mounts)


def read(path: str | Path, most_bytes: int) -> bytes:
    """The content of a plain file. Raises OSError, also for a file of more than `most_bytes`."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes / MIB:,.3g} MiB, the most that is read", str(path))
    return data


def put(path: Path, content: bytes, hint: str) -> None:
    """Writes a file whole or not at all, durably. Raises Failure as `unwritable` says."""
    part = path.parent / f".{path.name}.{os.getpid()}"
    try:
        if path.exists():
            _plain(path, path.stat())  # a rename would put a file in the place of a device
        part.unlink(missing_ok=True)  # of a killed process of this number, or somebody's link
        with part.open("xb") as file:
            file.write(content)
        sync(part)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise unwritable(path, error, hint) from error


def sync(path: str | Path) -> None:
    """Makes the content of a file, or the entries of a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def from_json(data: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for malformed text and for more than DEEPEST levels."""
    try:
        return _shallow(json.loads(data))
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None


def from_toml(data: bytes) -> dict[str, Any]:
    """The tables of a TOML file, with or without a byte order mark. Raises ValueError as `from_json` does."""
    bare = _NO_KEYS.sub(b"", data)
    if any(part.count(b".") > DEEPEST for part in re.split(rb"[=,\n]", bare)):  # tomllib needs minutes for such a key
        raise ValueError(f"a key of more than {DEEPEST} parts")
    try:
        return _shallow(tomllib.loads(data.decode("utf-8-sig")))
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None


def _shallow(value: Any) -> Any:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return value
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    raise ValueError(f"nested more than {DEEPEST} levels deep")


def refused(path: str | Path, error: OSError, code: int, hint: str) -> Failure:
    """The Failure for an OSError of `open_plain` or `read`: one line ending in `hint`; exit code `code`, or 77 without
    access."""
    denied = isinstance(error, PermissionError)
    return Failure(f"{path}: {error.strerror or error}; {hint}", NO_PERMISSION if denied else code)


def unwritable(path: str | Path, error: OSError, hint: str) -> Failure:
    """The Failure (73) for an OSError of writing, one line ending in `hint`; (74) for a full disk."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    told = f"{path}: {error.strerror}; {'free some room' if full else hint}"
    return Failure(told, IO_ERROR if full else CANNOT_WRITE)


def open_lock(path: str | Path) -> int:
    """Opens `path` for flock(2) and returns its descriptor; makes the file if absent, never writes or truncates it.

    Another user's file is opened for reading, which is enough to lock it. Raises OSError, also for a symbolic link and
    anything else that is not a plain file.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError:
        file = os.open(path, flags | os.O_RDONLY)
    try:
        about = os.fstat(file)
        _plain(path, about)
        if about.st_nlink > 1:
            raise OSError(errno.EMLINK, "has other names too, so it is no lock file of ours", str(path))
    except OSError:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def locked(path: str | Path, *, wait: bool = True) -> Iterator[int]:
    """Holds flock(2) on the file that `open_lock` opens, and yields its descriptor. Raises OSError; BlockingIOError
    where another holds it and this process does not `wait`."""
    file = open_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    finally:
        os.close(file)
