"""Horovod's collective calls on NumPy arrays, over the TCP backend.

    calls = Calls(rendezvous, endpoint)    # on all ranks
    handle = calls.start("allreduce", array, name="loss", op=Op.AVERAGE)
    ...
    mean = calls.finish(handle)

Ranks may start calls in any order and from any thread. One thread per rank carries them out: it sends a request to
rank 0, rank 0 responds when all members have asked (`coordinator`), and the members carry out the calls in the order of
the responses (`arithmetic`). An array of at most SMALL_BYTES travels with the request and the response, in one round
trip. Idle ranks neither poll nor send.

The meaning and the errors of each call follow Horovod 0.28 (horovod.readthedocs.io, API). When the ranks disagree about
a call, `finish` raises the same error on all of them. A rank that has joined counts as zeros. Adasum needs Horovod.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.comm.backends.tcp import SMALL_BYTES, TcpLeaderGroup
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.stream import Stream
from hvdtrain.horovod_api import arithmetic
from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.horovod_api.connections import MessageConnection, connect_all
from hvdtrain.horovod_api.coordinator import Coordinator, Request, Response, pack, unpack
from hvdtrain.sentinel import waiting

SHUTDOWN = "no more calls are possible: {}; hint: see the output of the rank that ended first"
FLUSH_TIMEOUT_S = 10.0
"""How long `close` waits until all messages are sent"""
UNNAMED = ("barrier", "join")
"""Calls without arrays"""
INSTANCES: weakref.WeakSet[Calls] = weakref.WeakSet()

Arrays = np.ndarray | Sequence[np.ndarray]


def needs_horovod(feature: str) -> NotImplementedError:
    """The error for a feature that only Horovod's own backend has."""
    return NotImplementedError(f"{feature} needs Horovod's own backend; hint: unset HVDTRAIN_STRATEGY and strategy=")


