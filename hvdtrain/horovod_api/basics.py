"""What stands in for Horovod's C library below `horovod.common.basics` while streams carry: who is here.

Horovod's Python functions (`rank`, `cross_size`, `ProcessSet` ...) ask a library of C functions and raise their errors
by its answers. This one has the same functions with the same answers; what it does not know is the real library's, such
as what Horovod was built with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hvdtrain.horovod_api.job import Job

NOT_DYNAMIC, UNKNOWN_SET, FOREIGN_SET, EXISTING_SET = -2, -3, -4, -6
"""Answers that are errors; their texts are Horovod's"""
TOLD = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
"""What of a job they ask for"""
FIXED = {"is_initialized": True, "mpi_enabled": False, "gloo_enabled": False, "stop_timeline": 0}
"""What every job answers"""


class Basics:
    """Each method is called by `horovod.common.basics.HorovodBasics`, which states what it means."""

    def __init__(self, job: Job, real: Any, shutdown: Callable[[], None]) -> None:
        """`shutdown`: ends the job, and takes this library away."""
        self._job, self._real, self._shutdown = job, real, shutdown

    def __getattr__(self, name: str) -> Any:
        what = name.removeprefix("horovod_")
        if what in FIXED:
            return lambda: FIXED[what]
        if what in TOLD:
            return lambda: getattr(self._job, what)
        return getattr(self._real, name)

    def horovod_init(self, comm: Any, comm_size: Any, ranks: Any, sizes: Any, count: Any) -> bool:
        job = self._job
        if comm_size.value and list(comm) != list(range(job.size)):
            raise NotImplementedError(
                f"hvd.init(comm={list(comm)}): on streams a job is all the ranks that were started; give process_sets "
                "to let some of them work together"
            )
        at = 0
        for size in sizes[: count.value]:
            self._add(ranks[at : at + size])
            at += size
        return True

    @property
    def horovod_init_multi_comm(self) -> NoReturn:
        """Horovod sets the types of its arguments before it calls it."""
        raise NotImplementedError(
            "hvd.init(comm=<MPI communicator>): on streams there is none; call hvd.init() and give process_sets as "
            "lists of ranks"
        )

    def horovod_shutdown(self) -> None:
        self._shutdown()

    def horovod_start_timeline(self, *arguments: Any) -> int:
        raise NotImplementedError("hvd.start_timeline: no Horovod runs beside a strategy; use the framework's profiler")

    # --- process sets -------------------------------------------------------------------------------------------

    def _add(self, ranks: Sequence[int]) -> int:
        asked, sets = tuple(sorted(ranks)), self._job.sets
        if unknown := [rank for rank in asked if not 0 <= rank < self._job.size]:
            raise ValueError(f"process set {list(asked)}: there is no rank {unknown[0]} among {self._job.size}")
        if asked in sets.values():
            return EXISTING_SET
        number = max(sets) + 1
        sets[number] = asked
        return number

    def horovod_add_process_set(self, ranks: Any, count: Any) -> int:
        return self._add(list(ranks)) if _dynamic() else NOT_DYNAMIC

    def horovod_remove_process_set(self, number: Any) -> int:
        if not _dynamic():
            return NOT_DYNAMIC
        return UNKNOWN_SET if self._job.sets.pop(number.value, None) is None else int(number.value)

    def horovod_number_of_process_sets(self) -> int:
        return len(self._job.sets)

    def horovod_process_set_ids(self, into: Any) -> None:
        into[:] = list(self._job.sets)

    def horovod_process_set_size(self, number: Any) -> int:
        ranks = self._job.sets.get(number.value)
        return UNKNOWN_SET if ranks is None else len(ranks)

    def horovod_process_set_ranks(self, number: Any, into: Any) -> int:
        into[:] = list(self._job.sets[number.value])
        return 0

    def horovod_process_set_rank(self, number: Any) -> int:
        ranks = self._job.sets.get(number.value)
        if ranks is None:
            return UNKNOWN_SET
        return ranks.index(self._job.rank) if self._job.rank in ranks else FOREIGN_SET


def _dynamic() -> bool:
    """Whether process sets may come and go, as Horovod reads its variable."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") not in ("", "0")
