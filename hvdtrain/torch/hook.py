"""`ddp_hook`: a communication hook for DistributedDataParallel whose buckets are summed by a reducer.

DistributedDataParallel calls the hook with each bucket of gradients during backward, in the same order on all ranks.
One thread exchanges the buckets in that order. The first step is exact, because DistributedDataParallel forms new
buckets after it. Each of these has its own reducer, which keeps its residual.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.comm import lifecycle
from hvdtrain.comm.elastic import unsupported
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.horovod_api import job
from hvdtrain.strategies import Reducer, parse
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.torch.collectives import FRONT


def join(strategy: str) -> None:
    """Connect the ranks of torch.distributed, or else of the launcher, for a strategy. Collective.

    Raises Failure (78) if scripts cannot use the strategy, or the launcher has numbered the ranks differently.
    """
    if launch_env().launcher == "elastic":
        raise unsupported()
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if launch_env().launcher == "alone" and ranks[1] > 1:  # processes that the script has started itself
        os.environ |= {"HVDTRAIN_TORCH_RANK": str(ranks[0]), "HVDTRAIN_TORCH_SIZE": str(ranks[1])}
    job.init(FRONT, strategy=strategy)
    job.exchange(strategy)  # takes over if Horovod carries the calls
    if dist.is_initialized() and ranks != (own := (job.job().rank, job.job().size)):
        has, launched = ("rank {} of {}".format(*each) for each in (ranks, own))
        problem = f"torch.distributed says {has}, the launcher {launched}; hint: call ddp_hook before hvd.init, and"
        raise Failure(f"ddp_hook: {problem} give init_process_group the launcher's ranks", exits.BAD_CONFIG)


def check_group(model: DistributedDataParallel) -> None:
    """Raise Failure (78) if DistributedDataParallel has fewer ranks than the job."""
    ranks = job.job().size
    if (size := dist.get_world_size(model.process_group)) != ranks:
        problem = f"process_group= has {size} ranks, but hvdtrain exchanges between all {ranks}"
        hint = "leave process_group= out, or use DistributedDataParallel without hvdtrain"
        raise Failure(f"{problem}; hint: {hint}", exits.BAD_CONFIG)


class Hook:
    """The state of a hook of DistributedDataParallel, which `exchange` is. Copies and pickles of a model have none."""

    def __init__(self, sums: Buckets | None) -> None:
        self.sums = sums
        """Sums the gradients; None leaves each rank its own"""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def exchange(state, bucket):  # type: ignore[no-untyped-def] # PyTorch would not take annotations that are strings
    """Return a future of a bucket's gradients."""
    if state.sums is not None:
        return state.sums.hook(bucket)
    buffer = bucket.buffer()
    future: Any = torch.futures.Future(devices=[buffer.device] if buffer.device.type != "cpu" else None)
    future.set_result(buffer)
    return future


def register(model: DistributedDataParallel, strategy: str | None) -> None:
    """Let a strategy sum the model's gradients; None: nobody, whatever sets `require_backward_grad_sync`. Collective.

    Raises Failure (78) if the script has registered a hook.
    """
    if model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "")
        problem = f"strategy {strategy}: the script has registered the communication hook {name}"
        raise Failure(f"{problem}; hint: leave register_comm_hook out", exits.BAD_CONFIG)
    if strategy not in (None, DEFAULT_REDUCER) and any(each.dtype == torch.float64 for each in model.parameters()):
        warn_of_float64(strategy)
    model.register_comm_hook(Hook(None if strategy is None else Buckets(strategy)), exchange)


def of(model: DistributedDataParallel) -> Hook:
    """The hook that `register` gave a model."""
    return next(state for _, state in model._comm_hooks if isinstance(state, Hook))


def warn_of_float64(strategy: str) -> None:
    if job.job().rank == 0:
        job.say(f"{strategy} exchanges float64 as float32; {DEFAULT_REDUCER} keeps float64")


