"""Horovod's calls for PyTorch: hvdtrain's own on the TCP backend, or Horovod's while Horovod carries them.

Names, arguments and gradients equal Horovod 0.28's (horovod.readthedocs.io, API). On the TCP backend bfloat16 and
channels_last tensors can be exchanged too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.horovod_api import functions, job
from hvdtrain.horovod_api.arguments import compressors
from hvdtrain.horovod_api.functions import Average, Sum, operator
from hvdtrain.horovod_api.process_sets import global_process_set
from hvdtrain.torch import operations

FRONT = job.Front("torch", "horovod.torch.mpi_ops", "horovod.torch")

Call = Callable[[Any], Any]

(
    is_initialized,
    rank,
    size,
    local_rank,
    local_size,
    cross_rank,
    cross_size,
    is_homogeneous,
    mpi_threads_supported,
    mpi_enabled,
    gloo_enabled,
    start_timeline,
    stop_timeline,
) = map(FRONT.or_own, functions.INITIALISED)
mpi_built, gloo_built, cuda_built, rocm_built, ddl_built, nccl_built, ccl_built = map(
    FRONT.or_own_if_missing, functions.BUILT
)
broadcast_object = FRONT.or_own(functions.broadcast_object)
allgather_object = FRONT.or_own(functions.allgather_object)


Compression = compressors(
    lambda tensor: (tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype),
    lambda tensor, dtype: tensor.type(dtype) if dtype.is_floating_point else tensor,
)


@FRONT.or_own
def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    return operations.poll(handle)


@FRONT.or_own
def synchronize(handle: int) -> Any:
    """Wait for a call and return its result; None for an unknown handle."""
    return operations.synchronize(handle)


class _Differentiable(torch.autograd.Function):
    """A call with a gradient. `forward` and `backward` are functions from a list of tensors to another."""

    @staticmethod
    def forward(ctx: Any, forward: Call, backward: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = backward
        results = tuple(forward(list(tensors)))
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *ctx.call([gradient.contiguous() for gradient in gradients]))


def _differentiable(given: Any, forward: Call, backward: Call, compression: Any = Compression.none) -> Any:
    """The results for a tensor or several. `forward` starts a call for the same, and returns a handle."""
    pairs = [compression.compress(tensor) for tensor in _several(given)]

    def call(tensors: list[Tensor]) -> list[Tensor]:
        return _several(synchronize(forward(tensors if isinstance(given, list | tuple) else tensors[0])))

    results = _Differentiable.apply(call, backward, *(tensor for tensor, _ in pairs))
    restored = [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]
    return restored if isinstance(given, list | tuple) else restored[0]


def _several(given: Any) -> list[Tensor]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _new(given: Any, *shape: int) -> Any:
    """New tensors of the same types and, without `shape`, of the same shapes."""
    if isinstance(given, list | tuple):
        return [_new(each, *shape) for each in given]
    return given.new_empty(shape or given.shape)


# --- collectives: each accepts one tensor or a list of tensors --------------------------------------------------------


def _allreduce_async(name_: str, output: Callable[[Any], Any]) -> Callable[..., int]:
    def function(
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        op: Any = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = global_process_set,
    ) -> int:
        scales = {"prescale": prescale_factor, "postscale": postscale_factor}
        return operations.start(
            "allreduce", tensor, output(tensor), name, process_set, op=operator(op, average), **scales
        )

    function.__name__ = name_
    return FRONT.or_own(function)


allreduce_async = _allreduce_async("allreduce_async", _new)
allreduce_async_ = _allreduce_async("allreduce_async_", lambda tensor: tensor)


@FRONT.or_own
def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set=process_set)
    )


@FRONT.or_own
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    rest = (op, prescale_factor, postscale_factor, process_set)

    def backward(gradients: list[Tensor]) -> list[Tensor]:
        same = gradients if isinstance(tensor, list | tuple) else gradients[0]
        return _several(synchronize(allreduce_async(same, average, None, *rest)))

    return _differentiable(tensor, lambda each: allreduce_async(each, average, name, *rest), backward, compression)


@FRONT.or_own
def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Any, process_set: Any = global_process_set
) -> Callable[[], Tensor]:
    """Return a function that waits for the sum, which has the rows of all ranks."""
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def finish() -> Tensor:
        rows, columns = synchronize(values), synchronize(indices)
        rows = rows / process_set.size() if op == Average else rows
        return torch.sparse_coo_tensor(columns.transpose(0, 1), rows, tensor.shape, check_invariants=False)

    return finish


@FRONT.or_own
def allgather_async(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> int:
    return operations.start("allgather", tensor, _new(tensor, 0), name, process_set)


@FRONT.or_own
def allgather(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
    counts = [each.shape[0] if each.ndim else 1 for each in _several(tensor)]

    def backward(gradients: list[Tensor]) -> list[Tensor]:
        """This rank's rows of the mean."""
        means = [allreduce(gradient, op=Average, process_set=process_set) for gradient in gradients]
        all_counts = allgather(torch.tensor([counts]), process_set=process_set)
        begins = all_counts[: process_set.rank()].sum(0).tolist()
        return [mean.narrow(0, begin, count) for mean, begin, count in zip(means, begins, counts, strict=True)]

    return _differentiable(tensor, lambda each: allgather_async(each, name, process_set), backward)


