"""The names under which runs appear in other tools."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path


def of_runs(folders: Sequence[str]) -> dict[str, str]:
    """Each run folder's name, extended by parent folders if several runs have the same name."""
    parts = {folder: Path(folder).resolve().parts[1:] for folder in folders}
    names = {}
    for folder, path in parts.items():
        for length in range(1, len(path) + 1):
            end = path[-length:]
            if collections.Counter(other[-length:] for other in parts.values())[end] == 1:
                break
        names[folder] = "/".join(path[-length:])
    return names
