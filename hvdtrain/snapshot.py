"""What a checkpoint holds of a replica and its strategy: what all ranks have in common once, and each rank's own."""

from __future__ import annotations

import numpy as np

from hvdtrain.checkpoint import Loaded
from hvdtrain.frameworks import Replica
from hvdtrain.strategies import Strategy

Arrays = dict[str, np.ndarray]


def taken(replica: Replica, strategy: Strategy) -> tuple[Arrays, Arrays]:
    """What is equal on all ranks, and what is this rank's own: running statistics (`buffer.`), the strategy's state
    (`strategy.`), and, where ranks drift apart, the optimizer's (`own.`) and, while they do, all weights (`drift.`)."""
    drift = {}
    if strategy.common is None:
        shared = replica.state()
    else:
        drift["drift.weights"] = replica.weights().copy()
        replica.set_weights(strategy.common)
        shared = {name: array.copy() for name, array in replica.state().items()}
        replica.set_weights(drift["drift.weights"])
    local = {f"buffer.{name}": array for name, array in replica.local_state().items()}
    local |= {f"strategy.{name}": array for name, array in strategy.state().items()}
    if strategy.local:
        local |= {f"own.{name}": shared.pop(name) for name in list(shared) if not name.startswith("parameter.")}
    return shared, local | drift


def restore(loaded: Loaded, replica: Replica, strategy: Strategy) -> None:
    """Both are as they were when it was taken."""
    parts: dict[str, Arrays] = {"own": {}, "buffer": {}, "strategy": {}, "drift": {}}
    for name, array in loaded.local.items():
        prefix, _, rest = name.partition(".")
        parts[prefix][rest] = array
    replica.load(loaded.shared | parts["own"])
    replica.load_local(parts["buffer"])
    if parts["drift"]:
        replica.set_weights(parts["drift"]["weights"])
    strategy.load(parts["strategy"])
