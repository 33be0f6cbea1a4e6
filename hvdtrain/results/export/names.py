"""The names under which runs appear in other tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def of_runs(folders: Sequence[str]) -> dict[str, str]:
    """Each run folder's path below the folder that contains all of them."""
    paths = {folder: os.path.realpath(folder) for folder in folders}
    above = os.path.commonpath([Path(path).parent for path in paths.values()]) if paths else ""
    return {folder: os.path.relpath(path, above) for folder, path in paths.items()}
