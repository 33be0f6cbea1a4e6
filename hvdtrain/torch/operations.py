"""Starts and finishes the TCP backend's calls for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.horovod_api.arithmetic import BFLOAT16
from hvdtrain.horovod_api.process_sets import members
from hvdtrain.horovod_api.ranks import job

TYPES = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
TYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats besides the contiguous one, by number of dimensions"""

_started: dict[int, tuple[list[Tensor], Any]] = {}
"""The output tensors of each unfinished call, and what `synchronize` returns, by handle"""


def start(
    kind: str, inputs: Any, outputs: Any, name: str | None, process_set: Any, *, result: Any = None, **settings: Any
) -> int:
    """Start a call of `calls.Calls` for one tensor or a list, and return its handle.

    `outputs`: the tensors for the results, which may be the inputs. `result`: what `synchronize` returns; the outputs
    by default. Raises ValueError for tensors that Horovod rejects, and HorovodInternalError.
    """
    for tensor in inputs if isinstance(inputs, list) else [inputs]:
        if tensor.dtype not in TYPES and (tensor.dtype != torch.bool or kind in ("allreduce", "reducescatter")):
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        layout = LAYOUTS.get(tensor.ndim, torch.contiguous_format)
        if not (tensor.is_contiguous() or tensor.is_contiguous(memory_format=layout)):
            raise ValueError("Tensor is required to be contiguous.")
    several = outputs if isinstance(outputs, list) else [outputs]
    arrays = [_array(tensor) for tensor in inputs] if isinstance(inputs, list) else _array(inputs)
    if kind in ("allreduce", "broadcast"):
        out = [_array(tensor) for tensor in several]
        settings["out"] = out if isinstance(arrays, list) else out[0]
    try:
        ranks = members(process_set)
    except ValueError as error:
        raise internal_error()(str(error)) from error
    if kind == "allreduce" and name:
        job().exchanging(name)
    handle = job().calls.start(kind, arrays, name=name or None, ranks=ranks, **settings)
    _started[handle] = several, outputs if result is None else result
    return handle


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    return job().calls.done(handle)


def synchronize(handle: int) -> Any:
    """Wait for a call and return its result; None for an unknown handle."""
    if handle not in _started:
        return None
    outputs, result = _started.pop(handle)
    found = job().calls.finish(handle)
    for output, array in zip(outputs, found if isinstance(found, list | tuple) else [found], strict=False):
        _store(np.asarray(array), output)  # a barrier has no output
    return result


def _array(tensor: Tensor) -> np.ndarray:
    """Shares the tensor's memory if it is on the CPU."""
    plain = tensor.detach().cpu()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(BFLOAT16)
    return np.asarray(plain.numpy())


@torch.no_grad()
def _store(array: np.ndarray, output: Tensor) -> None:
    """Puts a result into an output tensor, unless it is in that memory already."""
    array = array if array.flags.writeable else array.copy()
    is_bfloat16 = array.dtype == BFLOAT16
    result = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)
    if output.shape == result.shape and output.data_ptr() == result.data_ptr():
        return
    if (output.device, output.dtype) == (result.device, result.dtype):
        output.set_(result)
    else:
        output.resize_(result.shape).copy_(result)
