"""What stands in for Horovod's PyTorch operations (`mpi_lib_v2`) while streams carry: the engine does their work.

Horovod's Python functions check types, scale, differentiate and keep handles; below them is one function for each
operation and type of tensor, whose arguments are those of Horovod's C++.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hvdtrain.horovod_api.job import Job


class Operations:
    """`horovod_torch_<operation>_async_<type>` for what Horovod has, and its functions for handles.

    Each operation takes tensors (one, or a list), the tensors of its results, which may be the same, and what else
    Horovod gives it; `number` is the process set's. It returns a handle.
    """

    def __init__(self, job: Job, real: Any) -> None:
        self._job, self._real = job, real
        self._outputs: dict[int, list[torch.Tensor]] = {}
        """Where the results of a call go, by its handle"""

    def __getattr__(self, name: str) -> Any:
        getattr(self._real, name)  # raises AttributeError for a type that Horovod does not take
        operation = name.removeprefix("horovod_torch_").partition("_async_")[0]
        return getattr(self, "_" + operation.removeprefix("grouped_"))

    def _allreduce(
        self, given: Any, out: Any, divisor: int, name: Any, op: int, before: float, after: float, number: int
    ) -> int:
        return self._start("allreduce", given, out, name, number, op=op, prescale=before, postscale=after)

    def _allgather(self, given: Any, out: Any, name: Any, number: int) -> int:
        return self._start("allgather", given, out, name, number)

    def _broadcast(self, given: Any, out: Any, root: int, name: Any, number: int) -> int:
        return self._start("broadcast", given, out, name, number, root=root)

    def _alltoall(self, given: Any, splits: Any, out: Any, received: Any, name: Any, number: int) -> int:
        if splits.numel() and splits.dtype != torch.int32:
            raise ValueError(f"alltoall takes its splits as int32, not {splits.dtype}")
        return self._start("alltoall", given, [out, received], name, number, splits=splits.cpu().numpy())

    def _reducescatter(self, given: Any, out: Any, name: Any, op: int, number: int, before: float, after: float) -> int:
        return self._start("reducescatter", given, out, name, number, op=op, prescale=before, postscale=after)

    def horovod_torch_join(self, out: torch.Tensor, device: int) -> int:
        return self._start("join", [], out, "", 0)

    def horovod_torch_barrier(self, number: int) -> int:
        return self._start("barrier", [], [], "", number)

    def _start(self, kind: str, given: Any, out: Any, name: Any, number: int, **what: Any) -> int:
        outputs = list(out) if isinstance(out, list | tuple) else [out]
        arrays = [_array(each) for each in given] if isinstance(given, list | tuple) else _array(given)
        if kind in ("allreduce", "broadcast"):
            results = [_array(each) for each in outputs]
            what["out"] = results if isinstance(arrays, list) else results[0]
        named = name.decode() if isinstance(name, bytes) else name
        if number != 0:  # None: a set that is not registered
            if (ranks := self._job.sets.get(number)) is None:
                raise RuntimeError(f"process set {number} is not in use: give it to init or add_process_set first")
            what["ranks"] = ranks
        with _as_runtime_error():
            handle = self._job.calls.start(kind, arrays, name=named or None, **what)
        self._outputs[handle] = outputs
        return handle

    # --- handles ------------------------------------------------------------------------------------------------

    def horovod_torch_poll(self, handle: int) -> bool:
        return self._job.calls.done(handle)

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        outputs = self._outputs.pop(handle)
        with _as_runtime_error():
            found = self._job.calls.finish(handle)
        results = found if isinstance(found, list | tuple) else [found]
        for output, result in zip(outputs, results, strict=False):  # a barrier has no output
            _put(np.asarray(result), output)

    def horovod_torch_reset(self) -> None:
        self._outputs.clear()


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Horovod's functions make HorovodInternalError of what goes wrong if it is a RuntimeError."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory, if it is on the CPU."""
    return np.asarray(tensor.detach().cpu().numpy())


@torch.no_grad()
def _put(result: np.ndarray, output: torch.Tensor) -> None:
    """A result into the tensor that Horovod's function returns, unless it is there."""
    found = torch.from_numpy(result if result.flags.writeable else result.copy())
    if output.shape == found.shape and output.data_ptr() == found.data_ptr():
        return
    if (output.device, output.dtype) == (found.device, found.dtype):
        output.set_(found)
    else:
        output.resize_(found.shape).copy_(found)
