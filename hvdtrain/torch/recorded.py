"""Records the steps of Horovod's own optimizer. The time that `synchronize` takes is the exchange."""

from __future__ import annotations

import time
import types
from typing import Any

import torch

from hvdtrain.horovod_api import job
from hvdtrain.system.rates import ring_bytes
from hvdtrain.torch.collectives import size


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of the first group, or None if it has none."""
    lr = optimizer.param_groups[0].get("lr")
    return None if lr is None else float(lr)


def recorded(optimizer: Any) -> Any:
    """Make Horovod's optimizer record each step, and return it. Collective."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    steps = job.recorder(
        None,
        None,
        shapes=[tuple(weight.shape) for weight in weights],
        device=min({str(weight.device) for weight in weights}, default="cpu"),
        threads=torch.get_num_threads(),
    )
    if steps is None:
        return optimizer
    with torch.no_grad():
        sent = [optimizer._compression.compress(torch.zeros_like(each))[0] for each in weights if each.requires_grad]
    sent_bytes = ring_bytes(sum(each.numel() * each.element_size() for each in sent), size())
    del sent
    synchronize, step, waited_s = optimizer.synchronize, optimizer.step, 0.0

    def timed_synchronize(self: Any) -> None:
        nonlocal waited_s
        start = time.perf_counter()
        synchronize()
        waited_s += time.perf_counter() - start

    def timed_step(self: Any, closure: Any = None) -> Any:
        nonlocal waited_s
        loss = step(closure)
        steps.done(lr=learning_rate(self), exchange_s=waited_s, sent_bytes=sent_bytes, local_sent_bytes=None)
        waited_s = 0.0
        return loss

    optimizer.synchronize = types.MethodType(timed_synchronize, optimizer)
    optimizer.step = types.MethodType(timed_step, optimizer)  # learning rate schedulers need a method
    return optimizer
