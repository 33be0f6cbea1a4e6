"""The step times of Horovod's own optimizer: what it waits in `synchronize` is the exchange, as for our workloads."""

from __future__ import annotations

import time
import types
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdtrain.horovod_api import job
from hvdtrain.strategies.cost import ring_bytes


def rate(optimizer: Any) -> float | None:
    """The learning rate of the first group; None where it has none."""
    found = optimizer.param_groups[0].get("lr")
    return None if found is None else float(found)


def watched(optimizer: Any) -> Any:
    """The same optimizer of Horovod's, each step of which is recorded from now on. Collective."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    devices = {str(weight.device) for weight in weights}
    steps = job.recorder(
        None,
        None,
        parameters=sum(weight.numel() for weight in weights),
        device=min(devices, default="cpu"),
        threads=torch.get_num_threads(),
    )
    if steps is None:
        return optimizer
    payload_bytes = sum(weight.numel() * weight.element_size() for weight in weights if weight.requires_grad)
    sent_bytes = ring_bytes(payload_bytes, mpi_ops.size())
    synchronize, step, waited_s = optimizer.synchronize, optimizer.step, 0.0

    def timed_synchronize(self: Any) -> None:
        nonlocal waited_s
        began = time.perf_counter()
        synchronize()
        waited_s += time.perf_counter() - began

    def timed_step(self: Any, closure: Any = None) -> Any:
        nonlocal waited_s
        found = step(closure)
        steps.done(lr=rate(self), exchange_s=waited_s, sent_bytes=sent_bytes, local_sent_bytes=None)
        waited_s = 0.0
        return found

    optimizer.synchronize = types.MethodType(timed_synchronize, optimizer)
    optimizer.step = types.MethodType(timed_step, optimizer)  # learning rate schedulers want a method
    return optimizer
