"""What a checkpoint holds of a replica and its strategy: what all ranks have in common once, and each rank's own."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.frameworks import Replica
from hvdtrain.records.arrays_file import pieces
from hvdtrain.strategies import Strategy
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure
from hvdtrain.training.checkpoint import Loaded

Arrays = dict[str, np.ndarray]


def taken(replica: Replica, strategy: Strategy) -> tuple[Arrays, Arrays]:
    """What is equal on all ranks, and what is this rank's own: running statistics (`buffer.`), the strategy's state
    (`strategy.`), the optimizer's (`own.`) where it differs, and, while ranks drift apart, all weights (`drift.`)."""
    drift = {}
    if strategy.shared_weights is None:
        shared = replica.state()
    else:
        drift["drift.weights"] = replica.weights().copy()
        replica.set_weights(strategy.shared_weights)
        shared = {name: array.copy() for name, array in replica.state().items()}
        replica.set_weights(drift["drift.weights"])
    local = {f"buffer.{name}": array for name, array in replica.local_state().items()}
    local |= {f"strategy.{name}": array for name, array in strategy.state().items()}
    if strategy.capabilities.local_updates or strategy.capabilities.own_optimizer_state:
        local |= {f"own.{name}": shared.pop(name) for name in list(shared) if not name.startswith("parameter.")}
    return shared, local | drift


def whole(replica: Replica, world: Communicator, *, gives: bool) -> Arrays:
    """Parameters and what else the model has, by name, of the replicas on all ranks that give theirs. Collective."""
    state, own = replica.state().items(), replica.local_state()
    mine = {name.removeprefix("parameter."): array for name, array in state if name.startswith("parameter.")} | own
    every = world.gather_bytes(b"".join(pieces(mine)) if gives else b"")
    return {name: array for each in every if each for name, array in load(each).items()}


def restore(loaded: Loaded, replica: Replica, strategy: Strategy) -> None:
    """Both are as they were when it was taken. Raises Failure (65) for arrays that are not this replica's."""
    parts: dict[str, Arrays] = {"own": {}, "buffer": {}, "strategy": {}, "drift": {}}
    local = resharded(loaded, strategy) if loaded.others else loaded.local
    for name, array in local.items():
        prefix, _, rest = name.partition(".")
        if prefix not in parts:
            raise Failure(f"checkpoint of step {loaded.step}: no rank has an array {name!r:.80}", BAD_DATA)
        parts[prefix][rest] = array
    state, found = replica.state(), loaded.shared | parts["own"]
    # An optimizer's or loss scaling's may be lacking: PyTorch keeps nothing without momentum, say.
    wanted = {name: array for name, array in state.items() if name in found or name.startswith("parameter.")}
    _fit(loaded.step, found, wanted)
    _fit(loaded.step, parts["buffer"], replica.local_state())
    replica.load(found)
    replica.load_local(parts["buffer"])
    if parts["drift"]:
        replica.set_weights(parts["drift"]["weights"])
    strategy.load(parts["strategy"])


def resharded(loaded: Loaded, strategy: Strategy) -> Arrays:
    """This rank's own part of what another number of ranks saved, or as many on other hosts: running statistics are
    the ranks' mean, which is what evaluation uses; what becomes of its state the strategy says. Raises Failure (78) for
    state that belongs to other stages, or to ranks that had others."""
    states = [
        {name.removeprefix("strategy."): array for name, array in each.items() if name.startswith("strategy.")}
        for each in loaded.others
    ]
    if (loaded.recut and any(states)) or (strategy.capabilities.local_updates and not loaded.local):
        raise Failure(
            f"checkpoint of step {loaded.step}: the state of its exchange belongs to the stages that its ranks had; "
            "give the same --stages, --cut-at and --stage-across",
            BAD_CONFIG,
        )
    buffers = {name: array for each in loaded.others for name, array in each.items() if name.startswith("buffer.")}
    own = {name: array for name, array in loaded.local.items() if not name.startswith("strategy.")} or {
        name: np.mean([each[name] for each in loaded.others if name in each], axis=0, dtype=array.dtype)
        for name, array in buffers.items()
    }
    return own | {f"strategy.{name}": array for name, array in strategy.reshard_state(states).items()}


def _fit(step: int, found: Arrays, known: Arrays) -> None:
    """Raises Failure unless what the replica has is there, each array of its shape and type, and an optimizer's of its
    parameter's shape: frameworks would stretch others to fit."""
    for name, mine in known.items():
        if name not in found:
            raise Failure(f"checkpoint of step {step}: {name} is not in it", BAD_DATA)
        theirs = found[name]
        if (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
            told = f"{theirs.dtype} {theirs.shape}, not {mine.dtype} {mine.shape}"
            raise Failure(f"checkpoint of step {step}: {name} is {told}", BAD_DATA)
    for name, theirs in found.items():
        parameter = known.get(f"parameter.{name.partition('.')[2]}")
        if parameter is not None and theirs.size > 1 and theirs.shape != parameter.shape:
            raise Failure(f"checkpoint of step {step}: {name} is {theirs.shape}, not {parameter.shape}", BAD_DATA)
