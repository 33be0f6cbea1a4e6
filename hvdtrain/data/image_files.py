"""The image files that a command is given, read one by one as a model's input."""

from __future__ import annotations

import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.pixels import pixels, reason
from hvdtrain.data.tree import SUFFIXES, report_ignored, visible
from hvdtrain.system.exits import printable

Problems = list[dict[str, str]]
"""For each path that cannot be used: {"image": path, "problem": one line}"""


def list_files(paths: Sequence[Path], problems: Problems) -> list[Path]:
    """The image files at these paths; a folder is replaced by the images in it, ordered by name."""
    files: list[Path] = []
    ignored: list[str] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        try:
            entries = visible(path, ignored)
        except OSError as error:
            problems.append({"image": str(path), "problem": error.strerror or str(error)})
            continue
        inside = [Path(e.path) for e in entries if e.name.lower().endswith(SUFFIXES) and e.is_file()]
        if not inside:
            problems.append({"image": str(path), "problem": f"no images in this folder ({', '.join(SUFFIXES)})"})
        files += inside
    report_ignored(ignored)
    return files


def read_files(
    files: Sequence[Path], shape: tuple[int, int, int], problems: Problems
) -> Iterator[tuple[NDArray[np.uint8], str]]:
    """Yields the readable images, uint8 of this `shape` (height, width, channels), with their paths, and adds the
    others to `problems`."""
    for path in files:
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe may never end
                raise ValueError("not a plain file")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about metadata, and about bombs, which `pixels` rejects
                image = pixels(str(path), shape)
        except Exception as error:  # Pillow raises almost any exception for a damaged file
            problems.append({"image": str(path), "problem": reason(error, str(path))})
            continue
        yield image, str(path)


def report(problems: Problems) -> None:
    """Prints one line per problem on stderr."""
    for problem in problems:
        print(f"hvdtrain: {printable(problem['image'])}: {problem['problem']}", file=sys.stderr)
