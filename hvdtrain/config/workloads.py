"""The names of all workloads: a new one is its own file and one word here.

Or none: a package that is installed beside this one names its module as an entry point of the group
`hvdtrain.workloads` (`NAME = package.module`). What the module has: see `workload`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

OURS = {name: f"hvdtrain.{name}" for name in ("resnet", "captioning", "solar", "tabular")}
DEFAULT = "resnet"
"""Of a sweep that names none"""
GROUP = "hvdtrain.workloads"


@functools.cache
def known() -> dict[str, str]:
    """Name -> module. Raises Failure (78) if two modules have one name."""
    found = dict(OURS)
    for point in importlib.metadata.entry_points(group=GROUP):
        if found.setdefault(point.name, point.module) != point.module:
            raise Failure(
                f"two workloads are named {point.name}: {found[point.name]} and {point.module}. Rename an entry point "
                f"of the group {GROUP}, or uninstall its package",
                exits.BAD_CONFIG,
            )
    return found


def module(name: str) -> Any:
    """The imported module of a known workload. Raises Failure (78) for one that cannot be run."""
    path = known()[name]
    try:
        found = importlib.import_module(path)
    except Exception as error:
        raise Failure(f"workload {name}: {path} cannot be imported: {error}", exits.BAD_CONFIG) from error
    if not callable(getattr(found, "main", None)):
        raise Failure(f"workload {name}: {path} has no main(stop)", exits.BAD_CONFIG)
    return found


def program(name: str, argv: Sequence[str]) -> list[str]:
    """The words behind `python` that start a workload; one that is not installed by the file in its `argv`."""
    return ["-m", known()[name]] if name in known() else list(argv[:1])
