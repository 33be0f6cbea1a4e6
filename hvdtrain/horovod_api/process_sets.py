"""Process sets: some of the ranks, for calls among them. One class serves the TCP backend and Horovod."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from hvdtrain.horovod_api import ranks
from hvdtrain.horovod_api.calls import needs_horovod

Base: Any = object
with contextlib.suppress(ImportError):
    from horovod.common.process_sets import ProcessSet as Base  # type: ignore[no-redef]


class ProcessSet(Base):
    """Some of the ranks. `hvd.init(process_sets=...)` or `hvd.add_process_set` numbers it.

    A subclass of Horovod's, so that Horovod's functions accept it.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Any) -> None:
        """Raises ValueError for anything but ranks, or a communicator of mpi4py while Horovod carries the calls."""
        if Base is not object and not isinstance(ranks_or_comm, Sequence):
            super().__init__(ranks_or_comm)
            return
        self.ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in self.ranks):
            raise ValueError("ProcessSet takes a list of ranks")

    def _members(self) -> tuple[int, ...] | None:
        return None if self.process_set_id is None else ranks.job().sets.get(self.process_set_id)

    def size(self) -> int | None:
        """The number of ranks in the set; None before it is numbered."""
        if _by_horovod():
            return super().size()
        members = self._members()
        return None if members is None else len(members)

    def rank(self) -> int | None:
        """This rank's index in the set; None before it is numbered. Raises ValueError if it is not a member."""
        if _by_horovod():
            return super().rank()
        members = self._members()
        return None if members is None else members.index(ranks.job().rank)

    def included(self) -> bool | None:
        """Whether this rank is a member."""
        if _by_horovod():
            return super().included()
        return ranks.job().rank in (self.ranks or ())

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _by_horovod() -> bool:
    return Base is not object and not ranks.is_connected()


class _AllRanks(ProcessSet):
    """The set of all ranks. Horovod's functions compare it with their own."""

    process_set_id = 0

    def __eq__(self, other: object) -> bool:
        return getattr(other, "process_set_id", None) == 0

    def __hash__(self) -> int:
        return 0


global_process_set = _AllRanks([])


def numbered(number: int) -> ProcessSet:
    """The process set with this number."""
    process_set = ProcessSet(ranks.job().sets[number])
    process_set.process_set_id = number
    return process_set


def begin(comm: Any, process_sets: Any) -> None:
    """Number the process sets of `hvd.init` in a job on the TCP backend.

    Raises NotImplementedError for `comm` unless it has all ranks.
    """
    current = ranks.job()
    everyone = list(range(current.size))
    if comm is not None and (not isinstance(comm, Sequence) or list(comm) not in ([], everyone)):
        raise needs_horovod("hvd.init(comm=...), a job of a part of the ranks,")
    global_process_set.ranks = everyone
    for process_set in process_sets if isinstance(process_sets, Sequence) and process_sets != "dynamic" else ():
        process_set.process_set_id = _number(process_set.ranks)


def _number(members: Sequence[int]) -> int | None:
    """Number a process set; None if it exists. Raises ValueError for unknown ranks."""
    current, members = ranks.job(), tuple(sorted(members))
    if unknown := [rank for rank in members if not 0 <= rank < current.size]:
        raise ValueError(f"process set {list(members)}: rank {unknown[0]} does not exist (size {current.size})")
    if members in current.sets.values():
        return None
    number = max(current.sets) + 1
    current.sets[number] = members
    return number


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Number a set of ranks. Raises ValueError if it exists, or HOROVOD_DYNAMIC_PROCESS_SETS is not 1. Collective."""
    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if not _by_horovod():
        _check_dynamic()
        number = _number(new.ranks or ())
    else:
        from horovod.common import process_sets

        number = process_sets.add_process_set(new).process_set_id
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {new}")
    new.process_set_id = number
    return new


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set and return whether it existed. Raises ValueError unless HOROVOD_DYNAMIC_PROCESS_SETS is 1."""
    if _by_horovod():
        from horovod.common import process_sets

        return bool(process_sets.remove_process_set(process_set))
    if not process_set.process_set_id:
        return False
    number, process_set.process_set_id = process_set.process_set_id, None
    _check_dynamic()
    return ranks.job().sets.pop(number, None) is not None


def _check_dynamic() -> None:
    """Raise ValueError unless Horovod's environment variable allows adding and removing process sets."""
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
        raise ValueError("process sets are fixed; hint: set HOROVOD_DYNAMIC_PROCESS_SETS=1, or use hvd.init")


def members(process_set: Any) -> tuple[int, ...] | None:
    """The ranks of a set for `Calls`; None for all ranks. Raises ValueError if the set has no number."""
    number = process_set.process_set_id
    if number == 0:
        return None
    if number is None or number not in ranks.job().sets:
        raise ValueError(f"{process_set} does not exist; hint: pass it to hvd.init(process_sets=...)")
    return ranks.job().sets[number]
