"""Finds run folders, which are those with a manifest.json, at or below the roots. Follows each symbolic link once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.results import RESULTS
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure, printable


@dataclasses.dataclass(frozen=True)
class Problem:
    """A defect of a file that keeps values out of the tables, or that the user should know about."""

    path: str
    line: int | None
    what: str

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return printable(f"{where}: {self.what}")


def find(roots: Sequence[Path], problems: list[Problem]) -> Iterator[Path]:
    """Run folders under each root, sorted by name, without duplicates. Raises Failure (2) if a root is not a folder."""
    seen: set[tuple[int, int]] = set()
    for root in roots:
        if not os.path.isdir(root):  # noqa: PTH112 (Path.is_dir raises PermissionError)
            what = "is not a folder" if exists(root) else "no such folder"
            raise Failure(f"{root}: {what}; hint: name a run folder, or a folder that contains runs", exits.USAGE)
        yield from _below(root, seen, problems)


def _below(root: Path, seen: set[tuple[int, int]], problems: list[Problem]) -> Iterator[Path]:
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            about = folder.stat()
            if (about.st_dev, about.st_ino) in seen:  # a loop of links, or a root inside another root
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(folder) as entries:
                names = {entry.name: _is_folder(entry) for entry in entries}
        except OSError as error:
            problems.append(Problem(str(folder), None, f"cannot be read: {error.strerror}"))
            continue
        if "manifest.json" in names:
            try:
                str(folder).encode()
                yield folder
            except UnicodeEncodeError:
                problems.append(Problem(str(folder), None, "ignored, because its name is not UTF-8; hint: rename it"))
            continue
        if "experiment.json" in names or exists(folder / "metrics" / "rank0000.jsonl"):
            what = "no manifest.json: the run never started, or its folder is incomplete"
            problems.append(Problem(str(folder), None, what))
        inner = (name for name, is_folder in names.items() if is_folder and not name.startswith("."))
        paths = [folder / name for name in sorted(inner, reverse=True)]
        waiting[:0] = filter(Path.is_symlink, paths)  # visited last, so that a run is found under its own name
        waiting += [path for path in paths if not path.is_symlink()]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def exists(path: Path) -> bool:
    """Whether the path exists, even as a broken link; False if its parent folder cannot be read."""
    return os.path.lexists(path)


def find_run(run: Path, roots: Sequence[Path] = (RESULTS,)) -> Path:
    """The path if it exists, or else the run below the roots with this name, or with a name that starts with it.

    Raises Failure (2) if there is no such run, or more than one.
    """
    if exists(run) or run in roots:
        return run
    below = list(find([root for root in roots if exists(root)], []))
    fitting = [path for path in below if path.name == str(run)]
    fitting = fitting or [path for path in below if path.name.startswith(str(run))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        shown = f"{', '.join(map(str, fitting[:3]))}{', ...' if len(fitting) > 3 else ''}"
        raise Failure(f"{run}: ambiguous, {len(fitting)} runs match ({shown}); hint: type more of it", exits.USAGE)
    hint = near(str(run), [path.name for path in below]) or "; hint: name a run folder, or a folder of runs"
    raise Failure(f"{run}: no such folder, and no such run in {', '.join(map(str, roots))}{hint}", exits.USAGE)
