"""Ranks, sizes and process sets on hvdtrain's TCP backend: replaces Horovod's C library.

Horovod's Python functions (`rank`, `cross_size`, `ProcessSet` ...) call C functions and turn their error codes into
exceptions. `Basics` has the same functions with the same return values. All others come from the real library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hvdtrain.horovod_api.calls import needs_horovod

if TYPE_CHECKING:
    from hvdtrain.horovod_api.ranks import Job

NOT_DYNAMIC, UNKNOWN_SET, FOREIGN_SET, EXISTING_SET = -2, -3, -4, -6
"""Horovod's error codes: sets are fixed, the set is unknown, this rank is not a member, the set exists already"""
JOB_ATTRIBUTES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
"""Functions that return an attribute of the job"""
CONSTANTS = {"is_initialized": True, "mpi_enabled": False, "gloo_enabled": False, "stop_timeline": 0}
"""Functions that return the same value in every job"""


class Basics:
    """The functions that `horovod.common.basics.HorovodBasics` calls. It documents their meaning."""

    def __init__(self, job: Job, real: Any, shutdown: Callable[[], None]) -> None:
        """`real` is Horovod's library. `shutdown` ends the job and restores `real`."""
        self._job, self._real, self._shutdown = job, real, shutdown

    def __getattr__(self, name: str) -> Any:
        function = name.removeprefix("horovod_")
        if function in CONSTANTS:
            return lambda: CONSTANTS[function]
        if function in JOB_ATTRIBUTES:
            return lambda: getattr(self._job, function)
        return getattr(self._real, name)

    def horovod_init(self, comm: Any, comm_size: Any, ranks: Any, sizes: Any, count: Any) -> bool:
        job = self._job
        if comm_size.value and list(comm) != list(range(job.size)):
            raise needs_horovod(f"hvd.init(comm={list(comm)}), a job of a part of the ranks,")
        begin = 0
        for size in sizes[: count.value]:
            add_set(job, ranks[begin : begin + size])
            begin += size
        return True

    @property
    def horovod_init_multi_comm(self) -> NoReturn:
        """A property, because Horovod sets the argument types before it calls the function."""
        raise needs_horovod("hvd.init(comm=<MPI communicator>)")

    def horovod_shutdown(self) -> None:
        self._shutdown()

    def horovod_start_timeline(self, *arguments: Any) -> int:
        raise needs_horovod("hvd.start_timeline")

    # --- process sets -------------------------------------------------------------------------------------------

    def horovod_add_process_set(self, ranks: Any, count: Any) -> int:
        if not _sets_are_dynamic():
            return NOT_DYNAMIC
        number = add_set(self._job, list(ranks))
        return EXISTING_SET if number is None else number

    def horovod_remove_process_set(self, number: Any) -> int:
        if not _sets_are_dynamic():
            return NOT_DYNAMIC
        return UNKNOWN_SET if self._job.sets.pop(number.value, None) is None else int(number.value)

    def horovod_number_of_process_sets(self) -> int:
        return len(self._job.sets)

    def horovod_process_set_ids(self, out: Any) -> None:
        out[:] = list(self._job.sets)

    def horovod_process_set_size(self, number: Any) -> int:
        ranks = self._job.sets.get(number.value)
        return UNKNOWN_SET if ranks is None else len(ranks)

    def horovod_process_set_ranks(self, number: Any, out: Any) -> int:
        out[:] = list(self._job.sets[number.value])
        return 0

    def horovod_process_set_rank(self, number: Any) -> int:
        ranks = self._job.sets.get(number.value)
        if ranks is None:
            return UNKNOWN_SET
        return ranks.index(self._job.rank) if self._job.rank in ranks else FOREIGN_SET


def add_set(job: Job, ranks: Sequence[int], *, dynamic: bool = False) -> int | None:
    """Number a process set; None if it exists. Raises ValueError for unknown ranks, and in a job with fixed sets if
    `dynamic`."""
    members = tuple(sorted(ranks))
    if dynamic:
        _check_dynamic()
    if unknown := [rank for rank in members if not 0 <= rank < job.size]:
        raise ValueError(f"process set {list(members)}: rank {unknown[0]} does not exist (size {job.size})")
    if members in job.sets.values():
        return None
    number = max(job.sets) + 1
    job.sets[number] = members
    return number


def remove_set(job: Job, number: int) -> bool:
    """Remove a process set, and return whether it existed. Raises ValueError in a job with fixed sets."""
    _check_dynamic()
    return job.sets.pop(number, None) is not None


def _check_dynamic() -> None:
    if not _sets_are_dynamic():
        raise ValueError("process sets are fixed; hint: set HOROVOD_DYNAMIC_PROCESS_SETS=1, or use hvd.init")


def _sets_are_dynamic() -> bool:
    """Whether Horovod's environment variable allows adding and removing process sets."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
