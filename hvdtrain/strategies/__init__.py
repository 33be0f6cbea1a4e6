"""How the ranks' gradients, or weights, become one.

A reducer says how one vector is summed between hosts, a schedule when and what is summed (see `reducer`, `strategy`).
`--strategy` names one of either, or a schedule and the reducer that it holds, with their settings (see `spec`); `table`
knows their names.
"""

from __future__ import annotations

from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies.base import Strategy as Strategy
from hvdtrain.strategies.cost import Cost as Cost
from hvdtrain.strategies.cost import Layout as Layout
from hvdtrain.strategies.reducers.base import Reducer as Reducer
from hvdtrain.strategies.registry import REDUCERS as REDUCERS
from hvdtrain.strategies.registry import SCHEDULES as SCHEDULES
from hvdtrain.strategies.replicas import Exchanged as Exchanged
from hvdtrain.strategies.replicas import Factored as Factored
from hvdtrain.strategies.replicas import Vectors as Vectors
from hvdtrain.strategies.spec import Exchange as Exchange
from hvdtrain.strategies.spec import canonical as canonical
from hvdtrain.strategies.spec import parse as parse
from hvdtrain.strategies.spec import resumable as resumable


def chosen(config: TrainConfig) -> Exchange:
    """What --strategy means; raises Failure (78) if that is unknown, or does not go with the other settings."""
    exchange = parse(config.strategy)
    exchange.check(config)
    return exchange
