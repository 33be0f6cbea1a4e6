"""Communication with parameter servers: a rank that asks a server waits for its answer only, and for no other rank.

Every rank has a TCP stream to rank 0 and to each server, a rank that holds a part of the parameters. A server has one
thread per stream, which reads a request, lets the store answer it, and sends the answer. The strategy implements the
store. A rank asks all servers at once; the one in its own process answers through a call.

Small collectives pass through the threads of rank 0, as a star: rank 0 combines the values of all ranks and sends them
the result.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from hvdtrain.comm import world
from hvdtrain.comm.backends.base import Communicator, Endpoint, Rendezvous
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.stream import PATIENCE_S, Stream, exchange_ports, listen, open_streams, swap
from hvdtrain.sentinel.auth import Party
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

NUMBERS = 4
"""Number of float64 values that accompany each request and answer"""
PULL, PUSH, GATHER = range(3)
"""Kinds of request, the first byte of each"""


class Store(Protocol):
    """A part of the parameters. Several threads call it."""

    def answer(self, rank: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """Take the gradients of rank `rank`, if it sent any, and fill in the current weights.

        `gradients` is float32 with the length of the part; the store may change it. `numbers`, NUMBERS float64 values,
        came with the request. Returns NUMBERS float64 values for the answer.
        """


class Star:
    """Rank 0's side of the collectives."""

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._others = ranks - 1
        self._given: dict[int, np.ndarray] = {}
        self._answer, self._rounds = np.empty(0, np.uint8), 0
        self._lost: PeerLost | None = None

    def give(self, rank: int, part: np.ndarray) -> np.ndarray:
        """Add the part of rank `rank` and return the answer to all. Called in the rank's thread."""
        with self._changed:
            self._given[rank], before = part, self._rounds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._rounds > before)
            return self._answer

    def gathered(self, own: np.ndarray) -> list[np.ndarray]:
        """Wait for all parts; return them in rank order. Called in rank 0's main thread. Raises PeerLost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._given) == self._others)
            if self._lost and len(self._given) < self._others:
                raise self._lost
            given, self._given = self._given, {}
            return [own, *(given[rank] for rank in sorted(given))]

    def answer_all(self, answer: np.ndarray) -> None:
        with self._changed:
            self._answer, self._rounds = answer, self._rounds + 1
            self._changed.notify_all()

    def lose(self, error: PeerLost) -> None:
        """A rank is gone, so rank 0 must not wait for its part. Called in the rank's thread."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()


