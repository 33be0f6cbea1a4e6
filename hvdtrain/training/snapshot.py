"""The state of a replica and its strategy in a checkpoint: arrays that all ranks share, and arrays of each rank."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load

from hvdtrain.comm.arrays import to_host
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.frameworks import Replica
from hvdtrain.records.arrays_file import pieces
from hvdtrain.strategies import Strategy
from hvdtrain.strategies.reducers.bfloat16 import from_bf16, to_bf16
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure
from hvdtrain.training.checkpoint import Loaded

Arrays = dict[str, np.ndarray]
COMMON = ("parameter.", "average.")
"""How the names of arrays begin that never differ between ranks that are in sync"""


def taken(replica: Replica, strategy: Strategy) -> tuple[Arrays, Arrays]:
    """Return the arrays that are equal on all ranks, and this rank's local arrays.

    The local ones are running statistics (`buffer.`), the strategy's state (`strategy.`), optimizer state that differs
    between ranks (`own.`), and all weights while they differ between ranks (`drift.`).
    """
    drift = {}
    common = strategy.common_weights if strategy.capabilities.saves_anytime else None
    if common is None:
        shared = replica.state()
    else:
        drift["drift.weights"] = to_host(replica.weights()).copy()
        replica.set_weights(common)
        shared = {name: array.copy() for name, array in replica.state().items()}
        replica.set_weights(drift["drift.weights"])
    local = {f"buffer.{name}": array for name, array in replica.local_state().items()}
    local |= {f"strategy.{name}": array for name, array in strategy.state().items()}
    if strategy.capabilities.local_updates or strategy.capabilities.own_optimizer_state:
        local |= {f"own.{name}": shared.pop(name) for name in list(shared) if not name.startswith(COMMON)}
    return shared, local | drift


def for_newcomers(replica: Replica, strategy: Strategy) -> Arrays:
    """Return the arrays that a new rank needs, from a rank that waits for no exchange: see `welcome`.

    The optimizer's state is rounded to bfloat16, so that less is sent. Weights are exact.
    """
    own, common = to_host(replica.weights()).copy(), strategy.common_weights
    if common is not None:
        replica.set_weights(common)
    state = {
        f"state.{name}": to_bf16(np.ascontiguousarray(array)) if _is_rounded(name, array) else array.copy()
        for name, array in replica.state().items()
    }
    replica.set_weights(own)
    state |= {f"buffer.{name}": array for name, array in replica.local_state().items()}
    return state | {f"strategy.{name}": array for name, array in strategy.state(newcomer=True).items()}


def welcome(arrays: Arrays, replica: Replica) -> Arrays:
    """Load what `for_newcomers` returned on another rank with the same model. Return the strategy's part of it."""
    parts: dict[str, Arrays] = {"state": {}, "buffer": {}, "strategy": {}}
    for name, array in arrays.items():
        prefix, _, rest = name.partition(".")
        parts[prefix][rest] = array
    state = parts["state"].items()
    replica.load({name: from_bf16(array) if array.dtype == np.uint16 else array for name, array in state})
    replica.load_local(parts["buffer"])
    return parts["strategy"]


def round_optimizer(replica: Replica) -> None:
    """Round the optimizer's state as `for_newcomers` does, so that all ranks have the same. Idempotent."""
    state = {name: np.ascontiguousarray(array) for name, array in replica.state().items()}
    replica.load(
        {name: from_bf16(to_bf16(array)) if _is_rounded(name, array) else array for name, array in state.items()}
    )


def _is_rounded(name: str, array: np.ndarray) -> bool:
    return not name.startswith(COMMON) and array.dtype == np.float32 and array.size > 1


def whole(replica: Replica, world: Communicator, *, gives: bool) -> Arrays:
    """Return parameters and other arrays of the model, by name, from all ranks with `gives`. Collective."""
    state = replica.state().items()
    arrays = {name.removeprefix("parameter."): array for name, array in state if name.startswith("parameter.")}
    messages = world.gather_bytes(b"".join(pieces(arrays | replica.local_state())) if gives else b"")
    return {name: array for message in messages if message for name, array in load(message).items()}