@FRONT.or_own
def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> int:
    return operations.start("broadcast", tensor, _new(tensor), name, process_set, root=root_rank)


@FRONT.or_own
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> int:
    return operations.start("broadcast", tensor, tensor, name, process_set, root=root_rank)


@FRONT.or_own
def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = global_process_set) -> Any:
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


@FRONT.or_own
def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = global_process_set) -> Any:
    def backward(gradients: list[Tensor]) -> list[Tensor]:
        mean = allreduce(gradients[0], op=Average, process_set=process_set)
        return [mean if rank() == root_rank else mean * 0]

    return _differentiable(tensor, lambda each: broadcast_async(each, root_rank, name, process_set), backward)


@FRONT.or_own
def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> int:
    given = torch.tensor([], dtype=torch.int32) if splits is None else torch.as_tensor(splits)
    if given.numel() and given.dtype != torch.int32:
        raise ValueError(f"alltoall takes splits as int32, not {given.dtype}")
    outputs = [_new(tensor, 0), torch.empty(0, dtype=torch.int32)]
    result = outputs[0] if splits is None else tuple(outputs)
    return operations.start("alltoall", tensor, outputs, name, process_set, result=result, splits=given.cpu().numpy())


@FRONT.or_own
def alltoall(tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = global_process_set) -> Any:
    count = process_set.size()
    equal = torch.full([count], tensor.shape[0] // count, dtype=torch.int32)
    given = equal if splits is None and tensor.shape[0] % count == 0 else splits
    received: list[Tensor] = []

    def call(tensors: list[Tensor]) -> list[Tensor]:
        results = _several(synchronize(alltoall_async(tensors[0], given, name, process_set)))
        received.extend(results[1:])
        return results

    def backward(gradients: list[Tensor]) -> list[Tensor]:
        return [synchronize(alltoall_async(gradients[0], received[0], None, process_set))[0]]

    results = _Differentiable.apply(call, backward, tensor)
    return results[0] if splits is None else results


@FRONT.or_own
def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    scales = {"prescale": prescale_factor, "postscale": postscale_factor}
    return operations.start("reducescatter", tensor, _new(tensor, 0), name, process_set, op=op, **scales)


@FRONT.or_own
def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    rest = (op, process_set, prescale_factor, postscale_factor)

    def backward(gradients: list[Tensor]) -> list[Tensor]:
        factor = prescale_factor * postscale_factor * (process_set.size() if op == Sum else 1)
        return [allgather(gradient * factor, process_set=process_set) for gradient in gradients]

    return _differentiable(tensor, lambda each: reducescatter_async(each, name, *rest), backward, compression)


def _grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose first argument is called `tensors`, as in Horovod."""

    @functools.wraps(function)
    def grouped(tensors: Sequence[Tensor], *arguments: Any, **named: Any) -> Any:
        return function(list(tensors), *arguments, **named)

    grouped.__name__ = f"grouped_{function.__name__}"
    signature = inspect.signature(function)
    first, *others = signature.parameters.values()
    grouped.__signature__ = signature.replace(parameters=[first.replace(name="tensors"), *others])  # type: ignore[attr-defined]
    return FRONT.or_own(grouped)


grouped_allreduce, grouped_allreduce_async = _grouped(allreduce), _grouped(allreduce_async)
grouped_allreduce_, grouped_allreduce_async_ = _grouped(allreduce_), _grouped(allreduce_async_)
grouped_allgather, grouped_allgather_async = _grouped(allgather), _grouped(allgather_async)
grouped_reducescatter, grouped_reducescatter_async = _grouped(reducescatter), _grouped(reducescatter_async)


@FRONT.or_own
def barrier(process_set: Any = global_process_set) -> None:
    """Wait for all ranks of the set."""
    synchronize(operations.start("barrier", [], [], None, process_set))


@FRONT.or_own
def join(device: int = -1) -> int:
    """This rank has no more batches: take part in the others' allreduces with zeros. Return the rank that joined last.

    Collective: every rank calls it once.
    """
    return job.job().join()
