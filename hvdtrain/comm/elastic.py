"""Ranks that continue when a host of the job is lost (`launch/mpirun.sh --elastic`).

The launcher decides who belongs to the job (`launch.elastic`). It numbers each list of members, a view, and sends it to
every rank through the agent of its host. A new view interrupts transfers in flight. The ranks then connect again over
TCP, and agree on how far each has come.

Collective work is a transaction that ends in `confirm`, a barrier. A rank that has passed it knows that all others have
reached it, and so hold the result. After a loss there are three cases:

    some rank has passed the barrier     all others are waiting in it, and the transaction counts
    all survivors wait in the barrier    each holds the result, and the transaction counts
    otherwise                            no rank has passed it: the transaction is repeated by the new members

The ranks of a host that has come back, or is new, are alone in a view of their own until they are ready (`join`). Rank
0 asks for the next view between two steps (`admit`), and sends them its state (`hand_over`) while all others wait.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.comm.backends.tcp import NOTHING, TcpCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.stream import swap
from hvdtrain.launch.agent import FD
from hvdtrain.launch.line import HELLO, MOST_BYTES, TO_RANK, BrokenLine, decoded, encoded
from hvdtrain.sentinel import waiting
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

CONNECT_S = 5.0
"""Time for the members of a new view to connect. A further lost host is noticed in less"""
JOIN_S = 300.0
"""Time for the slowest rank to start"""
PIECE_BYTES = 1 << 28
"""The state of a run is sent in messages of up to this size"""
AGENT = "the agent of this host"


def unsupported() -> Failure:
    """The error of a program that cannot continue without a lost host, although its launcher expects it."""
    what = "--elastic works with hvdtrain's own workloads, and with scripts that call hvd.elastic.run"
    return Failure(f"{what}; hint: start this program without --elastic", exits.BAD_CONFIG)


class Aborted(Exception):
    """A host was lost, and the work since the last `commit` has to be repeated with the new members."""


@dataclasses.dataclass(frozen=True)
class View:
    """The members of a job from some time on."""

    number: int
    ranks: tuple[int, ...]
    """The launcher's number of each rank. A rank's present number is its index here"""
    hosts: tuple[str, ...]
    """The host of each rank"""
    reason: str
    """Why the members changed; empty for the first view"""

    @classmethod
    def read(cls, message: dict[str, Any]) -> View:
        ranks, hosts = tuple(message["ranks"]), tuple(message["hosts"])
        return cls(message["number"], ranks, hosts, message["reason"])


class Channel:
    """This rank's connection to the launcher. `on_view` is called in another thread when there is a newer view."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._gathered: dict[tuple[int, int], list[str]] = {}
        self._gathers = 0
        self.on_view: Callable[[], None] = lambda: None
        reader = self._socket.makefile("rb")
        hello = decoded(reader.readline(), HELLO, AGENT)
        assert hello is not None
        self.number, self.local_rank, self.local_size = hello["rank"], hello["local_rank"], hello["local_size"]
        self.job_key = bytes.fromhex(hello["job_key"])
        self.addresses: dict[str, str] = hello["addresses"]
        """Address of each host of the job"""
        self.begun: dict[str, Any] = hello["begun"]
        """If this rank joins a running job: the argument of `begin` in the other ranks"""
        self.newcomers = 0
        """Ranks that are ready to take part, of hosts that have come back or are new"""
        self.newest = View.read(hello["view"])
        threading.Thread(target=self._read, args=(reader,), name="hvdtrain-views", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._socket.sendall(encoded(message))

    def watch(self, stall_limit_s: float) -> None:
        """Report to the agent of this host when this rank waits for others: see `launch.stalls`."""
        self.send({"pid": os.getpid(), "limit_s": float(stall_limit_s)})
        waiting.start(lambda report: self.send({"report": report.decode()}), stall_limit_s)

    def _read(self, reader: Any) -> None:
        while line := reader.readline(MOST_BYTES):
            try:
                message = decoded(line, TO_RANK, AGENT)
            except BrokenLine as broken:
                print(f"hvdtrain: rank {self.number}: {broken}", file=sys.stderr, flush=True)
                break
            if message is None:
                continue
            with self._changed:
                if "view" in message:
                    self.newest = View.read(message["view"])
                elif "newcomers" in message:
                    self.newcomers = message["newcomers"]
                else:
                    self._gathered[message["of"], message["gathered"]] = message["data"]
                self._changed.notify_all()
            if "view" in message:
                self.on_view()
        os._exit(exits.FAILED)  # the agent is gone, so this host does not belong to the job any more

    def gather(self, view: View, own: bytes) -> list[bytes]:
        """Return the bytes of every rank of the view, in its order. Raises PeerLost if there is a newer view."""
        with self._changed:
            self._gathers = self._gathers + 1 if self._gathers // 10**6 == view.number else view.number * 10**6
            key = view.number, self._gathers
        self.send({"gather": key[1], "of": key[0], "data": own.hex()})
        with self._changed:
            arrived = self._changed.wait_for(lambda: key in self._gathered or self.newest.number > key[0], JOIN_S)
            if key not in self._gathered:
                raise PeerLost("the members of the job changed" if arrived else f"no answer for {JOIN_S:g} s")
            return [bytes.fromhex(text) for text in self._gathered.pop(key)]

    def newer(self, than: int, message: dict[str, Any]) -> View:
        """Send a message and wait for a view with a higher number. The launcher sends one, or ends this process."""
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: self.newest.number > than)
            return self.newest


