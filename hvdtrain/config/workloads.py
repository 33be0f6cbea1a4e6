"""The names of all workloads.

A new one is its own file and one word here. An installed package can add more through entry points of the group
`hvdtrain.workloads` (`NAME = package.module`). The module has a function main(stop): see `training.workload`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

BUILT_IN = {name: f"hvdtrain.{name}" for name in ("resnet", "captioning", "solar", "tabular")}
DEFAULT = "resnet"
"""Workload of a sweep that names none"""
GROUP = "hvdtrain.workloads"


@functools.cache
def known() -> dict[str, str]:
    """Return the module of each name. Raises Failure (78) if two modules have the same name."""
    modules = dict(BUILT_IN)
    for point in importlib.metadata.entry_points(group=GROUP):
        if modules.setdefault(point.name, point.module) != point.module:
            raise Failure(
                f"two workloads are named {point.name}: {modules[point.name]} and {point.module}; hint: rename an "
                f"entry point of the group {GROUP}, or uninstall its package",
                exits.BAD_CONFIG,
            )
    return modules


def module(name: str) -> Any:
    """Import the module of a known workload. Raises Failure (78) if it cannot be run."""
    path = known()[name]
    try:
        imported = importlib.import_module(path)
    except Exception as error:
        raise Failure(f"workload {name}: {path} cannot be imported: {error}", exits.BAD_CONFIG) from error
    if not callable(getattr(imported, "main", None)):
        raise Failure(f"workload {name}: {path} has no main(stop)", exits.BAD_CONFIG)
    return imported


def program(name: str, argv: Sequence[str]) -> list[str]:
    """Return the arguments of `python` that start a workload; for a script, the file in its `argv`."""
    return ["-m", known()[name]] if name in known() else list(argv[:1])
