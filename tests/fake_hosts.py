"""Hosts as threads that hand each other real copies: the laws of a reducer without processes or sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
PATIENCE_S = 120.0


class FakeHosts:
    """See `collectives.Hosts`."""

    def __init__(self, index: int, count: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.index, self.count = index, count
        self.sent_bytes = 0
        self._barrier, self._box = barrier, box

    def pairwise(self, part: Callable[[int], np.ndarray], *, even: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        mine = {host: part(host).copy() for host in range(self.count) if host != self.index}
        assert not even or len({each.size for each in mine.values()}) <= 1
        self.sent_bytes += sum(each.nbytes for each in mine.values())
        theirs = self._all(("pairwise", mine))
        return ((host, sent[self.index].view(np.uint8)) for host, sent in enumerate(theirs) if host != self.index)

    def gather(self, part: np.ndarray, *, even: bool = False) -> list[np.ndarray]:
        self.sent_bytes += part.nbytes * (self.count - 1)
        return self._all(("gather", part.copy()))

    def sum(self, values: np.ndarray) -> None:
        self.sent_bytes += 2 * (self.count - 1) * values.nbytes // self.count
        whole = self._all(("sum", values.copy()))
        values[:] = whole[0]
        for other in whole[1:]:
            values += other

    def _all(self, mine: tuple[str, Any]) -> list[Any]:
        self._box[self.index] = mine
        self._barrier.wait(PATIENCE_S)
        kinds = {kind for kind, _ in self._box}
        found = [given for _, given in self._box]
        self._barrier.wait(PATIENCE_S)
        assert len(kinds) == 1, f"hosts call in different order: {kinds}"
        return found


def run(count: int, program: Callable[[Any], T]) -> list[T]:
    """Calls `program(hosts)` on `count` hosts at once; what each returned, in host order."""
    barrier, box = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def host(index: int) -> None:
        try:
            results[index] = program(FakeHosts(index, count, barrier, box))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=host, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (broken or errors)[0]
    return results
