"""Strategies: how the gradients or weights of all ranks are combined.

A reducer defines how one vector is summed between hosts (`reducers.base`). An algorithm defines what is exchanged and
when (`base`). `--strategy` names a reducer, or an algorithm and its reducer, with their settings (`spec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.options import TrainConfig
from hvdtrain.strategies import automatic, registry
from hvdtrain.strategies import presets as presets
from hvdtrain.strategies.base import Capabilities as Capabilities
from hvdtrain.strategies.base import Strategy as Strategy
from hvdtrain.strategies.cost import Cost as Cost
from hvdtrain.strategies.cost import Layout as Layout
from hvdtrain.strategies.cost import Phase as Phase
from hvdtrain.strategies.reducers.base import Reducer as Reducer
from hvdtrain.strategies.registry import ALGORITHMS as ALGORITHMS
from hvdtrain.strategies.registry import REDUCERS as REDUCERS
from hvdtrain.strategies.replicas import CHOOSE as CHOOSE
from hvdtrain.strategies.replicas import STOP as STOP
from hvdtrain.strategies.replicas import Exchanged as Exchanged
from hvdtrain.strategies.replicas import Vectors as Vectors
from hvdtrain.strategies.spec import Spec as Spec
from hvdtrain.strategies.spec import canonical as canonical
from hvdtrain.strategies.spec import parse as parse


def resolve(config: TrainConfig, links: Sequence[Mapping[str, Any]] = ()) -> Spec:
    """Return the exchange that --strategy names; for `auto`, the one that serves until the model can be profiled.

    `links`: the result of `RankGroup.measure_links`, empty before the ranks have found each other. `plan.choice` uses
    them for `auto`. Raises Failure (78) if the strategy is unknown or cannot be combined with the other options.
    """
    exchange = parse(registry.DEFAULT_REDUCER if automatic.rule(config.strategy) else config.strategy, config.optimizer)
    exchange.check(config)
    return exchange