class Buckets:
    """Sums the gradients of each bucket."""

    def __init__(self, strategy: str) -> None:
        """Collective. Raises Failure (78) if `strategy` is not a reducer."""
        exchange, exact = parse(strategy), parse(DEFAULT_REDUCER)
        if exchange.algorithm is not None or exchange.reducer is None:
            problem = "a hook sums the gradients of one step; hint: name a reducer, or use hvdtrain.ddp"
            raise Failure(f"ddp_hook {strategy!r}: {problem}", exits.BAD_CONFIG)
        assert exact.reducer is not None
        join(strategy)
        self._exact, self._chosen, self._world = exact.reducer, exchange.reducer, job.job().world()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-hook")
        self._reducers: dict[tuple[Any, ...], Reducer] = {}
        """The reducer of each bucket after the first step, by index and shapes"""
        self._vectors: dict[int, Any] = {}
        """The memory of each bucket that is copied, whose last exchange has ended when the next one begins"""
        self._is_first_step = True
        self._is_exact = str(exchange) == DEFAULT_REDUCER

    def hook(self, bucket: Any) -> Any:
        """Return a future of the bucket's mean over ranks."""
        if self._is_first_step and bucket.index() == 0:
            self._check_group()
        buffer = bucket.buffer()
        if self._is_exact and (buffer.dtype == torch.float64 or buffer.is_complex()):
            self._is_first_step &= not bucket.is_last()
            return self._by_torch(buffer)
        reducer = self._reducer(bucket.index(), [tuple(parameter.shape) for parameter in bucket.parameters()])
        self._is_first_step &= not bucket.is_last()
        on_gpu = buffer.device.type != "cpu"
        future: Any = torch.futures.Future(devices=[buffer.device] if on_gpu else None)
        if not (on_gpu or reducer.residual_key or buffer.dtype != torch.float32):
            vector = gradients = buffer.div_(self._world.size)  # summed in DistributedDataParallel's own memory
        else:
            size = buffer.numel() + bool(reducer.residual_key)
            if len(vector := self._vectors.get(bucket.index(), ())) != size:
                vector = self._vectors[bucket.index()] = torch.empty(size, dtype=torch.float32, device="cpu")
            gradients = vector[: buffer.numel()]
            gradients.copy_(buffer).div_(self._world.size)  # waits for the GPU

        def exchange() -> None:
            try:
                self._sum(vector.numpy(), gradients.numpy(), reducer)
                if gradients is not buffer:
                    buffer.copy_(gradients)
                future.set_result(buffer)
            except Exception as error:
                future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))  # PyTorch omits the type

        self._thread.submit(exchange)
        return future

    @staticmethod
    def _by_torch(buffer: torch.Tensor) -> Any:
        """What the reducers would round: types that PyTorch sums exactly."""
        summed = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True).get_future()
        return summed.then(lambda done: done.value()[0])

    def _check_group(self) -> None:
        """Ends the job with code 78 if DistributedDataParallel has fewer ranks, because PyTorch does not tell hooks."""
        for model in (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)):
            if any(getattr(state, "sums", None) is self for _, state in model._comm_hooks):
                try:
                    check_group(model)
                except Failure as failure:
                    lifecycle.fail(failure)

    def _reducer(self, index: int, shapes: list[tuple[int, ...]]) -> Reducer:
        if self._is_first_step:
            return self._exact.cls(shapes, self._exact.settings)
        key = (index, *shapes)
        if key not in self._reducers:
            self._reducers[key] = self._chosen.cls(shapes, self._chosen.settings)
        return self._reducers[key]

    def _sum(self, vector: np.ndarray, gradients: np.ndarray, reducer: Reducer) -> None:
        """Replace gradients by their sum.

        With a residual, in which NaN or infinity would stay, `vector` has one more number: whether a rank had any.
        """
        if not reducer.residual_key:
            self._world.reduce(vector, gradients.size, reducer)
            return
        lost = not np.isfinite(gradients @ gradients)
        if lost:
            gradients[:] = 0
        vector[-1] = lost
        self._world.reduce(vector, gradients.size, reducer)
        if vector[-1] > 0:
            gradients[:] = np.inf