def restore(loaded: Loaded, replica: Replica, strategy: Strategy) -> None:
    """Load a checkpoint into a replica and its strategy. Raises Failure (65) for arrays that do not fit the replica."""
    parts: dict[str, Arrays] = {"own": {}, "buffer": {}, "strategy": {}, "drift": {}}
    local = resharded(loaded, strategy) if loaded.others else loaded.local
    for name, array in local.items():
        prefix, _, rest = name.partition(".")
        if prefix not in parts:
            raise Failure(f"checkpoint of step {loaded.step}: unknown array {name!r:.80}", BAD_DATA)
        parts[prefix][rest] = array
    state, saved = replica.state(), loaded.shared | parts["own"]
    # State of the optimizer or of loss scaling may be missing: PyTorch keeps none without momentum.
    needed = {name: array for name, array in state.items() if name in saved or name.startswith("parameter.")}
    _check_fit(loaded.step, saved, needed)
    _check_fit(loaded.step, parts["buffer"], replica.local_state())
    replica.load(saved)
    replica.load_local(parts["buffer"])
    if parts["drift"]:
        replica.set_weights(parts["drift"]["weights"])
    strategy.load(parts["strategy"])


def restore_model(loaded: Loaded, replica: Replica) -> None:
    """Load only the weights and running statistics of a checkpoint, which other ranks may have saved. Raises Failure
    (65) for arrays that do not fit."""
    parameters = {name: array for name, array in replica.state().items() if name.startswith("parameter.")}
    _check_fit(loaded.step, loaded.shared, parameters)
    replica.load(loaded.shared)
    own = {name: array for name, array in loaded.local.items() if name.startswith("buffer.")}
    kept = {name.removeprefix("buffer."): array for name, array in (own or _mean_statistics(loaded)).items()}
    _check_fit(loaded.step, kept, replica.local_state())
    replica.load_local(kept)


def resharded(loaded: Loaded, strategy: Strategy) -> Arrays:
    """Return this rank's local arrays from a checkpoint of other ranks, or of the same number on other hosts.

    Running statistics become the mean over the earlier ranks, which evaluation uses anyway. The strategy reshards its
    state. Raises Failure (78) for state that belongs to other stages.
    """
    states = [
        {name.removeprefix("strategy."): array for name, array in each.items() if name.startswith("strategy.")}
        for each in loaded.others
    ]
    if (loaded.recut and any(states)) or (strategy.capabilities.local_updates and not loaded.local):
        raise Failure(
            f"checkpoint of step {loaded.step}: the state of its strategy belongs to other stages; hint: use the same "
            "--stages and --cut-at",
            BAD_CONFIG,
        )
    own = {name: array for name, array in loaded.local.items() if not name.startswith("strategy.")}
    own = own or _mean_statistics(loaded)
    return own | {f"strategy.{name}": array for name, array in strategy.reshard_state(states).items()}


def _mean_statistics(loaded: Loaded) -> Arrays:
    """Return the mean running statistics over the ranks that saved a checkpoint."""
    buffers = {name: array for each in loaded.others for name, array in each.items() if name.startswith("buffer.")}
    return {
        name: np.mean([each[name] for each in loaded.others if name in each], axis=0, dtype=array.dtype)
        for name, array in buffers.items()
    }


def _check_fit(step: int, saved: Arrays, needed: Arrays) -> None:
    """Raise Failure (65) if an array is missing, or has another shape or dtype than the replica's.

    Optimizer state must have its parameter's shape, because frameworks would broadcast other shapes.
    """
    for name, array in needed.items():
        if name not in saved:
            raise Failure(f"checkpoint of step {step}: {name} is missing", BAD_DATA)
        if (saved[name].shape, saved[name].dtype) != (array.shape, array.dtype):
            difference = f"{saved[name].dtype} {saved[name].shape}, not {array.dtype} {array.shape}"
            raise Failure(f"checkpoint of step {step}: {name} is {difference}", BAD_DATA)
    for name, array in saved.items():
        parameter = needed.get(f"parameter.{name.partition('.')[2]}")
        if parameter is not None and array.size > 1 and array.shape != parameter.shape:
            raise Failure(f"checkpoint of step {step}: {name} is {array.shape}, not {parameter.shape}", BAD_DATA)
