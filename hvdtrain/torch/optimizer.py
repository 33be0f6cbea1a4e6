"""`DistributedOptimizer`: Horovod's optimizer, or one that exchanges by a strategy.

With a strategy, gradients are exchanged during backward (see `overlap`) or in `step`, which then calls the wrapped
optimizer's step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.arguments import conflict
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.torch import api as horovod
from hvdtrain.torch.api import Average, Compression, global_process_set
from hvdtrain.torch.automatic import Measuring
from hvdtrain.torch.exchanging import Exchanging, unsupported
from hvdtrain.torch.recorded import recorded
from hvdtrain.torch.vectors import by_name, derived, evaluated, step_evaluated
from hvdtrain.training import profiled


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    strategy: str | None = None,
) -> Any:
    """Return an optimizer of the same class that exchanges gradients between ranks. Collective.

    The arguments are Horovod's, and `strategy`, a --strategy string. It defaults to HVDTRAIN_STRATEGY or, if that is
    not set, to Horovod's own exchange. `auto` times some steps and then chooses; see
    `automatic.Measuring`. With a strategy, `groups` and `backward_passes_per_step` have no effect:
    a step exchanges all gradients that have been accumulated.

    Raises Failure for a strategy that scripts cannot use, and ValueError for arguments that cannot be combined with it.
    """
    if isinstance(optimizer, Exchanging):
        raise ValueError("the optimizer is distributed already; hint: wrap a new one of torch.optim")
    exchange, by_horovod = job.exchange(strategy), True
    rule = job.rule(strategy)
    measures = rule is not None or profiled.observer() is not None
    if exchange is not None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        has_doubles = any(each.dtype == torch.float64 for each in parameters)
        all_ranks = process_set == global_process_set
        problem = conflict(exchange, op=op, compressed=compression is not Compression.none, all_ranks=all_ranks)
        if gradient_predivide_factor != 1.0 and op != Average:
            problem = problem or "gradient_predivide_factor requires op=hvd.Average"
        # Horovod's calls give the same sums as the default reducer, and also support these arguments.
        by_horovod = str(exchange) == DEFAULT_REDUCER and bool(problem or has_doubles) and not measures
        if rule is not None and has_doubles:
            problem = problem or f"auto exchanges float64 as float32; hint: use {DEFAULT_REDUCER}, which keeps float64"
        if problem := unsupported(optimizer, parameters, backward_passes_per_step) or ("" if by_horovod else problem):
            name = exchange if rule is None else "auto"
            raise ValueError(f"DistributedOptimizer, strategy {name}: {problem}")
        if has_doubles and not by_horovod:
            warnings.warn(f"{exchange} exchanges float64 as float32; {DEFAULT_REDUCER} keeps float64", stacklevel=2)
    if exchange is None or by_horovod:
        own = horovod.DistributedOptimizer(
            optimizer,
            named_parameters=named_parameters,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        step = type(own).step

        def step_after_closure(self: Any, closure: Any = None) -> Any:
            """Horovod's step exchanges first, and then uses this rank's own gradients of the closure."""
            losses = evaluated(closure)
            step_evaluated(lambda closure=None: step(self, closure), losses, self.param_groups)
            return next(iter(losses), None)

        type(own).step, type(own).synchronize_weights = step_after_closure, lambda self: None
        return recorded(own) if process_set == global_process_set else own
    named = by_name(optimizer, named_parameters)
    if not named:
        raise ValueError(f"DistributedOptimizer, strategy {exchange}: no parameter requires a gradient")
    new: Exchanging = derived(optimizer, Measuring if measures else Exchanging)
    if new.__dict__.pop("_state_of_broadcast", None) is new.state:
        new.state.clear()  # Horovod's broadcast made a step to create this state; it is not part of the training
    new._connect(exchange, named, average=op == Average, sparse_as_dense=sparse_as_dense)
    if isinstance(new, Measuring):
        new.measure(rule, op)
    return new


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Broadcast an optimizer's state like `horovod.torch.broadcast_optimizer_state`.

    Each rank keeps its own state of the exchange. If only some ranks have loaded one, the others use it too.
    """
    if not isinstance(optimizer, Exchanging):
        is_new = horovod.broadcast_object(not optimizer.state, root_rank, name="is_new")
        horovod.broadcast_optimizer_state(optimizer, root_rank, model)
        optimizer.__dict__["_state_of_broadcast"] = optimizer.state if is_new else None
        return
    optimizer.share_loaded_state()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    # If the optimizer has no state yet, Horovod makes a step to create it, which may change the weights.
    optimizer.exchanging = False
    try:
        horovod.broadcast_optimizer_state(optimizer, root_rank, model)
    finally:
        optimizer.exchanging = True
    with torch.no_grad():
        torch._foreach_copy_(weights, before)
