"""Read, write and lock files that other users may have written.

Use these functions for each file that a user names or that lies in a folder where others can write. They reject:

- pipes and devices, before opening them, because reading one may never end;
- files larger than the reader's limit, before they fill the memory;
- documents nested so deeply that parsing them would exhaust the stack.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from hvdtrain.system.exits import CANNOT_WRITE, IO_ERROR, NO_PERMISSION, Failure

MIB = 1 << 20
SETTINGS_BYTES = MIB
"""Size limit of files that people write, such as TOML files and host lists."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of flock(2) on file systems without locks."""
DEEPEST = 64
"""Maximum nesting depth of a JSON or TOML document. hvdtrain's own have fewer than ten levels."""
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
"""Matches strings and comments of TOML.

An unterminated string matches up to the place where tomllib reports it, so it cannot hide a key from the check. Only
character classes are repeated possessively, because Python before 3.11.5 does that wrongly for groups (CPython issue
106052).
"""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_KERNELS = {"proc", "sysfs", "tracefs", "debugfs", "securityfs", "configfs", "cgroup", "cgroup2", "bpf", "pstore"}
"""File system types whose files the kernel generates."""


def open_plain(path: str | Path) -> BufferedReader:
    """Open a plain file for reading.

    Raises OSError. For other kinds of file its text names the kind, for example "a pipe, not a plain file".
    """
    _plain(path, Path(path).stat())  # before opening it, because opening a device may have side effects
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
    """Whether the kernel generates the files of this file system (proc(5), mountinfo).

    Reading one may never end: /proc/kmsg claims to be a plain file of 0 bytes.
    """
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().decode(errors="replace").split("\n")
    except OSError:
        return False
    return any(f" {name} " in mount and mount.partition(" - ")[2].split(" ")[0] in _KERNELS for mount in mounts)


def read(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a plain file. Raises OSError, also if the file has more than `most_bytes`."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than the limit of {most_bytes / MIB:,.3g} MiB", str(path))
    return data


def shipped(name: str | Path, folder: Path) -> Path:
    """The path of a TOML file: `name`, or hvdtrain's own file `folder`/NAME.toml if only that exists."""
    own = folder / f"{name}.toml"
    return own if not os.path.lexists(name) and Path(name).name == str(name) and own.is_file() else Path(name)


def put(path: Path, content: bytes, hint: str) -> None:
    """Write a file atomically and durably. Raises Failure as documented at `unwritable`."""
    with writing(path, hint) as part:
        part.write_bytes(content)


@contextlib.contextmanager
def writing(path: Path, hint: str) -> Iterator[Path]:
    """A new file that gets the name `path` at the end of the block, or vanishes if the block fails.

    Its hidden name ends like `path`. Raises Failure as documented at `unwritable`.
    """
    part = path.parent / f".{os.getpid()}-{path.name}"
    try:
        if path.exists():
            _plain(path, path.stat())  # a rename would replace a device with a file
        _remove(part)  # left by a killed process with this id, or planted as a link
        part.touch(exist_ok=False)
        yield part
        sync(part)
        part.replace(path)
    except OSError as error:
        raise unwritable(path, error, hint) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step (rename(2)) and let everyone read it, whatever the umask.

    Not durable: for files in /run. A killed process may leave `NAME.part`, which the next call overwrites.
    """
    part = part_of(path)
    part.write_text(text)
    part.chmod(0o644)
    part.rename(path)


def part_of(path: Path) -> Path:
    """The temporary file of `replace_text`."""
    return path.with_name(path.name + ".part")


def sync(path: str | Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync(2))."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def from_json(data: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is malformed or has more than DEEPEST levels."""
    try:
        return _shallow(json.loads(data))
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None


def from_toml(data: bytes) -> dict[str, Any]:
    """Parse TOML, with or without a byte order mark. Raises ValueError as `from_json` does."""
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
    """Convert an OSError of `open_plain` or `read` to a Failure with this exit code, or 77 without access."""
    denied = isinstance(error, PermissionError)
    return Failure(f"{path}: {error.strerror or error}; hint: {hint}", NO_PERMISSION if denied else code)


def unwritable(path: str | Path, error: OSError, hint: str) -> Failure:
    """Convert an OSError of writing to a Failure (73), or (74) if the disk is full."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    message = f"{path}: {error.strerror}; hint: {'free some space' if full else hint}"
    return Failure(message, IO_ERROR if full else CANNOT_WRITE)


def cache_folder() -> Path:
    """This user's cache, below $XDG_CACHE_HOME or ~/.cache. Raises Failure (73) if there is no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"
    except RuntimeError:  # no HOME, and the user is unknown
        raise Failure("there is no home folder for the cache; hint: set XDG_CACHE_HOME", CANNOT_WRITE) from None


def open_lock(path: str | Path, mode: int = 0o644, *, write: bool = False) -> int:
    """Open a file for flock(2) and return its descriptor.

    Creates the file if it is missing, never writes to it and never truncates it. Another user's file is opened for
    reading, which is enough to lock it; with `write` that is an error. Raises OSError, also if the path is a symbolic
    link or not a plain file.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags | os.O_RDWR | os.O_CREAT, mode)
    except PermissionError:
        if write:
            raise
        file = os.open(path, flags | os.O_RDONLY)
    try:
        about = os.fstat(file)
        _plain(path, about)
        if about.st_nlink > 1:
            raise OSError(errno.EMLINK, "has several hard links, so it is not an hvdtrain lock file", str(path))
    except OSError:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def locked(path: str | Path, *, wait: bool = True, mode: int = 0o644) -> Iterator[int]:
    """Hold flock(2) on a file and yield its descriptor.

    Raises OSError as `open_lock` does, and BlockingIOError if another process holds the lock and `wait` is False.
    """
    file = open_lock(path, mode)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    finally:
        os.close(file)
