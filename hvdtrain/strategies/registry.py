"""The names of all strategies and reducers: a new one is its own file and one line here.

Or none: a package that is installed beside this one adds its own as an entry point of the group `hvdtrain.strategies`
(`NAME = package.module:Class`), a subclass of `strategy.Strategy` or `reducer.Reducer`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from hvdtrain.strategies.algorithms.allreduce import AllReduce
from hvdtrain.strategies.algorithms.delayed import Delayed
from hvdtrain.strategies.algorithms.factors import Factors
from hvdtrain.strategies.algorithms.hybrid import Hybrid
from hvdtrain.strategies.algorithms.local_sgd import LocalSGD
from hvdtrain.strategies.algorithms.native import Native
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.reducers.cast import BF16, FP16
from hvdtrain.strategies.reducers.exact import Hierarchical
from hvdtrain.strategies.reducers.powersgd import PowerSGD
from hvdtrain.strategies.reducers.quantize import Int4, Int8
from hvdtrain.strategies.reducers.topk import TopK
from hvdtrain.strategies.studies.async_ps import AsyncPS
from hvdtrain.strategies.studies.central import Central
from hvdtrain.strategies.studies.onebit import OneBit
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

SCHEDULES: dict[str, type[Strategy]] = {
    "allreduce": AllReduce,
    "native": Native,
    "local-sgd": LocalSGD,
    "delayed": Delayed,
    "async-ps": AsyncPS,
    "hybrid": Hybrid,
    "factors": Factors,
    "central": Central,
}
REDUCERS: dict[str, type[Reducer]] = {
    "hierarchical": Hierarchical,
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int4": Int4,
    "powersgd": PowerSGD,
    "topk": TopK,
    "onebit": OneBit,
}
DEFAULT_REDUCER = "hierarchical"
"""Of a schedule that holds one, if none stands behind the plus"""
RUNGS: tuple[tuple[str, str], ...] = (
    ("hierarchical", "four hosts at 1 Gbit/s took 0.27 s a step with it, 0.38 with horovodrun --gloo"),
    (
        "powersgd:rank=4",
        "four hosts at 100 Mbit/s took 0.21 s a step with it, 0.94 with exact sums; accuracy 0.979, exact 0.983",
    ),
    (
        "local-sgd:every=4,staleness=2+powersgd:rank=12,bits=4",
        "four hosts at 10 Mbit/s took 72 s to 0.87 accuracy with it, one host 240",
    ),
)
"""What `advice` advises, from what changes least to what sends least, and what was measured of it"""
UNEQUAL = ("hybrid", "hosts of 0.45 and 0.15 core took 0.72 s a step with it, 1.42 with even batches")
"""What it advises where some ranks are slower than others"""
GROUP = "hvdtrain.strategies"


@functools.cache
def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of other packages, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def names(kind: type[Any]) -> list[str]:
    """Of all strategies or all reducers."""
    return [name for name in [*SCHEDULES, *REDUCERS, *plugins()] if issubclass(found(name), kind)]


@functools.cache
def found(name: str) -> type[Any]:
    """The class of a name. Raises KeyError for one that nobody knows, Failure (78) for a plug-in that is none."""
    known: dict[str, type[Any]] = {**SCHEDULES, **REDUCERS}
    if name in known:
        return known[name]
    point = plugins()[name]
    try:
        made = point.load()
    except Exception as error:
        raise Failure(f"strategy {name}: {point.value} cannot be loaded: {error}", exits.BAD_CONFIG) from error
    if not (isinstance(made, type) and issubclass(made, Strategy | Reducer)):
        raise Failure(f"strategy {name}: {point.value} is neither a Strategy nor a Reducer", exits.BAD_CONFIG)
    return made
