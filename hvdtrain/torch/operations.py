"""A stand-in for Horovod's PyTorch operations (`mpi_lib_v2`) while hvdtrain's TCP backend carries the calls.

Horovod's Python functions check types, scale, differentiate and keep handles. They call one C++ function for each
operation and type of tensor; the methods here take the same arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hvdtrain.horovod_api.arithmetic import BFLOAT16
from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.ranks import Job


class Operations:
    """`horovod_torch_<operation>_async_<type>` for each of Horovod's types, and Horovod's functions for handles.

    Each operation takes one or several input tensors, the output tensors (which may be the inputs) and Horovod's other
    arguments, and returns a handle. `number` identifies the process set.
    """

    def __init__(self, job: Job, real: Any) -> None:
        self._job, self._real = job, real
        self._outputs: dict[int, list[torch.Tensor]] = {}
        """The output tensors of each unfinished call, by handle"""

    def __getattr__(self, name: str) -> Any:
        getattr(self._real, name)  # raises AttributeError for a type that Horovod does not support
        operation = name.removeprefix("horovod_torch_").partition("_async_")[0]
        return getattr(self, "_" + operation.removeprefix("grouped_"))

    def _allreduce(
        self, inputs: Any, out: Any, divisor: int, name: Any, op: int, prescale: float, postscale: float, number: int
    ) -> int:
        return self.start("allreduce", inputs, out, name, number, op=op, prescale=prescale, postscale=postscale)

    def _allgather(self, inputs: Any, out: Any, name: Any, number: int) -> int:
        return self.start("allgather", inputs, out, name, number)

    def _broadcast(self, inputs: Any, out: Any, root: int, name: Any, number: int) -> int:
        return self.start("broadcast", inputs, out, name, number, root=root)

    def _alltoall(self, inputs: Any, splits: Any, out: Any, received: Any, name: Any, number: int) -> int:
        if splits.numel() and splits.dtype != torch.int32:
            raise ValueError(f"alltoall takes splits as int32, not {splits.dtype}")
        return self.start("alltoall", inputs, [out, received], name, number, splits=splits.cpu().numpy())

    def _reducescatter(
        self, inputs: Any, out: Any, name: Any, op: int, number: int, prescale: float, postscale: float
    ) -> int:
        return self.start("reducescatter", inputs, out, name, number, op=op, prescale=prescale, postscale=postscale)

    def horovod_torch_join(self, *_: Any) -> int:
        raise needs_horovod("hvd.join")

    def horovod_torch_barrier(self, number: int) -> int:
        return self.start("barrier", [], [], "", number)

    def start(self, kind: str, inputs: Any, out: Any, name: Any, number: int | None, **settings: Any) -> int:
        """Start a call of `calls.Calls` and return its handle."""
        outputs = list(out) if isinstance(out, list | tuple) else [out]
        arrays = [_array(tensor) for tensor in inputs] if isinstance(inputs, list | tuple) else _array(inputs)
        if kind in ("allreduce", "broadcast"):
            results = [_array(tensor) for tensor in outputs]
            settings["out"] = results if isinstance(arrays, list) else results[0]
        if number != 0:  # None for a process set that is not registered
            if number is None or (ranks := self._job.sets.get(number)) is None:
                raise RuntimeError(f"process set {number} does not exist; hint: pass it to hvd.init(process_sets=...)")
            settings["ranks"] = ranks
        text = name.decode() if isinstance(name, bytes) else name
        if kind == "allreduce" and text:
            self._job.exchanging(text)
        with _os_error_as_runtime_error():
            handle = self._job.calls.start(kind, arrays, name=text or None, **settings)
        self._outputs[handle] = outputs
        return handle

    # --- handles ------------------------------------------------------------------------------------------------

    def horovod_torch_poll(self, handle: int) -> bool:
        return self._job.calls.done(handle)

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        outputs = self._outputs.pop(handle)
        with _os_error_as_runtime_error():
            result = self._job.calls.finish(handle)
        results = result if isinstance(result, list | tuple) else [result]
        for output, array in zip(outputs, results, strict=False):  # a barrier has no output
            _store(np.asarray(array), output)

    def horovod_torch_reset(self) -> None:
        self._outputs.clear()


@contextlib.contextmanager
def _os_error_as_runtime_error() -> Iterator[None]:
    """Horovod's functions turn a RuntimeError into HorovodInternalError."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Shares the tensor's memory if it is on the CPU."""
    plain = tensor.detach().cpu()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(BFLOAT16)
    return np.asarray(plain.numpy())


@torch.no_grad()
def _store(array: np.ndarray, output: torch.Tensor) -> None:
    """Puts a result into the tensor that Horovod's function returns, unless it is in that memory already."""
    array = array if array.flags.writeable else array.copy()
    is_bfloat16 = array.dtype == BFLOAT16
    result = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if is_bfloat16 else torch.from_numpy(array)
    if output.shape == result.shape and output.data_ptr() == result.data_ptr():
        return
    if (output.device, output.dtype) == (result.device, result.dtype):
        output.set_(result)
    else:
        output.resize_(result.shape).copy_(result)
