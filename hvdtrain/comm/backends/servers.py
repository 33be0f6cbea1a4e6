"""Ranks joined for parameter servers: whoever asks a server waits for its answer only, and for no other rank.

Every rank has a TCP stream to rank 0 and to each rank that holds a part of the parameters. A holder has a thread for
each of these streams, which reads a question, lets the store answer it and sends the answer; what the store does is the
strategy's matter. A rank asks all holders at once, the one in its own process by a call.

The small collectives go through rank 0's threads as a star: what each rank gave is put together there and sent to all.
A rank whose stream ends is left out from then on: `size` is the number of ranks that took part in the last collective,
`rank` the place among them, so that whoever counts or divides work by them is right about those that are left. Only the
loss of a holder, and rank 0 is one, is felt by the others.

MPI is left as soon as the ranks are joined: nobody waits in it for a rank that has died.
"""

from __future__ import annotations

import itertools
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from hvdtrain.comm.backends.base import Alone, Meeting, PeerLost, Reach
from hvdtrain.comm.backends.tcp import PATIENCE_S, Stream, joined, swap
from hvdtrain.sentinel.auth import Party
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

NUMBERS = 4
"""float64 that go with each question and answer"""
PULL, PUSH, MEET = range(3)
"""Kinds of question, its first byte"""


class Store(Protocol):
    """A part of the parameters. Called by several threads."""

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """Takes `rank`'s gradients, if it sent any, and fills in the weights as they are then.

        `gradients` (float32 of the part's length, the store's to change) and NUMBERS float64 came with the question;
        returned are NUMBERS float64 for the answer.
        """


class Star:
    """Rank 0's side of the collectives."""

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._living = set(range(1, ranks))
        self._given: dict[int, np.ndarray] = {}
        self._answer, self._rounds = np.empty(0, np.uint8), 0

    def give(self, rank: int, mine: np.ndarray) -> np.ndarray:
        """In the thread of rank `rank`: its part, for the answer to all."""
        with self._changed:
            self._given[rank], before = mine, self._rounds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rounds > before)
            return self._answer

    def gathered(self, mine: np.ndarray) -> dict[int, np.ndarray]:
        """In rank 0's own thread: what all living ranks gave, in rank order."""
        with self._changed:
            self._changed.wait_for(lambda: self._living <= set(self._given))
            given, self._given = self._given, {}
            return {0: mine, **{rank: given[rank] for rank in sorted(self._living)}}

    def tell(self, answer: np.ndarray) -> None:
        with self._changed:
            self._answer, self._rounds = answer, self._rounds + 1
            self._changed.notify_all()

    def lose(self, rank: int) -> int:
        """Without this rank from now on; how many are left."""
        with self._changed:
            self._living.discard(rank)
            self._changed.notify_all()
            return len(self._living) + 1


