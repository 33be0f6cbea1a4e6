"""Broadcasts of parameters and of an optimizer's state."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hvdtrain.horovod_api.functions import broadcast_object
from hvdtrain.torch import collectives
from hvdtrain.torch.collectives import FRONT


@FRONT.or_own
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcast a dict, a list of tensors, or a list of (name, tensor). Raises ValueError for others."""
    if isinstance(params, Mapping):
        pairs: Iterable[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for handle in [collectives.broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]:
        collectives.synchronize(handle)


@FRONT.or_own
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Broadcast an optimizer's state and options. If it has no state, a step with zero gradients creates it.

    `model` identifies sparse embeddings. Raises ValueError for LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state_dict()["state"]:
        _create_state(optimizer, model)
    if not (state := optimizer.state_dict())["state"]:
        return
    tensors: list[tuple[str | None, Tensor]] = []
    others: dict[str, Any] = {}
    places: dict[str, tuple[dict[Any, Any], Any]] = {}
    counts: collections.Counter[str] = collections.Counter()
    for index, group in enumerate(state["param_groups"]):
        for option, value in group.items():
            if option != "params":
                others[f"{option}.{index}"] = value
                places[f"{option}.{index}"] = optimizer.param_groups[index], option
        for entry in (state["state"][number] for number in group["params"] if number in state["state"]):
            for name, value in entry.items():
                counts[name] += 1
                key = f"{name}.{counts[name]}"
                if torch.is_tensor(value):
                    tensors.append((key, value))
                else:
                    others[key], places[key] = value, (entry, name)
    broadcast_parameters(tensors, root_rank)
    for key, value in broadcast_object(others, root_rank, name="optimizer").items():
        place, name = places[key]
        place[name] = value


def _create_state(optimizer: torch.optim.Optimizer, model: Any) -> None:
    sparse = {
        id(parameter)
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding) and module.sparse
        for parameter in module.parameters()
    }
    sparse_only = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter.requires_grad:
            zeros = torch.zeros_like(parameter)
            is_sparse = sparse_only or (isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse)
            parameter.grad = zeros.to_sparse() if is_sparse else zeros
    with getattr(optimizer, "skip_synchronize", contextlib.nullcontext)():  # ranks that have a state make no step
        optimizer.step()
