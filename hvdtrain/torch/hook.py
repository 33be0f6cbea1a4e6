"""`ddp_hook`: DistributedDataParallel whose buckets a reducer sums, over our streams.

DistributedDataParallel calls the hook with each bucket of gradients as backward fills it, in the same order on all
ranks. One thread sums them one after the other beside backward. The first step is summed exactly, because the buckets
are cut anew after it; from then on each has a reducer of its own, which keeps what it left out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hvdtrain.horovod_api import job
from hvdtrain.strategies import Reducer, parse
from hvdtrain.strategies.algorithms.synchronous import reduce
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Buckets:
    """The state of the hook."""

    def __init__(self, front: job.Front, strategy: str) -> None:
        """Collective. Raises Failure (78) for what is no reducer."""
        exchange = parse(strategy)
        if exchange.algorithm is not None or exchange.reducer is None:
            why = "a hook sums the gradients of a step, so it can be a reducer alone; see --strategy help"
            raise Failure(f"ddp_hook {strategy!r}: {why}", exits.BAD_CONFIG)
        job.init(front, strategy=strategy)
        job.exchange(strategy)  # changes over where Horovod carries
        self._reducer, self._world = exchange.reducer, job.job().world()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-hook")
        self._held: dict[tuple[Any, ...], Reducer] = {}
        self._steps = 0

    def hook(self, bucket: Any) -> Any:
        """The mean of a bucket over ranks, as a future."""
        buffer = bucket.buffer()
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        reducer = self._of(bucket.index(), shapes)
        self._steps += bucket.is_last()
        on_gpu = buffer.device.type != "cpu"
        done: Any = torch.futures.Future(devices=[buffer.device] if on_gpu else None)
        gradients = torch.empty(buffer.numel() + 1, dtype=torch.float32, device="cpu")
        gradients[:-1] = buffer  # waits for the GPU

        def sum_() -> None:
            try:
                self._mean(gradients.numpy(), reducer)
                buffer.copy_(gradients[:-1])
                done.set_result(buffer)
            except Exception as error:
                done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # PyTorch tells its text alone

        self._thread.submit(sum_)
        return done

    def _of(self, index: int, shapes: list[tuple[int, ...]]) -> Reducer:
        exact = self._steps == 0
        made = parse(DEFAULT_REDUCER).reducer if exact else self._reducer
        assert made is not None
        key = (exact, index, *shapes)
        if key not in self._held:
            self._held[key] = made.cls(shapes, made.settings)
        return self._held[key]

    def _mean(self, vector: np.ndarray, reducer: Reducer) -> None:
        """Replaces the gradients; the number behind them says whether a rank's were not finite."""
        gradients = vector[:-1]
        lost = bool(reducer.residual_key) and not np.isfinite(gradients @ gradients)
        if lost:
            gradients[:] = 0
        gradients /= self._world.size
        vector[-1] = lost
        reduce(self._world, reducer, vector, gradients.size)
        if vector[-1] > 0:
            gradients[:] = np.inf
