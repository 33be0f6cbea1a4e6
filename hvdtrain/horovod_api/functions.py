"""Horovod's functions that know no framework, on the TCP backend. Names, arguments and results equal Horovod 0.28's."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.horovod_api.calls import needs_horovod
from hvdtrain.horovod_api.process_sets import global_process_set, members
from hvdtrain.horovod_api.ranks import is_connected, job

Average, Sum, Adasum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.ADASUM, Op.MIN, Op.MAX, Op.PRODUCT


def is_initialized() -> bool:
    return is_connected()


def _function(name: str, answer: Callable[[], Any]) -> Callable[[], Any]:
    """`answer` as a function of this name: Horovod's function of the same name takes its place while it runs."""

    def function() -> Any:
        return answer()

    function.__name__ = function.__qualname__ = name
    return function


def _place(name: str) -> Any:
    return getattr(job(), name)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    raise needs_horovod("hvd.start_timeline")


def stop_timeline() -> None:
    """Does nothing, since nothing records a timeline."""


_PLACES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
_MISSING = ("mpi_threads_supported", "mpi_enabled", "gloo_enabled")
_LIBRARIES = ("mpi_built", "gloo_built", "cuda_built", "rocm_built", "ddl_built")
INITIALISED: tuple[Callable[..., Any], ...] = (
    is_initialized,
    *(_function(name, functools.partial(_place, name)) for name in _PLACES),
    *(_function(name, lambda: False) for name in _MISSING),
    start_timeline,
    stop_timeline,
)
"""Functions that describe the job"""
BUILT = (
    *(_function(name, lambda: False) for name in _LIBRARIES),
    *(_function(name, lambda: 0) for name in ("nccl_built", "ccl_built")),
)
"""Functions that describe Horovod's library"""


def operator(op: Op | None, average: bool | None) -> Op:
    """`op`, or the operation of the deprecated argument `average`. Raises ValueError if both are given."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    return op if op is not None else Op.SUM if average is False else Op.AVERAGE


# Like Horovod, these load objects of other ranks, also functions and classes of the script: code that is executed.
# These ranks run the same script, and their connections are authenticated.


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return `root_rank`'s object on all ranks. Collective."""
    calls, ranks, name = job().calls, members(process_set), name or type(obj).__name__
    own = np.frombuffer(cloudpickle.dumps(obj) if job().rank == root_rank else b"", np.uint8)
    length = calls.call("broadcast", np.array([len(own)]), name=f"{name}.sz", root=root_rank, ranks=ranks)
    packed = own if job().rank == root_rank else np.zeros(int(length[0]), np.uint8)
    packed = calls.call("broadcast", packed, name=f"{name}.t", root=root_rank, ranks=ranks)
    return obj if job().rank == root_rank else pickle.loads(packed.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: Any = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective."""
    calls, ranks, name = job().calls, members(process_set), name or type(obj).__name__
    own = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = calls.call("allgather", np.array([len(own)]), name=f"{name}.sz", ranks=ranks)
    joined = calls.call("allgather", own, name=f"{name}.t", ranks=ranks).tobytes()
    ends = np.cumsum(lengths).tolist()
    return [pickle.loads(joined[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]