class ViewRendezvous:
    """The ranks of one view, which exchange small messages through the launcher. See `base.Rendezvous`."""

    def __init__(self, channel: Channel, view: View) -> None:
        self.channel, self.view = channel, view
        self.rank, self.size = view.ranks.index(channel.number), len(view.ranks)
        self.local_rank, self.local_size, self.job_key = channel.local_rank, channel.local_size, channel.job_key

    @property
    def host(self) -> str:
        """The name that -H gave to this host."""
        return self.view.hosts[self.rank]

    @property
    def joining(self) -> bool:
        """Whether these are the ranks of a host that has come back, and is not a member yet."""
        return self.view.number < 0

    def gather_bytes(self, own: bytes) -> list[bytes]:
        return self.channel.gather(self.view, own)

    def shutdown(self) -> None:
        """The channel ends with this process."""


def join() -> ViewRendezvous:
    """Find the other ranks of an elastic job. Collective."""
    channel = Channel(int(os.environ[FD]))
    return ViewRendezvous(channel, channel.newest)


class ElasticCommunicator(TcpCommunicator):
    """Ranks that connect again after a loss. Between `recover` and `resume` they compute without exchanging."""

    elastic = True
    connect_s = CONNECT_S

    def __init__(self, rendezvous: ViewRendezvous, endpoint: Endpoint) -> None:
        self._channel, self._endpoint = rendezvous.channel, endpoint
        self._closing = threading.Lock()
        self.view = rendezvous.view
        self.step = 0
        """Steps that this rank has done, which it reports in `recover`"""
        self.target = 0
        """After `recover`: the most steps that a rank has done"""
        self.joining, self.begun = rendezvous.joining, self._channel.begun
        self.suspended = self._lost = self._prepared = False
        self._commits = 0
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called in any thread when a host was lost, to interrupt other connections between the ranks too"""
        super().__init__(rendezvous, endpoint)
        self._channel.on_view = self.interrupt

    @property
    def broken(self) -> bool:
        """Whether the ranks are not connected, until `recover` has connected them again."""
        return self._lost or self._channel.newest.number > self.view.number

    @property
    def number(self) -> int:
        return self._channel.number

    @property
    def newcomers(self) -> int:
        return self._channel.newcomers

    def begin(self, run: Mapping[str, Any]) -> None:
        """From now on the job may continue without a lost host. `run`: what hosts that come back need, as JSON."""
        self._channel.send({"began": dict(run)})

    def join(self) -> None:
        """If `joining`: wait until the others let this rank take part. `recover` follows."""
        self._channel.newer(self.view.number, {"ready": True})
        self.lost()

    def admit(self) -> None:
        """Let hosts that have come back take part from the next step on, if there are any. `recover` follows then."""
        if self.rank == 0 and self._channel.newcomers and not self.suspended:
            self._channel.newer(self.view.number, {"admit": self.view.number})
            self.lost()

    def hand_over(self, joining: Sequence[bool], state: Callable[[], bytes]) -> np.ndarray:
        """Send rank 0's state to the ranks that are `joining`, and return it there. Collective."""
        own = np.frombuffer(state() if self.rank == 0 else b"", np.uint8)
        (size, *_), hosts = self.gather(own.size), {self._host_of[rank] for rank in range(self.size) if joining[rank]}
        received = np.empty(size if self.joining else 0, np.uint8)
        for begin in range(0, size, PIECE_BYTES):
            piece, into = own[begin : begin + PIECE_BYTES], received[begin : begin + PIECE_BYTES]
            if self._leaders is None:
                swap(None, None, self._leader, into)
                continue
            self._leaders.max_message_bytes = PIECE_BYTES
            parts = [piece if host in hosts else NOTHING for host in range(self._leaders.count)]
            message = self._leaders.all_to_all(parts)[0]
            into[:] = message
            for member in self._members:
                swap(member, message, None)
        return received

    def interrupt(self) -> None:
        self.suspended = True
        with self._closing:
            super().interrupt()
        self.on_interrupt()

    def lost(self) -> None:
        self._lost = True
        self.interrupt()

    def confirm(self) -> None:
        self._prepared = True
        self.gather_bytes(b"")
        self._commits, self._prepared = self._commits + 1, False

    def commit(self) -> None:
        try:
            self.confirm()
        except PeerLost:
            self.lost()
            if not self.recover():
                raise Aborted from None

    def recover(self) -> bool:
        """Connect to the members of the next view. Returns whether the interrupted transaction counts. Collective.

        Until `resume`, `suspended` is True.
        """
        while True:
            self.lost()
            with self._closing:
                self._disconnect()
            view = self._channel.newer(self.view.number, {"broken": self.view.number})
            try:
                self._enter(view)
                states = self.gather(None if self.joining else [self._commits, self._prepared, self.step])
            except (PeerLost, Failure):  # Failure: a member could not be reached
                self.view = view
                continue
            break
        states = [state for state in states if state]
        if not states:
            message = "all hosts that had the state of the run are lost"
            raise Failure(f"{message}; hint: continue from the last checkpoint with --resume", exits.UNREACHABLE)
        most, self.target = max(count for count, *_ in states), max(step for *_, step in states)
        complete = all(prepared and count == most for count, prepared, _ in states)
        counts = complete or (self._commits < most and not self.joining)
        if self._commits < most - (1 if self._prepared else 0) and not self.joining:
            raise RuntimeError(f"this rank has committed {self._commits} times, another one {most} times")
        self._commits, self._prepared = most + complete, False
        self._channel.send({"joined": view.number})
        return counts

    def _enter(self, view: View) -> None:
        """Connect to the members of a view. Raises PeerLost or Failure."""
        if self._channel.number not in view.ranks:
            raise PeerLost("this host is not a member any more")  # its agent is about to end this process
        self._connect(ViewRendezvous(self._channel, view), self._endpoint)
        # Assigning the streams and interrupting them exclude each other, so a newer view is noticed here or there.
        with self._closing:
            self.view, self._lost = view, False
        if self._channel.newest.number > view.number:
            raise PeerLost("the members of the job changed")

    def resume(self) -> None:
        """All members are at the same step and have divided the work again."""
        if not self.broken:
            self.suspended = False
        if self.broken:  # the newer view may have arrived in between
            self.suspended = True
