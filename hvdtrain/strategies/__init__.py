"""How the ranks' gradients, or weights, become one.

A reducer says how one vector is summed between hosts, a schedule when and what is summed (see `reducer`, `strategy`).
`--strategy` names one of either, or a schedule and the reducer that it holds, with their settings (see `spec`); `table`
knows their names.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.config import TrainConfig
from hvdtrain.strategies.flat import FLAT, lasting, of_today, refuse, translated
from hvdtrain.strategies.payload import Cost, Layout, Shape
from hvdtrain.strategies.reducer import Reducer
from hvdtrain.strategies.replicas import Exchanged, Factored, Vectors
from hvdtrain.strategies.spec import Exchange, parse
from hvdtrain.strategies.strategy import Strategy
from hvdtrain.strategies.table import REDUCERS, SCHEDULES
from hvdtrain.world import World

__all__ = [
    "FLAT",
    "REDUCERS",
    "SCHEDULES",
    "Cost",
    "Exchange",
    "Exchanged",
    "Factored",
    "Layout",
    "Reducer",
    "Strategy",
]
__all__ += ["Vectors", "chosen", "lasting", "make", "of_today", "parse", "refuse", "translated"]


def chosen(config: TrainConfig) -> Exchange:
    """What --strategy means; raises Failure (78) if that is unknown, or does not go with the other settings."""
    exchange = parse(config.strategy)
    exchange.check(config)
    return exchange


def make(config: TrainConfig, world: World, shapes: Sequence[Shape]) -> Strategy:
    """The strategy that the config asks for, in this world."""
    return chosen(config).make(config, world, shapes)
