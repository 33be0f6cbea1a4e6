"""Horovod, if it is installed: its functions carry a script's calls unless hvdtrain's TCP backend does."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from hvdtrain.horovod_api import ranks

Function = TypeVar("Function", bound=Callable[..., Any])


class Horovod:
    """Horovod's functions for one framework."""

    def __init__(self, framework: str, *modules: str) -> None:
        """`framework`: torch or tensorflow. `modules`: names of Horovod's modules, in the order of precedence."""
        self.framework = framework
        self.missing = ""
        """Why Horovod cannot be imported; empty if it can"""
        self._modules: list[Any] = []
        try:
            self._modules = [importlib.import_module(name) for name in modules]
        except ImportError as error:
            self.missing = f"horovod.{framework} cannot be imported ({error})"

    def get(self, name: str) -> Any:
        """Horovod's function or class of this name. Raises AttributeError."""
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(self.missing or f"Horovod has no {name}")

    def or_own(self, own: Function) -> Function:
        """A function that calls Horovod's of the same name, or `own` while the TCP backend carries the calls."""
        if self.missing:
            return own
        theirs = self.get(own.__name__)

        @functools.wraps(own)
        def chosen(*arguments: Any, **named: Any) -> Any:
            return (own if ranks.is_connected() else theirs)(*arguments, **named)

        return chosen  # type: ignore[return-value]

    def or_own_if_missing(self, own: Function) -> Function:
        """Horovod's function of the same name; `own` without Horovod."""
        theirs: Function = own if self.missing else self.get(own.__name__)
        return theirs
