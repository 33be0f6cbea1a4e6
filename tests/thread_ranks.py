"""Ranks as threads of this process: where they meet, and what each of them returned or raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from conftest import LIMIT_S

from hvdtrain.comm.backends.base import Endpoint

PATIENCE_S = 120.0
"""For the slowest rank to come to the room"""


class Room:
    """Ranks that tell each other things; `listening` is called once, with what they told each other first."""

    def __init__(self, size: int, listening: Callable[[list[Any]], None] = lambda told: None) -> None:
        self.size = size
        self._box: list[Any] = [None] * size
        self._first = [listening]
        self._barrier = threading.Barrier(size, self._all_are_here)

    def _all_are_here(self) -> None:
        if self._first:
            self._first.pop()(list(self._box))

    def gather(self, rank: int, mine: Any) -> list[Any]:
        self._box[rank] = mine
        self._barrier.wait(PATIENCE_S)
        found = list(self._box)
        self._barrier.wait(PATIENCE_S)
        return found

    def close(self) -> None:
        """Nobody waits here any longer."""
        self._barrier.abort()


def at_once(programs: Sequence[Callable[[], Any]], *told: type[Exception], room: Room | None = None) -> list[Any]:
    """Calls each on a thread of its own. What they returned, or raised if it is one of the kinds `told`; any other
    error closes the room and is raised."""
    results: list[Any] = [None] * len(programs)
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = programs[index]()
        except told as error:
            results[index] = error
        except BaseException as error:
            errors.append(error)
            if room is not None:
                room.close()

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    assert not any(thread.is_alive() for thread in threads), "waits for ever"
    return results


class ThreadRendezvous:
    """See `comm.backends.base.Rendezvous`: ranks of one host."""

    job_key = b"s" * 32

    def __init__(self, rank: int, room: Room) -> None:
        self.rank = self.local_rank = rank
        self.size = self.local_size = room.size
        self._room = room

    def gather_bytes(self, own: bytes) -> list[bytes]:
        return self._room.gather(self.rank, own)

    def shutdown(self) -> None:
        pass


def meetings(size: int, listening: Callable[[list[bytes]], None] = lambda told: None) -> list[ThreadRendezvous]:
    room = Room(size, listening)
    return [ThreadRendezvous(rank, room) for rank in range(size)]


def reach(rank: int) -> Endpoint:
    return Endpoint(f"127.0.0.{1 + rank}", "lo", loopback=True)
