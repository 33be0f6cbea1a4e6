"""List the images in a source folder, in the order in which they become rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import stratify
from hvdtrain.data.prepared import CONTROL
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, NO_PERMISSION, Failure


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The images of a source folder, in row order if all of them are usable."""

    root: Path
    classes: list[str]
    files: list[str]
    """Paths relative to `root`."""
    labels: NDArray[np.int64]
    lots: NDArray[np.uint64]
    """Hash of seed and name, which decides a file's position."""
    bad: dict[str, str]
    """Files rejected without opening them -> reason."""
    digest: str
    """SHA-256 of names, sizes and modification times."""


def find(root: Path, seed: int, shares: Sequence[Fraction]) -> Tree:
    """Lists `root`. Raises Failure if it is unreadable (NO_PERMISSION) or has no class folders (BAD_DATA)."""
    if not root.is_dir():
        hint = "give the folder that contains one folder of images per class"
        raise Failure(f"{root} is not a folder; hint: {hint}", BAD_DATA)
    files: list[str] = []
    labels: list[int] = []
    digest = hashlib.sha256()
    try:
        classes, bad = _classes(root)
        for label, name in enumerate(classes):
            for file, status, reason in walk(root, root / name):
                if reason:
                    bad[file] = reason
                    continue
                digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0"))
                files.append(file)
                labels.append(label)
            if label not in labels[-1:]:
                raise Failure(f"{root / name} contains no images; hint: remove the folder or fill it", BAD_DATA)
    except OSError as error:
        code = NO_PERMISSION if isinstance(error, PermissionError) else IO_ERROR
        raise Failure(f"{error.filename}: {error.strerror}; hint: make every folder readable", code) from None
    if len(classes) < 2:
        raise Failure(f"{root} contains {len(classes)} class folder(s), but a classifier needs two or more", BAD_DATA)
    lots = np.array([draw_lot(seed, file) for file in files], np.uint64)
    order, _ = stratify(np.array(labels, np.int64), lots, len(classes), shares)
    return Tree(
        root=root,
        classes=classes,
        files=[files[i] for i in order],
        labels=np.array(labels, np.int64)[order],
        lots=lots[order],
        bad=bad,
        digest=digest.hexdigest(),
    )


def _classes(root: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the class folders. Links to folders are bad samples, since they could lead anywhere."""
    with os.scandir(root) as entries:
        folders = sorted((e for e in entries if e.is_dir() and not e.name.startswith(".")), key=lambda e: e.name)
    if wrong := next((e.name for e in folders if CONTROL.search(e.name)), None):
        raise Failure(f"{root}: the folder {wrong!r} has a control character in its name; hint: rename it", BAD_DATA)
    links = {e.name: "a link to a folder" for e in folders if e.is_symlink()}
    return [e.name for e in folders if not e.is_symlink()], links


def walk(root: Path, folder: Path) -> Iterator[tuple[str, os.stat_result, str]]:
    """(path relative to root, status, reason to reject it or '') of everything below `folder`, ordered by name."""
    inside = Path(os.path.realpath(root))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        path, status, reason = Path(entry.path), entry.stat(follow_symlinks=False), ""
        if entry.is_dir(follow_symlinks=False):
            yield from walk(root, path)
            continue
        if entry.is_symlink():
            if not Path(os.path.realpath(path)).is_relative_to(inside):
                reason = "a link that leaves the tree"
            elif entry.is_file():
                status = entry.stat()
            else:
                reason = "a link to no file"
        elif not entry.is_file():
            reason = "not a plain file"
        yield str(path.relative_to(root)), status, reason


def draw_lot(seed: int, file: str) -> int:
    return int.from_bytes(hashlib.sha256(os.fsencode(f"{seed}/{file}")).digest()[:8])