@dataclasses.dataclass
class Call:
    """A call that was started and is not finished yet."""

    request: Request
    arrays: list[np.ndarray]
    out: list[np.ndarray] | None
    grouped: bool
    completed: threading.Event = dataclasses.field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Calls:
    """The calls of one rank. All methods are thread-safe."""

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        """Connects every rank to every other. Collective. Raises Failure (69) if a rank cannot be reached."""
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self._all_ranks = tuple(range(self.size))
        self._streams, self._connections = connect_all(rendezvous, endpoint)
        self._coordinator = Coordinator(waiting.limit_s)
        self._groups: dict[tuple[int, ...], TcpLeaderGroup] = {}
        self._responses: collections.deque[tuple[Response, bytes]] = collections.deque()
        self._lock = threading.Lock()
        self._handles = itertools.count()
        self._calls: dict[int, Call] = {}
        self._in_progress: dict[str, Call] = {}
        self._reserved: dict[str, Call] = {}
        """Calls by key until the user sees that they are done. Otherwise the speed of the ranks would decide whether a
        name can be used again"""
        self._new: collections.deque[Call] = collections.deque()
        self._unnamed: collections.Counter[tuple[int, ...]] = collections.Counter()
        """Calls without a name since all ranks have joined, of which they may have made different numbers until then"""
        self._closing, self._joins = False, 0
        self._shutdown_reason = ""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        INSTANCES.add(self)
        self._thread = threading.Thread(target=self._run, name="hvdtrain calls", daemon=True)
        self._thread.start()

    # --- for users ----------------------------------------------------------------------------------------------

    def start(
        self,
        kind: str,
        arrays: Arrays = (),
        *,
        name: str | None = None,
        op: Op = Op.AVERAGE,
        root: int = 0,
        splits: Sequence[int] | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        ranks: Sequence[int] | None = None,
        out: Arrays | None = None,
    ) -> int:
        """Starts a call and returns its handle at once. The arrays must not change until the call is done.

        Args:
            kind: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or join.
            arrays: One array, or a list for a grouped call (allreduce, allgather, reducescatter).
            root: The rank that broadcasts.
            ranks: The members; all ranks if None.
            out: Arrays for the results of allreduce and broadcast; may be `arrays` itself.

        Raises:
            ValueError: An argument is wrong, or the name is in use.
            TypeError: The type cannot be reduced.
            NotImplementedError: Only Horovod's own backend has this call.
            HorovodInternalError: Horovod's error for calls after a shutdown.
        """
        grouped = not isinstance(arrays, np.ndarray) and kind not in UNNAMED
        inputs = [np.asarray(array, order="C") for array in ([arrays] if isinstance(arrays, np.ndarray) else arrays)]
        outputs = None if out is None else [out] if isinstance(out, np.ndarray) else list(out)
        members = self._all_ranks if ranks is None else tuple(sorted(ranks))
        self._check(kind, inputs, Op(op), root, members)
        request = Request(
            kind=kind,
            name=kind,
            ranks=list(members),
            types=[arithmetic.type_name(array.dtype) for array in inputs],
            shapes=[list(array.shape) for array in inputs],
            op=int(op) if kind in ("allreduce", "reducescatter") else 0,
            root=members.index(root) if kind == "broadcast" else 0,
            scales=[float(prescale), float(postscale)],
            splits=arithmetic.check_splits(inputs[0], splits, len(members)) if kind == "alltoall" else None,
            inline=bool(inputs) and not grouped and inputs[0].nbytes <= SMALL_BYTES,
        )
        call = Call(request, inputs, outputs, grouped)
        with self._lock:
            if self._shutdown_reason:
                raise internal_error()(SHUTDOWN.format(self._shutdown_reason))
            if kind not in UNNAMED:
                if name is None:  # without the kind, so that ranks that make different calls get an error
                    self._unnamed[members] += 1
                    name = f"noname.{self._joins}.{self._unnamed[members]}"
                else:
                    name = f"{'grouped_' if grouped else ''}{kind}.{name}"
                call.request = dataclasses.replace(request, name=name)
            key = call.request.key
            if key in self._reserved:
                raise ValueError(f"{call.request.label} is in progress already; hint: finish it, or use another name")
            handle = next(self._handles)
            self._calls[handle] = self._in_progress[key] = self._reserved[key] = call
            self._new.append(call)
            os.eventfd_write(self._wakeup, 1)
        return handle

    def done(self, handle: int) -> bool:
        """Whether `finish` would return at once. Raises ValueError for an unknown handle."""
        call = self._find(handle)
        if done := call.completed.is_set():
            self._release_name(call)
        return done

    def finish(self, handle: int) -> Any:
        """Waits for a call and returns its result. Each handle can be finished once.

        The result is a new array or `out`, or a list of them for a grouped call. alltoall returns the array and the
        number of rows received from each member (int32), barrier None, join the rank that joined last.

        Raises HorovodInternalError if the ranks disagree about the call, the call is impossible, or another rank has
        ended. Raises ValueError for an unknown handle.
        """
        call = self._find(handle)
        began = time.monotonic()
        while not call.completed.wait(waiting.every_s):
            if call.request.kind != "join":  # a rank that has joined may wait as long as the others train
                waiting.report_wait(time.monotonic() - began)
        self._calls.pop(handle, None)
        self._release_name(call)
        if call.error is not None:
            raise call.error
        return call.result

    def call(self, kind: str, arrays: Arrays = (), **settings: Any) -> Any:
        """Starts a call and finishes it."""
        return self.finish(self.start(kind, arrays, **settings))

    def interrupt(self) -> None:
        """Ends all calls with an error whose cause is PeerLost, now and from now on. Called from any thread."""
        for connection in self._all_connections():
            with contextlib.suppress(OSError):  # the other end was faster
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shuts down the calls of this rank. As in Horovod, no rank can make calls after that. Idempotent."""
        with self._lock:
            self._closing = True
            if not self._shutdown_reason:
                os.eventfd_write(self._wakeup, 1)
        self._thread.join(FLUSH_TIMEOUT_S)

    def _release_name(self, call: Call) -> None:
        with self._lock:
            if self._reserved.get(call.request.key) is call:
                del self._reserved[call.request.key]

    def _find(self, handle: int) -> Call:
        try:
            return self._calls[handle]
        except KeyError:
            raise ValueError(f"handle {handle} is unknown, or its call has been finished before") from None

    def _check(self, kind: str, arrays: list[np.ndarray], op: Op, root: int, members: tuple[int, ...]) -> None:
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} called {kind} for the process set {list(members)} but is not a member")
        if kind == "broadcast" and root not in members:
            raise ValueError(f"root rank {root} is not in the process set {list(members)}")
        if kind == "reducescatter" and op not in (Op.SUM, Op.AVERAGE):
            raise internal_error()(f"reducescatter can sum and average; {op.name.lower()} is not supported")
        if kind in ("allreduce", "reducescatter"):
            if op is Op.ADASUM:
                raise needs_horovod("Adasum")
            for array in arrays:
                if not arithmetic.is_reducible(array.dtype):
                    raise TypeError(f"{kind} cannot reduce {array.dtype}; hint: convert it to float32 or int64")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._serve()
            reason = f"rank {self.rank} has shut down"
        except PeerLost as error:
            reason, cause = str(error), error
        except Exception as error:
            reason, cause = f"rank {self.rank}: {type(error).__name__}: {error}", error
        with self._lock:
            self._shutdown_reason = reason
            unfinished = list(self._in_progress.values())
            self._in_progress.clear()
            os.close(self._wakeup)
        self._disconnect()
        for call in unfinished:
            call.error = internal_error()(SHUTDOWN.format(f"{call.request.label}: {reason}"))
            call.error.__cause__ = cause
            call.completed.set()

    def _all_connections(self) -> list[Stream | MessageConnection]:
        return [*self._streams.values(), *self._connections.values()]

    def _disconnect(self) -> None:
        for connection in self._all_connections():
            connection.socket.close()

    def _serve(self) -> None:
        """Carries out calls until `close`. Raises PeerLost."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        connections = {connection.socket.fileno(): connection for connection in self._connections.values()}
        registered = dict[int, int]()
        while True:
            for descriptor, connection in connections.items():
                events = select.POLLIN | (select.POLLOUT if connection.unsent else 0)
                if registered.get(descriptor) != events:
                    registered[descriptor] = events
                    poll.register(descriptor, events)
            report_s = self._coordinator.seconds_to_next_report()
            for descriptor, _ in poll.poll(None if report_s is None else 1000 * report_s + 1):
                if descriptor == self._wakeup:
                    os.eventfd_read(self._wakeup)
                else:
                    connections[descriptor].flush()
                    self._receive(connections[descriptor])
            for line in self._coordinator.report_stalled():
                print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
            while self._new:
                call = self._new.popleft()
                request = call.request
                sends = request.inline and (request.kind != "broadcast" or request.ranks[request.root] == self.rank)
                self._request(self.rank, request, call.arrays[0].tobytes() if sends else b"")
            # A call runs only after its response has been sent to all members, because some may be waiting for it.
            while self._responses and not any(connection.unsent for connection in connections.values()):
                self._carry_out(*self._responses.popleft())
            if self._closing and not any(connection.unsent for connection in connections.values()):
                return

    def _request(self, rank: int, request: Request, payload: bytes) -> None:
        """Passes a rank's request to rank 0, which responds once the call is complete."""
        if self.rank != 0:
            self._connections[0].send(pack(request, payload))
            return
        for complete in self._coordinator.add(rank, request, payload):
            self._respond(*complete)

    def _respond(self, ranks: Sequence[int], response: Response, payload: bytes) -> None:
        message = pack(response, payload)
        for rank in ranks:
            if rank == self.rank:
                self._responses.append((response, payload))
            else:
                self._connections[rank].send(message)

    def _receive(self, connection: MessageConnection) -> None:
        for message in connection.receive():
            fields, payload = unpack(message)
            if self.rank == 0:
                self._request(connection.rank, Request(**fields), payload)
            else:
                self._responses.append((Response(**fields), payload))
        if connection.closed_because:
            affected = [*self._connections, self.rank] if self.rank == 0 else [self.rank]
            self._respond(affected, Response(shutdown=connection.closed_because), b"")

    def _carry_out(self, response: Response, payload: bytes) -> None:
        if response.shutdown:
            raise PeerLost(response.shutdown)
        with self._lock:
            call = self._in_progress.get(response.key)
        if call is None:  # this rank has joined
            self._take_part(response)
            return
        if response.error:
            call.error = internal_error()(response.error)
        else:
            results = self._results(call, response, payload)
            if call.out is not None:
                for output, result in zip(call.out, results, strict=True):
                    if output is not result:
                        np.copyto(output, result)
                results = call.out
            call.result = results if call.grouped else results[0]
        with self._lock:
            del self._in_progress[response.key]
            if call.request.kind == "join":
                self._joins += 1
                self._unnamed.clear()
        call.completed.set()

    def _results(self, call: Call, response: Response, payload: bytes) -> Sequence[Any]:
        request, arrays = call.request, call.arrays
        members = self._group(tuple(request.ranks))
        inputs = None
        if response.lengths:
            ends = list(itertools.accumulate(response.lengths))
            flat = np.frombuffer(payload, np.uint8)
            inputs = [flat[end - n : end].view(arrays[0].dtype) for end, n in zip(ends, response.lengths, strict=True)]
        match request.kind:
            case "allreduce":
                scales = (request.scales[0], request.scales[1])
                return arithmetic.allreduce(arrays, call.out, Op(request.op), scales, members, inputs)
            case "reducescatter":
                scales, op = (request.scales[0], request.scales[1]), Op(request.op)
                return [arithmetic.reducescatter(array, op, scales, members, inputs) for array in arrays]
            case "allgather":
                rows = zip(*response.sizes, strict=True)
                return [arithmetic.allgather(a, each, members, inputs) for a, each in zip(arrays, rows, strict=True)]
            case "alltoall":
                return [arithmetic.alltoall(arrays[0], response.sizes, members, inputs)]
            case "broadcast":
                output = None if call.out is None else call.out[0]
                return [arithmetic.broadcast(arrays[0], output, request.root, members, inputs)]
        return response.sizes or [None]  # of a join; of a barrier

    def _take_part(self, response: Response) -> None:
        """Takes part in a call of other ranks with zeros, unless they came with the response."""
        request = Request(**response.joined)
        if request.kind == "allreduce" and not (response.error or response.lengths):
            types = [arithmetic.BFLOAT16 if each == "bfloat16" else np.dtype(each) for each in request.types]
            zeros = [np.zeros(shape, dtype) for shape, dtype in zip(request.shapes, types, strict=True)]
            self._results(Call(request, zeros, zeros, grouped=True), response, b"")

    def _group(self, ranks: tuple[int, ...]) -> TcpLeaderGroup:
        if ranks not in self._groups:
            self._groups[ranks] = TcpLeaderGroup([None if rank == self.rank else self._streams[rank] for rank in ranks])
        return self._groups[ranks]


def _after_fork() -> None:
    """Disconnects a forked child from its parent's job. Locks may be held by threads that the child does not have."""
    for calls in list(INSTANCES):
        calls._lock = threading.Lock()
        calls._shutdown_reason = "this process was forked from a rank and is not a rank itself"
        calls._disconnect()


os.register_at_fork(after_in_child=_after_fork)
