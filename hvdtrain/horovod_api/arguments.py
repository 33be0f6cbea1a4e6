"""Which of Horovod's arguments a strategy can be combined with."""

from __future__ import annotations

from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.strategies import Spec


def conflict(exchange: Spec, *, op: int, compressed: bool, all_ranks: bool, loss_scaling: bool = False) -> str:
    """Return why a strategy cannot be combined with these arguments; empty if it can."""
    if compressed:
        return "compression= is part of the strategy; hint: leave it out, and choose from `hvdtrain strategies`"
    if op not in (Op.AVERAGE, Op.SUM):
        return "gradients can only be averaged (op=hvd.Average) or summed (op=hvd.Sum)"
    if op == Op.SUM and exchange.capabilities.local_updates:
        return "it averages weights, so op=hvd.Sum has no meaning; hint: leave op= out"
    if not all_ranks:
        return "a strategy exchanges among all ranks; hint: leave process_set= out"
    if loss_scaling and exchange.capabilities.has_residual:
        return "loss scaling would make the gradients that it keeps infinite; hint: use mixed_bfloat16"
    return ""