class ServerCommunicator(Communicator):
    """Ranks connected to parameter servers. The strategy calls `serve` and `ask`.

    `sent_bytes` and `local_sent_bytes` count gradients and weights.
    """

    library = "servers"

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        """Raises Failure (69) if a rank cannot be reached."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        self._me = Party(rendezvous.job_key, b"servers", rendezvous.rank)
        self._endpoint, self._counting = endpoint, threading.Lock()
        self._streams: dict[int, Stream] = {}
        """Streams to rank 0 and the servers"""
        self._threads: list[threading.Thread] = []
        """On a server, one for each other rank"""
        self._star = Star(self.size) if self.rank == 0 else None
        self._store: Store | None = None
        self._asking = ThreadPoolExecutor(1)
        self._servers, self._parts = [0], [slice(0, 0)]
        self._hosts = self._connect(rendezvous.gather_bytes, [0])

    def _connect(self, gather_bytes: Callable[[bytes], Iterable[bytes]], servers: list[int]) -> list[tuple[str, str]]:
        """Connect all ranks to these servers; return each rank's machine. Collective."""
        listener = listen(self._endpoint) if self.rank in servers else None
        ranks = exchange_ports(gather_bytes, self._endpoint, listener)
        targets = [server for server in servers if server != self.rank]
        expected = set(range(self.size)) - {self.rank} if listener else set[int]()
        connected, accepted = open_streams(ranks, self._me, targets, listener, expected)
        if listener:
            listener.close()
        for stream in (connected | accepted).values():  # a server's threads always wait for requests
            stream.blocks_rank = False
        self._streams |= connected
        for stream in accepted.values():
            self._threads.append(threading.Thread(target=self._serve_rank, args=(stream,), daemon=True))
            self._threads[-1].start()
        return [rank.machine for rank in ranks]

    # --- parameters ------------------------------------------------------------------------------------------------

    def serve(self, parts: int, size: int, make: Callable[[slice], Store]) -> None:
        """Divide `size` numbers into parts (0: one per host); `make` creates each part's store. Collective.

        The first ranks of the hosts become servers, then the second ranks, and so on. Raises Failure (78) if there are
        fewer ranks than parts.
        """
        before = [self._hosts[:rank].count(host) for rank, host in enumerate(self._hosts)]
        order = sorted(range(self.size), key=lambda rank: (before[rank], rank))
        count = parts or before.count(0)
        if count > self.size:
            problem = f"{count} servers, but there are {self.size} ranks; hint: use at most {self.size} servers"
            raise Failure(problem, exits.BAD_CONFIG)
        self._servers = order[:count]
        borders = [size * part // count for part in range(count + 1)]
        self._parts = [slice(begin, end) for begin, end in itertools.pairwise(borders)]
        if self.rank in self._servers:
            self._store = make(self._parts[self._servers.index(self.rank)])
        self._connect(self.gather_bytes, self._servers[1:])  # from then on all ranks may ask
        self._asking = ThreadPoolExecutor(max(1, count), thread_name_prefix="hvdtrain-ask")

    def ask(self, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        """Send each server its part of the gradients, if any, and fill in the weights that it answers with.

        Gradients and weights are one-dimensional float32 arrays of the size of the parameters. `numbers`, (NUMBERS,)
        float64, are sent to all servers. Returns the numbers of the answers, (parts, NUMBERS). Raises PeerLost.
        """
        own, pending = None, {}
        for part, server in zip(self._parts, self._servers, strict=True):
            gradients_of_part = None if gradients is None else gradients[part]
            if server == self.rank:
                own = gradients_of_part, weights[part]
            else:
                pending[server] = self._asking.submit(self._ask, server, numbers, gradients_of_part, weights[part])
        answers = {}
        if own is not None:
            assert self._store is not None
            answers[self.rank] = self._store.answer(self.rank, numbers, *own)
        answers |= {server: answer.result() for server, answer in pending.items()}
        return np.stack([answers[server] for server in self._servers])

    def _ask(self, server: int, numbers: np.ndarray, gradients: np.ndarray | None, weights: np.ndarray) -> np.ndarray:
        stream = self._streams[server]
        swap(stream, _request(PULL if gradients is None else PUSH, numbers.view(np.uint8)), None)
        if gradients is not None:
            swap(stream, gradients, None)
            self._count(stream, gradients.nbytes)
        answer = swap(None, None, stream, np.empty(NUMBERS))
        swap(None, None, stream, weights)
        return answer

    def _serve_rank(self, stream: Stream) -> None:
        """The thread for one rank: answers its requests until its stream ends."""
        scratch: list[np.ndarray] = []
        try:
            while True:
                request = swap(None, None, stream)
                kind, content = request[0], request[1:]
                if kind == GATHER:
                    assert self._star is not None
                    swap(stream, self._star.give(stream.rank, content), None)
                else:
                    self._answer(stream, np.frombuffer(content.tobytes()), kind == PUSH, scratch)
        except PeerLost as error:
            for star in (self._star, self._store):
                if isinstance(star, Star):
                    star.lose(error)
        finally:  # after any error: the rank must not wait for an answer
            stream.socket.close()

    def _answer(self, stream: Stream, numbers: np.ndarray, pushed: bool, scratch: list[np.ndarray]) -> None:
        """`scratch` holds the buffers for gradients and weights, reused for all requests of a rank."""
        assert self._store is not None
        if not scratch:
            part = self._parts[self._servers.index(self.rank)]
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

    def count_remote(self, ranks: Iterable[int]) -> int:
        """How many of these ranks are on other hosts."""
        return sum(self._hosts[rank] != self._hosts[self.rank] for rank in ranks)

    # --- small arrays in host memory -------------------------------------------------------------------------------

    def gather_bytes(self, own: bytes) -> list[bytes]:
        def join(parts: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.array([part.size for part in parts]).view(np.uint8), *parts])

        whole = self._combine(np.frombuffer(own, np.uint8), join)
        lengths = np.frombuffer(whole[: 8 * self.size].tobytes(), np.int64)
        return [part.tobytes() for part in np.split(whole[8 * self.size :], np.cumsum(lengths)[:-1])]

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the elementwise sum over ranks, added in rank order."""

        def add(parts: Sequence[np.ndarray]) -> np.ndarray:
            total = np.frombuffer(parts[0].tobytes(), values.dtype).copy()
            for part in parts[1:]:
                total += np.frombuffer(part.tobytes(), values.dtype)
            return total.view(np.uint8)

        own = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return np.frombuffer(self._combine(own, add).tobytes(), values.dtype).reshape(values.shape).copy()

    def _combine(self, own: np.ndarray, function: Callable[[list[np.ndarray]], np.ndarray]) -> np.ndarray:
        """Apply `function` on rank 0 to the bytes of all ranks; return the result on all of them."""
        if self._star is None:
            swap(self._streams[0], _request(GATHER, own), None)
            return swap(None, None, self._streams[0])
        answer = function(self._star.gathered(own))
        self._star.answer_all(answer)
        return answer

    def _disconnect(self) -> None:
        self.gather_bytes(b"")
        for stream in self._streams.values():
            stream.socket.close()
        self._asking.shutdown()
        for thread in self._threads:  # they still send the answer of the last gather
            thread.join(PATIENCE_S)


world.BACKENDS["servers"] = lambda _, rendezvous, endpoint, gpu: ServerCommunicator(rendezvous, endpoint)


def _request(kind: int, content: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array([kind], np.uint8), content])
