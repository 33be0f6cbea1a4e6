"""Which of Horovod's arguments a strategy can be combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def compressors(halved: Callable[[Any], tuple[Any, Any]], restored: Callable[[Any, Any], Any]) -> Any:
    """`hvd.Compression`: `none` sends tensors as they are, `fp16` floating-point tensors as float16."""

    class none:
        @staticmethod
        def compress(tensor: Any) -> tuple[Any, Any]:
            return tensor, None

        @staticmethod
        def decompress(tensor: Any, ctx: Any) -> Any:
            return tensor

    class fp16:
        compress, decompress = staticmethod(halved), staticmethod(restored)

    return type("Compression", (), {"none": none, "fp16": fp16})
