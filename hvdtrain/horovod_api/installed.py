"""Chooses between Horovod's functions and hvdtrain's own, which have the same names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hvdtrain.system import install


def either(horovod: Sequence[str], own: Sequence[str]) -> tuple[ModuleType, dict[str, Any], str]:
    """Import Horovod's modules or, if that fails, ours.

    Returns the first module, the public names of all (the last module takes precedence), and why Horovod's modules
    cannot be imported, which is empty if they can. Raises ModuleNotFoundError without the framework.
    """
    missing = ""
    try:
        modules = [importlib.import_module(name) for name in horovod]
    except ImportError as error:
        missing = f"{horovod[0].rpartition('.')[0]} cannot be imported ({error})"
        try:
            modules = [importlib.import_module(name) for name in own]
        except ModuleNotFoundError as absent:
            hint = install.package(absent.name or "")
            raise ModuleNotFoundError(f"{absent}; hint: {hint}", name=absent.name) from None
    names = {name: value for module in modules for name, value in vars(module).items() if not name.startswith("__")}
    return modules[0], names, missing
