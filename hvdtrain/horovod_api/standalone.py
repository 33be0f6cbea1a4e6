"""Horovod's functions that know no framework, on the TCP backend, for an environment without Horovod.

`hvdtrain.torch` and `hvdtrain.tensorflow` use Horovod's own functions if they can be imported. Names,
arguments and results equal Horovod 0.28's.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.horovod_api.basics import add_set, remove_set
from hvdtrain.horovod_api.calls import needs_horovod

Average, Sum, Adasum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.ADASUM, Op.MIN, Op.MAX, Op.PRODUCT


class ProcessSet:
    """Some of the ranks. `hvd.init(process_sets=...)` or `hvd.add_process_set` numbers it."""

    process_set_id: int | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        """Raises ValueError for anything but ranks."""
        self.ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in self.ranks):
            raise ValueError("ProcessSet takes a list of ranks")

    def _members(self) -> tuple[int, ...] | None:
        return None if self.process_set_id is None else job.job().sets.get(self.process_set_id)

    def size(self) -> int | None:
        """The number of ranks in the set; None before it is numbered."""
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """This rank's index in the set; None before it is numbered. Raises ValueError if it is not a member."""
        members = self._members()
        return None if members is None else members.index(job.job().rank)

    def included(self) -> bool:
        """Whether this rank is a member."""
        return job.job().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def numbered(number: int) -> ProcessSet:
    """The process set with this number."""
    process_set = ProcessSet(job.job().sets[number])
    process_set.process_set_id = number
    return process_set


def init(comm: Any = None, process_sets: Any = None) -> None:
    """The second half of `hvd.init`, which has connected the ranks. Raises NotImplementedError for `comm`."""
    everyone = list(range(size()))
    if comm is not None and (not isinstance(comm, Sequence) or list(comm) not in ([], everyone)):
        raise needs_horovod("hvd.init(comm=...), a job of a part of the ranks,")
    global_process_set.ranks = everyone
    for process_set in process_sets if isinstance(process_sets, Sequence) and process_sets != "dynamic" else ():
        process_set.process_set_id = add_set(job.job(), process_set.ranks)


def shutdown() -> None:
    job.shutdown()


def is_initialized() -> bool:
    return job.is_connected()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Number a set of ranks. Raises ValueError if it exists, or HOROVOD_DYNAMIC_PROCESS_SETS is not 1. Collective."""
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    number = add_set(job.job(), new.ranks, dynamic=True)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {new}")
    new.process_set_id = number
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set and return whether it existed. Raises ValueError unless HOROVOD_DYNAMIC_PROCESS_SETS is 1."""
    if not process_set.process_set_id:
        return False
    number, process_set.process_set_id = process_set.process_set_id, None
    return remove_set(job.job(), number)


def rank() -> int:
    return job.job().rank


def size() -> int:
    return job.job().size


def local_rank() -> int:
    return job.job().local_rank


def local_size() -> int:
    return job.job().local_size


def cross_rank() -> int:
    return job.job().cross_rank


def cross_size() -> int:
    return job.job().cross_size


def is_homogeneous() -> bool:
    return job.job().is_homogeneous


def mpi_threads_supported() -> bool:
    return False


mpi_enabled = mpi_built = gloo_enabled = gloo_built = cuda_built = rocm_built = ddl_built = mpi_threads_supported


def nccl_built() -> int:
    return 0


def ccl_built() -> int:
    return 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    raise needs_horovod("hvd.start_timeline")


def stop_timeline() -> None:
    """Does nothing, since nothing records a timeline."""


def operator(op: Op | None, average: bool | None) -> Op:
    """`op`, or the operation of the deprecated argument `average`. Raises ValueError if both are given."""
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    return op if op is not None else Op.SUM if average is False else Op.AVERAGE


def members(process_set: Any) -> tuple[int, ...] | None:
    """The ranks of a set for `Calls`; None for all ranks. Raises ValueError if the set has no number."""
    number = process_set.process_set_id
    if number == 0:
        return None
    if number is None or number not in job.job().sets:
        raise ValueError(f"{process_set} does not exist; hint: pass it to hvd.init(process_sets=...)")
    return job.job().sets[number]


# Like Horovod, these load objects of other ranks, also functions and classes of the script: code that is executed.
# These ranks run the same script, and their connections are authenticated.


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return `root_rank`'s object on all ranks. Collective."""
    calls, ranks, name = job.job().calls, members(process_set), name or type(obj).__name__
    own = np.frombuffer(cloudpickle.dumps(obj) if rank() == root_rank else b"", np.uint8)
    length = calls.call("broadcast", np.array([len(own)]), name=f"{name}.sz", root=root_rank, ranks=ranks)
    packed = own if rank() == root_rank else np.zeros(int(length[0]), np.uint8)
    packed = calls.call("broadcast", packed, name=f"{name}.t", root=root_rank, ranks=ranks)
    return obj if rank() == root_rank else pickle.loads(packed.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: Any = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective."""
    calls, ranks, name = job.job().calls, members(process_set), name or type(obj).__name__
    own = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = calls.call("allgather", np.array([len(own)]), name=f"{name}.sz", ranks=ranks)
    joined = calls.call("allgather", own, name=f"{name}.t", ranks=ranks).tobytes()
    ends = np.cumsum(lengths).tolist()
    return [pickle.loads(joined[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]
