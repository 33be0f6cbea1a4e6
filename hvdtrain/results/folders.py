"""Finds run folders: every folder with a manifest.json at or below the roots. Symbolic links are followed once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure, printable


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is wrong with a file: it keeps figures out of the tables, or a user should know it."""

    path: str
    line: int | None
    what: str

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return printable(f"{where}: {self.what}")


def find(roots: Sequence[Path], problems: list[Problem]) -> Iterator[Path]:
    """Run folders under each root, by name; none twice. Raises Failure (2) for a root that is no folder."""
    seen: set[tuple[int, int]] = set()
    for root in roots:
        if not os.path.isdir(root):  # noqa: PTH112 (Path's raises where it may not look)
            what = "is not a folder" if there(root) else "no such folder"
            raise Failure(f"{root}: {what}; give a run's folder, or a folder of runs", exits.USAGE)
        yield from _below(root, seen, problems)


def _below(root: Path, seen: set[tuple[int, int]], problems: list[Problem]) -> Iterator[Path]:
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            about = folder.stat()
            if (about.st_dev, about.st_ino) in seen:  # a loop of links, or a root inside another
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(folder) as entries:
                names = {entry.name: _is_folder(entry) for entry in entries}
        except OSError as error:
            problems.append(Problem(str(folder), None, f"not read: {error.strerror}"))
            continue
        if "manifest.json" in names:
            try:
                str(folder).encode()
                yield folder
            except UnicodeEncodeError:
                problems.append(Problem(str(folder), None, "its name is not UTF-8: rename it to have it counted"))
            continue
        if "point.json" in names or names.get("metrics"):
            problems.append(Problem(str(folder), None, "no manifest.json: the run never began, or its folder is torn"))
            continue
        inner = (name for name, is_folder in names.items() if is_folder and not name.startswith("."))
        paths = [folder / name for name in sorted(inner, reverse=True)]
        waiting[:0] = filter(Path.is_symlink, paths)  # last of all: a run goes by its own name and not by a link's
        waiting += [path for path in paths if not path.is_symlink()]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def there(path: Path) -> bool:
    """Whether something lies at the path, if only a broken link; no where its folder may not be read."""
    return os.path.lexists(path)
