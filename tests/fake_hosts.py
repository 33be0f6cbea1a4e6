"""LeaderGroup as threads that hand each other real copies: the laws of a reducer without processes or sockets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from thread_ranks import Room, at_once

from hvdtrain.comm.backends.base import LeaderGroup
from hvdtrain.comm.backends.tcp import SMALL_BYTES
from hvdtrain.strategies.reducers.base import Reducer

T = TypeVar("T")


class FakeHosts(LeaderGroup):
    """See `collectives.LeaderGroup`."""

    def __init__(self, index: int, room: Room) -> None:
        self.index, self.count = index, room.size
        self.sent_bytes = 0
        self._room = room

    def all_to_all_streamed(
        self, part: Callable[[int], np.ndarray], *, even: bool = False
    ) -> Iterator[tuple[int, np.ndarray]]:
        mine = {host: part(host).copy() for host in range(self.count) if host != self.index}
        assert not even or len({each.size for each in mine.values()}) <= 1
        self.sent_bytes += sum(each.nbytes for each in mine.values())
        theirs = self._all(("all_to_all", mine))
        return ((host, sent[self.index].view(np.uint8)) for host, sent in enumerate(theirs) if host != self.index)

    def all_gather(self, part: np.ndarray, *, even: bool = False) -> list[np.ndarray]:
        self.sent_bytes += part.nbytes * (self.count - 1)
        return self._all(("all_gather", part.copy()))

    def all_reduce(self, values: np.ndarray) -> None:
        if values.nbytes <= SMALL_BYTES or values.size < self.count:  # as the TCP backend sends them
            self.sent_bytes += (self.count - 1) * values.nbytes
        else:
            self.sent_bytes += 2 * (self.count - 1) * values.nbytes // self.count
        whole = self._all(("all_reduce", values.copy()))
        values[:] = whole[0]
        for other in whole[1:]:
            values += other

    def _all(self, mine: tuple[str, Any]) -> list[Any]:
        found = self._room.gather(self.index, mine)
        kinds = {kind for kind, _ in found}
        assert len(kinds) == 1, f"hosts call in different order: {kinds}"
        return [given for _, given in found]


def run(count: int, program: Callable[[Any], T]) -> list[T]:
    """Calls `program(hosts)` on `count` hosts at once; what each returned, in host order."""
    room = Room(count)
    return at_once([functools.partial(program, FakeHosts(index, room)) for index in range(count)], room=room)


def rounds(reducers: Sequence[Reducer], inputs: Sequence[np.ndarray] | np.ndarray) -> tuple[np.ndarray, int]:
    """Run one all-reduce with a reducer per host. Returns the common result and the bytes that each host sends."""

    def host(hosts: LeaderGroup) -> tuple[np.ndarray, int]:
        values = inputs[hosts.index].copy()
        if hosts.count > 1:
            reducers[hosts.index].all_reduce(values, hosts)
        else:
            reducers[hosts.index].add_residual(values)
        return values, hosts.sent_bytes

    results = run(len(reducers), host)
    assert len({(values.tobytes(), sent) for values, sent in results}) == 1
    return results[0]
