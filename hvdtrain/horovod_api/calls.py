"""Horovod's collective calls on NumPy arrays over TCP streams of our own: nothing polls, idle ranks send nothing.

    calls = Calls(meeting, reach)          # by all ranks together, some milliseconds
    handle = calls.start("allreduce", array, name="loss", op=Op.AVERAGE)
    ...
    mean = calls.finish(handle)

Ranks may start calls in any order and from any thread. One thread of each rank carries them out: it tells rank 0 what
is asked for, rank 0 answers when all members have asked (`coordinator`), and the members carry out the answered calls
in rank 0's order (`arithmetic`). An array of at most SMALL_BYTES travels with the request and the answer: one round
trip. What is meant by each call, and which errors it raises, is Horovod 0.28's (horovod.readthedocs.io, API); where an
error is found by all ranks together, it is raised by `finish` on all of them alike.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.comm.backends.tcp import SMALL_BYTES
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.stream import Stream
from hvdtrain.horovod_api import arithmetic
from hvdtrain.horovod_api.arithmetic import Members, Op
from hvdtrain.horovod_api.coordinator import Answer, Asked, Coordinator, packed, said, unpacked
from hvdtrain.horovod_api.wires import Wire, connected
from hvdtrain.sentinel import waiting

ENDED = "no call can be made any more: {}; what ended the job is in the output of the rank that ended first"
PATIENCE_S = 10.0
"""For what is still to be sent when a rank shuts down"""
LIVING: weakref.WeakSet[Calls] = weakref.WeakSet()

Arrays = np.ndarray | Sequence[np.ndarray]


@dataclasses.dataclass
class Call:
    """One that was started and not yet finished."""

    asked: Asked
    arrays: list[np.ndarray]
    out: list[np.ndarray] | None
    grouped: bool
    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Calls:
    """The calls of one rank. Its methods may be called from several threads."""

    def __init__(self, meeting: Rendezvous, reach: Endpoint) -> None:
        """By all ranks together: connects each to each. Raises Failure (69) if one cannot be reached."""
        self.rank, self.size = meeting.rank, meeting.size
        self._everyone = tuple(range(self.size))
        self._streams, self._wires = connected(meeting, reach)
        self._coordinator = Coordinator(waiting.limit_s)
        self._groups: dict[tuple[int, ...], Members] = {}
        self._answers: collections.deque[tuple[Answer, bytes]] = collections.deque()
        self._lock = threading.Lock()
        self._handles = itertools.count()
        self._calls: dict[int, Call] = {}
        self._under_way: dict[str, Call] = {}
        self._taken: dict[str, Call] = {}
        """Calls by key until someone finishes them or finds them done: whether a name may be used again must not depend
        on how quick the ranks are"""
        self._new: collections.deque[Call] = collections.deque()
        self._unnamed: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._closing = False
        self._over = ""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        LIVING.add(self)
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
        """Starts a call and returns its handle, at once. The arrays must stay as they are until it is done.

        `kind`: allreduce, allgather, broadcast, alltoall, reducescatter, barrier or join. `arrays`: one, or a list for
        a grouped call (allreduce, allgather, reducescatter). `root`: the rank that broadcasts. `ranks`: the members, if
        not all. `out`: where the results of allreduce and broadcast go (the arrays themselves, to work in place).
        Raises ValueError (a wrong argument; the same name is under way), TypeError (a type that cannot be summed),
        NotImplementedError (Adasum of ranks that are no power of two) and Horovod's HorovodInternalError.
        """
        grouped = not isinstance(arrays, np.ndarray) and kind not in ("barrier", "join")
        given = [np.asarray(array, order="C") for array in ([arrays] if isinstance(arrays, np.ndarray) else arrays)]
        into = None if out is None else [out] if isinstance(out, np.ndarray) else list(out)
        members = self._everyone if ranks is None else tuple(sorted(ranks))
        self._check(kind, given, Op(op), root, members)
        asked = Asked(
            kind=kind,
            name=kind,
            ranks=list(members),
            types=[arithmetic.type_name(array.dtype) for array in given],
            shapes=[list(array.shape) for array in given],
            op=int(op) if kind in ("allreduce", "reducescatter") else 0,
            root=members.index(root) if kind == "broadcast" else 0,
            scales=[float(prescale), float(postscale)],
            splits=_checked_splits(given[0], splits, len(members)) if kind == "alltoall" else None,
            short=bool(given) and not grouped and op != Op.ADASUM and given[0].nbytes <= SMALL_BYTES,
        )
        prefix = f"grouped_{kind}" if grouped else kind
        call = Call(asked, given, into, grouped)
        with self._lock:
            if self._over:
                raise internal_error()(ENDED.format(self._over))
            if kind == "join":
                call.asked = dataclasses.replace(asked, unnamed=self._unnamed[members])
            elif kind != "barrier":
                if name is None:  # without its kind, so that ranks which do different things are told so
                    self._unnamed[members] += 1
                name = f"noname.{self._unnamed[members]}" if name is None else f"{prefix}.{name}"
                call.asked = dataclasses.replace(asked, name=name)
            if call.asked.key in self._taken:
                raise ValueError(
                    f"{said(call.asked)} is under way already: finish it before another of the same name is started, "
                    "or use another name"
                )
            handle = next(self._handles)
            self._calls[handle] = self._under_way[call.asked.key] = self._taken[call.asked.key] = call
            self._new.append(call)
            os.eventfd_write(self._bell, 1)
        return handle

    def done(self, handle: int) -> bool:
        """Whether `finish` would return at once. Raises ValueError for an unknown handle."""
        call = self._known(handle)
        if done := call.ended.is_set():
            self._free(call)
        return done

    def finish(self, handle: int) -> Any:
        """Waits for a call's end. Returns new arrays, or `out`: one, or a list for a grouped call; of alltoall the
        array and the rows received of each member (int32); of join the last rank to join; None of barrier.

        Raises HorovodInternalError if ranks do not agree about the call, if it cannot be had of all of them together,
        or if another rank has ended. Raises ValueError for an unknown handle: one can be finished once.
        """
        call = self._known(handle)
        began = time.monotonic()
        while not call.ended.wait(waiting.every_s):
            waiting.report_wait(time.monotonic() - began)
        self._calls.pop(handle, None)
        self._free(call)
        if call.error is not None:
            raise call.error
        return call.result

    def call(self, kind: str, arrays: Arrays = (), **settings: Any) -> Any:
        """Starts and finishes one."""
        return self.finish(self.start(kind, arrays, **settings))

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What every rank gave, in rank order, on all ranks."""
        lengths = self.call("allgather", np.array([len(own)]))
        whole = self.call("allgather", np.frombuffer(own, np.uint8)).tobytes()
        ends = list(itertools.accumulate(int(length) for length in lengths))
        return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def close(self) -> None:
        """Shuts this rank's part down: as with Horovod, no rank can make calls after that. Harmless twice."""
        with self._lock:
            self._closing = True
            if not self._over:
                os.eventfd_write(self._bell, 1)
        self._thread.join(PATIENCE_S)

    def _free(self, call: Call) -> None:
        """Its name may be used again."""
        with self._lock:
            if self._taken.get(call.asked.key) is call:
                del self._taken[call.asked.key]

    def _known(self, handle: int) -> Call:
        try:
            return self._calls[handle]
        except KeyError:
            raise ValueError(f"there is no call of handle {handle}, or it was finished before") from None

    def _check(self, kind: str, arrays: list[np.ndarray], op: Op, root: int, members: tuple[int, ...]) -> None:
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not in the process set {list(members)} whose {kind} it calls")
        if kind == "broadcast" and root not in members:
            raise ValueError(f"root rank {root} is not in the process set {list(members)}")
        if kind == "allreduce" and op is Op.ADASUM:
            if members != self._everyone:
                raise NotImplementedError("Adasum works on all ranks together, not on a process set")
            if self.size & (self.size - 1):
                raise NotImplementedError(f"Adasum needs 1, 2, 4, 8, ... ranks; this job has {self.size}")
        if kind == "reducescatter" and op not in (Op.SUM, Op.AVERAGE):
            raise internal_error()(f"reducescatter can sum and average; {op.name.lower()} is not supported")
        if kind in ("allreduce", "reducescatter"):
            for array in arrays:
                if not arithmetic.reducible(array.dtype):
                    raise TypeError(f"{kind} of {array.dtype} is not possible: convert it to float32 or int64")

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._serve()
            over = f"rank {self.rank} has shut down"
        except PeerLost as error:
            over, cause = str(error), error
        except Exception as error:
            over, cause = f"rank {self.rank}: {type(error).__name__}: {error}", error
        with self._lock:
            self._over = over
            lost = list(self._under_way.values())
            self._under_way.clear()
            os.close(self._bell)
        self._disconnect()
        for call in lost:
            call.error = internal_error()(ENDED.format(f"{said(call.asked)}: {over}"))
            call.error.__cause__ = cause
            call.ended.set()

    def _disconnect(self) -> None:
        streams: list[Stream | Wire] = [*self._streams.values(), *self._wires.values()]
        for stream in streams:
            stream.socket.close()

    def _serve(self) -> None:
        """Until `close`. Raises PeerLost."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        wires = {wire.socket.fileno(): wire for wire in self._wires.values()}
        awaited = dict[int, int]()
        while True:
            for descriptor, wire in wires.items():
                events = select.POLLIN | (select.POLLOUT if wire.unsent else 0)
                if awaited.get(descriptor) != events:
                    awaited[descriptor] = events
                    poll.register(descriptor, events)
            due_s = self._coordinator.due_s()
            for descriptor, _ in poll.poll(None if due_s is None else 1000 * due_s + 1):
                if descriptor == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    wires[descriptor].flush()
                    self._listen(wires[descriptor])
            for line in self._coordinator.stalled():
                print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
            while self._new:
                call = self._new.popleft()
                asked = call.asked
                sends = (
                    call.arrays and asked.short and (asked.kind != "broadcast" or asked.ranks[asked.root] == self.rank)
                )
                self._ask(self.rank, asked, call.arrays[0].tobytes() if sends else b"")
            # What was answered is carried out when all have the answer: until then a rank may wait for it elsewhere.
            while self._answers and not any(wire.unsent for wire in wires.values()):
                self._carry(*self._answers.popleft())
            if self._closing and not any(wire.unsent for wire in wires.values()):
                return

    def _ask(self, rank: int, asked: Asked, payload: bytes) -> None:
        """Brings a rank's call before rank 0, and what follows from it to all it concerns."""
        if self.rank != 0:
            self._wires[0].send(packed(asked, payload))
            return
        for ranks, answer, inputs in self._coordinator.heard(rank, asked, payload):
            self._answer(ranks, answer, inputs)

    def _answer(self, ranks: Sequence[int], answer: Answer, payload: bytes) -> None:
        message = packed(answer, payload)
        for rank in ranks:
            if rank == self.rank:
                self._answers.append((answer, payload))
            else:
                self._wires[rank].send(message)

    def _listen(self, wire: Wire) -> None:
        for message in wire.hear():
            told, payload = unpacked(message)
            if self.rank == 0:
                self._ask(wire.rank, Asked(**told), payload)
            else:
                self._answers.append((Answer(**told), payload))
        if wire.ended:
            self._answer([*self._wires, self.rank] if self.rank == 0 else [self.rank], Answer(ended=wire.ended), b"")

    def _carry(self, answer: Answer, payload: bytes) -> None:
        if answer.ended:
            raise PeerLost(answer.ended)
        with self._lock:
            call = self._under_way.get(answer.key)
        if call is None:  # this rank has joined
            if answer.call is None or answer.error:
                return
            asked = Asked(**answer.call)
            nothing = [arithmetic.zeros(*each) for each in zip(asked.types, asked.shapes, strict=True)]
            call = Call(asked, nothing, None, True)
        if answer.error:
            call.error = internal_error()(answer.error)
        else:
            results = self._results(call, answer, payload)
            if call.out is not None:
                for into, found in zip(call.out, results, strict=True):
                    if into is not found:
                        np.copyto(into, found)
                results = call.out
            call.result = results if call.grouped else results[0]
        with self._lock:
            self._under_way.pop(answer.key, None)
        call.ended.set()

    def _results(self, call: Call, answer: Answer, payload: bytes) -> Sequence[Any]:
        asked, arrays, op = call.asked, call.arrays, Op(call.asked.op)
        ranks = tuple(asked.ranks)
        members = self._group(ranks)
        scales = (asked.scales[0], asked.scales[1])
        inputs = None
        if answer.lengths:
            ends = list(itertools.accumulate(answer.lengths))
            whole = np.frombuffer(payload, np.uint8)
            inputs = [whole[end - n : end].view(arrays[0].dtype) for end, n in zip(ends, answer.lengths, strict=True)]
        match asked.kind:
            case "join":
                with self._lock:
                    self._unnamed[ranks] = max(self._unnamed[ranks], answer.unnamed)
                return [answer.last]
            case "allreduce":
                return arithmetic.allreduce(arrays, call.out, op, scales, members, inputs)
            case "reducescatter":
                return [arithmetic.reducescatter(array, op, scales, members, inputs) for array in arrays]
            case "allgather":
                firsts = zip(*answer.sizes, strict=True)
                return [arithmetic.allgather(a, each, members, inputs) for a, each in zip(arrays, firsts, strict=True)]
            case "alltoall":
                return [arithmetic.alltoall(arrays[0], answer.sizes, members, inputs)]
            case "broadcast":
                into = None if call.out is None else call.out[0]
                return [arithmetic.broadcast(arrays[0], into, asked.root, members, inputs)]
        return [None]  # a barrier

    def _group(self, ranks: tuple[int, ...]) -> Members:
        if ranks not in self._groups:
            streams = [None if rank == self.rank else self._streams[rank] for rank in ranks]
            self._groups[ranks] = Members(streams)
        return self._groups[ranks]


def _checked_splits(array: np.ndarray, splits: Sequence[int] | None, count: int) -> list[int]:
    """How many rows each member gets. Raises ValueError."""
    first = array.shape[0] if array.ndim else 0
    if splits is None or not len(splits):
        if first % count:
            raise ValueError(f"alltoall without splits: {first} rows cannot be shared out evenly to {count} ranks")
        return [first // count] * count
    if np.ndim(splits) != 1 or np.asarray(splits).dtype.kind not in "iu":
        raise ValueError("alltoall takes its splits as one list of whole numbers (int32)")
    shares = [int(each) for each in splits]
    if len(shares) != count:
        raise ValueError(f"alltoall has {len(shares)} splits for {count} ranks")
    if min(shares) < 0 or sum(shares) > first:
        raise ValueError(f"alltoall's splits {shares} are more than the {first} rows there are, or less than 0")
    return shares


def _forked() -> None:
    """In a child of fork: the job is its parent's. Locks may be held by threads that the child does not have."""
    for calls in list(LIVING):
        calls._lock = threading.Lock()
        calls._over = "this process was forked from a rank and is none itself"
        calls._disconnect()


os.register_at_fork(after_in_child=_forked)
