"""Vectors that stay where the model is: NumPy arrays, or PyTorch tensors on a CPU or GPU.

Strategies and reducers are written once, against the array API (array-api-compat), so on a GPU only encoded bytes cross
the bus. This module adds to that standard copies between device and host memory, and the order of work
that several threads give to one GPU. PyTorch is imported only if a vector is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

Array = Any
"""A NumPy array or a PyTorch tensor"""


def is_numpy(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def _on_gpu(array: Array) -> bool:
    return not is_numpy(array) and bool(array.is_cuda)


def same_place(one: Array, other: Array) -> bool:
    """Whether two arrays are of one kind and on one device."""
    return is_numpy(one) == is_numpy(other) and (is_numpy(one) or one.device == other.device)


def to_host(array: Array) -> np.ndarray:
    """Return the numbers in host memory. It may be the array's own memory, or on a GPU a pinned copy."""
    if is_numpy(array):
        return np.asarray(array)
    if not array.is_cuda:
        return np.asarray(array.numpy())
    import torch

    host = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)  # PyTorch keeps pinned memory for the next one
    host.copy_(array, non_blocking=True)
    finish(array)
    return np.asarray(host.numpy())


def placed_like(values: np.ndarray, other: Array) -> Array:
    """Return an array as one of the kind, and on the device, of `other`. It may share the memory of `values`."""
    if is_numpy(other):
        return to_host(values)
    import torch

    return torch.as_tensor(values).to(other.device, non_blocking=True)


def on_host(array: Array, work: Callable[[np.ndarray], Any]) -> None:
    """Let `work` change the numbers of an array in host memory."""
    work(host := to_host(array))
    if not is_numpy(array):
        array[...] = placed_like(host, array)


def moved(array: Array, like: Array) -> Array:
    """Return the array itself, or its copy where `like` is."""
    return array if same_place(array, like) else placed_like(to_host(array), like)


def empty(shape: Any, like: Array, dtype: str = "float32") -> Array:
    """Return a new array of the kind, and on the device, of `like`, with arbitrary contents."""
    xp = array_namespace(like)
    return xp.empty(shape, dtype=getattr(xp, dtype), device=device(like))


def handover(array: Array) -> Callable[[], None] | None:
    """Mark the work that has been given to the array's GPU so far. None without a GPU.

    After the result was called in another thread, that thread's work waits for the marked work.
    """
    if not _on_gpu(array):
        return None
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(array.device))
    return lambda: torch.cuda.current_stream(array.device).wait_event(event)


def use_own_stream(array: Array) -> None:
    """Let the GPU run this background thread's work at the same time as other threads' work, instead of after it."""
    if _on_gpu(array):
        import torch

        if torch.cuda.current_stream(array.device) == torch.cuda.default_stream(array.device):
            torch.cuda.set_stream(torch.cuda.Stream(array.device))  # for this thread only


def finish(array: Array) -> None:
    """Wait until the GPU has done what this thread has given to it."""
    if _on_gpu(array):
        import torch

        torch.cuda.current_stream(array.device).synchronize()