class ServerRanks(Alone):
    """See `collectives.Alone`; `serve` and `ask` are for the strategy."""

    carrier = "servers"

    def __init__(self, meeting: Meeting, reach: Reach) -> None:
        """Raises Failure (69) if a rank cannot be reached."""
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self._me = Party(meeting.secret, b"servers", meeting.rank)
        self._number, self._reach = meeting.rank, reach
        """This rank's number, however many others are left"""
        self.sent_bytes = 0
        """Gradients and weights given to ranks of other hosts; `local_sent_bytes`: of this host"""
        self._counting = threading.Lock()
        self._ranks = range(meeting.size)
        self._leaving = False
        self._streams: dict[int, Stream] = {}
        """To rank 0 and the holders"""
        self._threads: list[threading.Thread] = []
        """One for each other rank, if this one is a holder"""
        self._star = Star(self.size) if self.rank == 0 else None
        self._store: Store | None = None
        self._asking = ThreadPoolExecutor(1)
        self._holders, self._parts = [0], [slice(0, 0)]
        self._hosts = self._join(meeting.gather, [0])
        meeting.leave()

    def _join(self, gather: Callable[[bytes], Sequence[bytes]], holders: list[int]) -> list[str]:
        """Connects all ranks with these holders; each rank's host. Collective."""
        holds = self._number in holders
        listener = socket.create_server((self._reach.address, 0), backlog=socket.SOMAXCONN) if holds else None
        port = listener.getsockname()[1] if listener else 0
        mine = f"{socket.gethostname()} {self._reach.address} {port}"
        told = [each.decode().split() for each in gather(mine.encode())]
        targets = [holder for holder in holders if holder != self._number]
        awaited = set(self._ranks) - {self._number} if listener else set[int]()
        reached, arrived = joined(told, self._me, targets, listener, awaited)
        if listener:
            listener.close()
        for stream in (reached | arrived).values():  # a holder's threads always wait for questions
            stream.awaited = False
        self._streams |= reached
        for stream in arrived.values():
            self._threads.append(threading.Thread(target=self._attend, args=(stream,), daemon=True))
            self._threads[-1].start()
        return [f"{host} {address}" for host, address, *_ in told]

    # --- parameters ---------------------------------------------------------------------------------------------

    def serve(self, parts: int, size: int, make: Callable[[slice], Store]) -> bool:
        """Cuts `size` numbers into parts, one per host for 0, made by `make` where they are held. Collective.

        The first ranks of the hosts become holders, then the second ones ... Whether this one did. Raises Failure (78)
        if there are fewer ranks than parts.
        """
        before = [self._hosts[:rank].count(host) for rank, host in enumerate(self._hosts)]
        order = sorted(self._ranks, key=lambda rank: (before[rank], rank))
        count = parts or before.count(0)
        if count > len(order):
            what = f"{count} servers: there are {len(order)} ranks; give that many at most"
            raise Failure(what, exits.BAD_CONFIG)
        self._holders = order[:count]
        borders = [size * part // count for part in range(count + 1)]
        self._parts = [slice(begin, end) for begin, end in itertools.pairwise(borders)]
        holds = self._number in self._holders
        if holds:
            self._store = make(self._parts[self._holders.index(self._number)])
        self._join(self.gather, self._holders[1:])  # from then on all may ask
        self._asking = ThreadPoolExecutor(max(1, count), thread_name_prefix="hvdtrain-ask")
        return holds

    def ask(self, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """Sends each holder its part of the gradients, if any, and fills in the weights it answers with.

        Both are 1-d float32 of the parameters' size; `numbers` (NUMBERS,) float64 go to all. What each answered:
        (parts, NUMBERS). Raises PeerLost if a holder is gone.
        """
        own, answers = None, {}
        for part, holder in zip(self._parts, self._holders, strict=True):
            mine = None if gradients is None else gradients[part]
            if holder == self._number:
                own = mine, weights[part]
            else:
                answers[holder] = self._asking.submit(self._ask, holder, numbers, mine, weights[part])
        answered = {}
        if own is not None:
            assert self._store is not None
            answered[self._number] = self._store.answer(self._number, numbers, *own)
        answered |= {holder: answer.result() for holder, answer in answers.items()}
        return np.stack([answered[holder] for holder in self._holders])

    def _ask(self, holder: int, numbers: np.ndarray, mine: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        stream = self._streams[holder]
        try:
            swap(stream, _question(PULL if mine is None else PUSH, numbers.view(np.uint8)), None)
            if mine is not None:
                swap(stream, mine, None)
                self._count(stream, mine.nbytes)
            answer = swap(None, None, stream, np.empty(NUMBERS))
            swap(None, None, stream, weights)
            return answer
        except PeerLost as error:
            raise self._lost(holder, error) from error

    def _attend(self, stream: Stream) -> None:
        """The thread for one rank: answers its questions until it leaves or dies."""
        scratch: list[np.ndarray] = []
        try:
            while True:
                question = swap(None, None, stream)
                kind, told = question[0], question[1:]
                if kind == MEET:
                    assert self._star is not None
                    swap(stream, self._star.give(stream.rank, told), None)
                else:
                    self._answer(stream, np.frombuffer(told.tobytes()), kind == PUSH, scratch)
        except PeerLost:
            if self._star is not None:
                left = self._star.lose(stream.rank)
                if not self._leaving and stream.rank not in self._holders:
                    rest = f"{left} ranks go on" if left > 1 else "1 rank goes on"
                    gone = f"rank {stream.rank} on {self._host(stream.rank)} is gone"
                    print(f"hvdtrain: {gone}; {rest}", file=sys.stderr, flush=True)
        finally:  # whatever it was, the rank must not wait for an answer
            stream.socket.close()

    def _answer(self, stream: Stream, numbers: np.ndarray, pushed: bool, scratch: list[np.ndarray]) -> None:
        """`scratch` is for gradients and weights on their way, kept from question to question."""
        assert self._store is not None
        if not scratch:
            part = self._parts[self._holders.index(self._number)]
            scratch += [np.empty(part.stop - part.start, np.float32) for _ in range(2)]
        gradients, weights = scratch
        if pushed:
            swap(None, None, stream, gradients)
        swap(stream, self._store.answer(stream.rank, numbers, gradients if pushed else None, weights), None)
        swap(stream, weights, None)
        self._count(stream, weights.nbytes)

    def _count(self, stream: Stream, sent_bytes: int) -> None:
        with self._counting:
            if stream.local:
                self.local_sent_bytes += sent_bytes
            else:
                self.sent_bytes += sent_bytes

    def _lost(self, holder: int, error: Exception) -> PeerLost:
        part = f"part {self._holders.index(holder) + 1} of {len(self._holders)} of the parameters"
        return PeerLost(f"rank {holder} on {self._host(holder)}, which holds {part}, is gone ({error})")

    def elsewhere(self, ranks: Iterable[int]) -> int:
        """How many of these ranks are on other hosts."""
        return sum(self._hosts[rank] != self._hosts[self._number] for rank in ranks)

    def _host(self, rank: int) -> str:
        return self._hosts[rank].split()[0]

    # --- small host arrays --------------------------------------------------------------------------------------

    def gather(self, mine: bytes) -> list[bytes]:
        """What every living rank gave, in rank order."""
        own = np.frombuffer(mine, np.uint8)

        def joined(given: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.array([each.size for each in given]).view(np.uint8), *given])

        whole = self._meet(own, joined)
        lengths = np.frombuffer(whole[: 8 * self.size].tobytes(), np.int64)
        return [part.tobytes() for part in np.split(whole[8 * self.size :], np.cumsum(lengths)[:-1])]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        """Over the living ranks, in rank order."""

        def summed(given: Sequence[np.ndarray]) -> np.ndarray:
            total = np.frombuffer(given[0].tobytes(), values.dtype).copy()
            for each in given[1:]:
                total += np.frombuffer(each.tobytes(), values.dtype)
            return total.view(np.uint8)

        mine = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return np.frombuffer(self._meet(mine, summed).tobytes(), values.dtype).reshape(values.shape).copy()

    def _meet(self, mine: np.ndarray, together: Callable[[list[np.ndarray]], np.ndarray]) -> np.ndarray:
        """What rank 0 makes of all that the living ranks gave (bytes), the same on all."""
        if self._star is not None:
            given = self._star.gathered(mine)
            living, answer = np.array(list(given)), together(list(given.values()))
            self._star.tell(np.concatenate([np.array([living.size]).view(np.uint8), living.view(np.uint8), answer]))
        else:
            try:
                swap(self._streams[0], _question(MEET, mine), None)
                told = swap(None, None, self._streams[0])
            except PeerLost as error:
                raise self._lost(0, error) from error
            count = int(np.frombuffer(told[:8].tobytes(), np.int64)[0])
            living, answer = np.frombuffer(told[8 : 8 + 8 * count].tobytes(), np.int64), told[8 + 8 * count :]
        self.size, self.rank = living.size, living.tolist().index(self._number)
        return answer

    def leave(self) -> None:
        self._leaving = True
        self.gather(b"")
        for stream in self._streams.values():
            stream.socket.close()
        self._asking.shutdown()
        for thread in self._threads:  # they still send the answer that lets the others leave
            thread.join(PATIENCE_S)


def _question(kind: int, told: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array([kind], np.uint8), told])
