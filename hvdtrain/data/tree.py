"""List the images in a source folder, in the order in which they become rows.

Folders are classes, with images anywhere below them. If all of them name parts (train, val and test, or such a word in
the name, as in `seg_train`), the folders in them are the classes; a folder that holds nothing but one folder of folders
is passed through (`seg_train/seg_train/forest`). What could be read in two ways is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import stratify
from hvdtrain.data.prepared import CONTROL
from hvdtrain.system.exits import BAD_DATA, IO_ERROR, NO_PERMISSION, Failure, printable

PART_WORDS = {
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("val", "valid", "validation", "dev"), 1),
    **dict.fromkeys(("test", "testing"), 2),
}
"""Word in the name of a part's folder -> number of the part, as in PARTS"""
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
SYSTEM_FILES = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini"}
"""Names that macOS and Windows give to files of their own, besides hidden ones such as .DS_Store and ._photo.jpg"""


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
    parts: NDArray[np.int64] | None = None
    """Part of each file; None if the source has no folders of parts."""
    ignored: list[str] = field(default_factory=list)
    """Hidden and system files."""

    def split(self, rows: NDArray[np.int64], shares: Sequence[Fraction]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of some rows and the number of samples of each class and part: see `stratify`."""
        labels, lots = self.labels[rows], self.lots[rows]
        if self.parts is None:
            return stratify(labels, lots, len(self.classes), shares)
        table = np.zeros((len(self.classes), len(shares)), np.int64)
        np.add.at(table, (labels, self.parts[rows]), 1)
        return np.lexsort((lots, self.parts[rows])), table


def find(root: Path, seed: int, shares: Sequence[Fraction]) -> Tree:
    """Lists `root`. Raises Failure if it is unreadable (NO_PERMISSION) or has no class folders (BAD_DATA)."""
    if not root.is_dir():
        hint = "give the folder that contains one folder of images per class"
        raise Failure(f"{root} is not a folder; hint: {hint}", BAD_DATA)
    files: list[str] = []
    labels: list[int] = []
    parts: list[int] = []
    ignored: list[str] = []
    bad: dict[str, str] = {}
    try:
        places, in_parts = _class_folders(root, bad, ignored)
        classes = sorted({folder.name for folder, _ in places})
        for folder, part in places:
            before = len(files)
            for file, reason in walk(root, folder, ignored):
                if reason:
                    bad[file] = reason
                    continue
                files.append(file)
            if len(files) == before:
                raise Failure(f"{folder} contains no images; hint: remove the folder or fill it", BAD_DATA)
            labels += [classes.index(folder.name)] * (len(files) - before)
            parts += [part] * (len(files) - before)
    except OSError as error:
        code = NO_PERMISSION if isinstance(error, PermissionError) else IO_ERROR
        raise Failure(f"{error.filename}: {error.strerror}; hint: make every folder readable", code) from None
    if len(classes) < 2:
        message = f"{root} contains {len(classes)} class folder(s), but a classifier needs two or more"
        raise Failure(f"{message}; hint: give the folder that contains one folder of images per class", BAD_DATA)
    for name in {*classes} - {folder.name for folder, part in places if part == 0}:
        message = f"{root}: the class {name!r} is not among the training images"
        raise Failure(f"{message}; hint: add images of it there, or remove it from the other folders", BAD_DATA)
    tree = Tree(
        root=root,
        classes=classes,
        files=files,
        labels=np.array(labels, np.int64),
        lots=np.array([draw_lot(seed, file) for file in files], np.uint64),
        bad=bad,
        parts=np.array(parts, np.int64) if in_parts else None,
        ignored=ignored,
    )
    order, _ = tree.split(np.arange(len(files)), shares)
    return replace(
        tree,
        files=[files[row] for row in order],
        labels=tree.labels[order],
        lots=tree.lots[order],
        parts=tree.parts if tree.parts is None else tree.parts[order],
    )


def _class_folders(root: Path, bad: dict[str, str], ignored: list[str]) -> tuple[list[tuple[Path, int]], bool]:
    """The folders of classes, each with the number of its part; and whether the source has folders of parts.

    Raises Failure (BAD_DATA) if the folders may be classes as well as parts.
    """
    names = _folders(root, root, bad, ignored)
    parts = {name: part for name in names if (part := _part(name)) is not None}
    inner = {name: _within(root / name) for name in names}
    if len(names) < 2 or (len(parts) < 2 and not any(inner[name][1] for name in parts)):
        counts = Counter(itertools.chain.from_iterable(within for _, within in inner.values()))
        if len(both := [name for name, count in sorted(counts.items()) if count > 1]) > 1:
            message = f"{root}: several folders hold folders {both[0]} and {both[1]}, so either may be the classes"
            hint = "name folders of parts train, val and test, or put the images of each class into its folder"
            raise Failure(f"{message}; hint: {hint}", BAD_DATA)
        return [(root / name, 0) for name in names], False
    if other := next((name for name in names if name not in parts), None):
        message = f"{root}: {other} is neither train, val nor test, but beside {next(iter(parts))}"
        raise Failure(f"{message}; hint: give a folder that holds either parts or classes", BAD_DATA)
    places = []
    for name, part in parts.items():
        folder = inner[name][0]
        if not (classes := _folders(root, folder, bad, ignored)):
            message = f"{folder} contains no folders of classes"
            raise Failure(f"{message}; hint: put the images of each class into a folder there", BAD_DATA)
        if twin := next((each for each in parts if each < name and parts[each] == part), None):
            raise Failure(f"{root}: {twin} and {name} are the same part; hint: merge them, or remove one", BAD_DATA)
        places += [(folder / each, part) for each in classes]
    return places, True


def _part(name: str) -> int | None:
    """The part that a folder's name tells; None if it tells none, or several."""
    found = {PART_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in PART_WORDS}
    return found.pop() if len(found) == 1 else None


def _within(folder: Path) -> tuple[Path, set[str]]:
    """The folder, or the last one of a chain of only folders in it; and the names of the folders there, if it holds no
    images itself."""

    def inside(place: Path) -> set[str]:
        entries = visible(place, [])
        if any(entry.name.lower().endswith(SUFFIXES) for entry in entries):
            return set()
        return {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}

    names = inside(folder)
    while len(names) == 1 and (deeper := inside(only := folder / next(iter(names)))):
        folder, names = only, deeper
    return folder, names


def _folders(root: Path, folder: Path, bad: dict[str, str], ignored: list[str]) -> list[str]:
    """Names of the folders in a folder. Links to folders are bad samples, since they could lead anywhere."""
    folders = [entry for entry in visible(folder, ignored) if entry.is_dir()]
    if wrong := next((e.name for e in folders if CONTROL.search(e.name)), None):
        raise Failure(f"{folder}: the folder {wrong!r} has a control character in its name; hint: rename it", BAD_DATA)
    bad |= {os.path.relpath(e.path, root): "a link to a folder" for e in folders if e.is_symlink()}
    return [e.name for e in folders if not e.is_symlink()]


def visible(folder: Path, ignored: list[str]) -> list[os.DirEntry[str]]:
    """The entries of a folder, ordered by name. Adds hidden and system files to `ignored`."""
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    hidden = {entry.name for entry in ordered if entry.name.startswith(".") or entry.name.lower() in SYSTEM_FILES}
    ignored += [entry.path for entry in ordered if entry.name in hidden]
    return [entry for entry in ordered if entry.name not in hidden]


def report_ignored(ignored: Sequence[str]) -> None:
    """Prints one line on stderr if there are ignored files."""
    if ignored:
        about = f"{len(ignored)} hidden or system file{'s' if len(ignored) > 1 else ''}"
        print(
            f"hvdtrain: ignored {about}: {printable(ignored[0])}{' ...' if len(ignored) > 1 else ''}", file=sys.stderr
        )


def walk(root: Path, folder: Path, ignored: list[str]) -> Iterator[tuple[str, str]]:
    """(path relative to root, reason to reject it or '') of everything below `folder`, ordered by name, without what
    `visible` ignores."""
    inside = Path(os.path.realpath(root))
    for entry in visible(folder, ignored):
        path, reason = Path(entry.path), ""
        if entry.is_dir(follow_symlinks=False):
            yield from walk(root, path, ignored)
            continue
        if entry.is_symlink():
            if not Path(os.path.realpath(path)).is_relative_to(inside):
                reason = "a link that leaves the tree"
            elif not entry.is_file():
                reason = "a link to no file"
        elif not entry.is_file():
            reason = "not a plain file"
        yield str(path.relative_to(root)), reason


def draw_lot(seed: int, file: str) -> int:
    return int.from_bytes(hashlib.sha256(os.fsencode(f"{seed}/{file}")).digest()[:8])
