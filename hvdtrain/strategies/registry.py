"""The names of all strategies and reducers.

A new one is its own file and one line here. An installed package can add more through entry points of the group
`hvdtrain.strategies` (`NAME = package.module:Class`), whose class is a `Strategy` or a `Reducer`. The strategies in
`studies/` are registered in the same way.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from hvdtrain.strategies.algorithms.allreduce import AllReduce
from hvdtrain.strategies.algorithms.local_sgd import LocalSGD
from hvdtrain.strategies.algorithms.native import Native
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.cast import BF16
from hvdtrain.strategies.reducers.exact import Hierarchical
from hvdtrain.strategies.reducers.powersgd import PowerSGD
from hvdtrain.strategies.reducers.quantize import Int2, Int4, Int8
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

ALGORITHMS: dict[str, type[Strategy]] = {"allreduce": AllReduce, "native": Native, "local-sgd": LocalSGD}
REDUCERS: dict[str, type[Reducer]] = {
    "hierarchical": Hierarchical,
    "bf16": BF16,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "powersgd": PowerSGD,
}
DEFAULT_REDUCER = "hierarchical"
"""Reducer of an algorithm without a plus"""
GROUP = "hvdtrain.strategies"


@functools.cache
def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of the group, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def names(kind: type[Any]) -> list[str]:
    """Return the names of all strategies or of all reducers."""
    return [name for name in [*ALGORITHMS, *REDUCERS, *plugins()] if issubclass(lookup(name), kind)]


@functools.cache
def lookup(name: str) -> type[Any]:
    """Return the class of a name. Raises KeyError for an unknown name, Failure (78) for a plug-in that is invalid."""
    known: dict[str, type[Any]] = {**ALGORITHMS, **REDUCERS}
    if name in known:
        return known[name]
    point = plugins()[name]
    try:
        loaded = point.load()
    except Exception as error:
        raise Failure(f"strategy {name}: {point.value} cannot be loaded: {error}", exits.BAD_CONFIG) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Strategy | Reducer)):
        raise Failure(f"strategy {name}: {point.value} is neither a Strategy nor a Reducer", exits.BAD_CONFIG)
    return loaded
