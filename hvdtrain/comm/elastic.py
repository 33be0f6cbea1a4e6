"""Ranks that continue when a host of the job is lost (`launch/mpirun.sh --elastic`).

The launcher decides who belongs to the job (`launch.elastic`). It numbers each list of members, a view, and sends it to
every rank through the agent of its host. A new view interrupts transfers in flight. The ranks then connect again over
TCP, and agree on how far each has come.

Collective work is a transaction that ends in `confirm`, a barrier. A rank that has passed it knows that all others have
reached it, and so hold the result. After a loss there are three cases:

    some rank has passed the barrier     all others are waiting in it, and the transaction counts
    all survivors wait in the barrier    each holds the result, and the transaction counts
    otherwise                            no rank has passed it: the transaction is repeated by the new members

The ranks of a host that has come back are alone in a view of their own until they are `ready`. Rank 0 sends them its
state, and what it exchanges from then on (`follow`), while all others train. When they have caught up, it asks for the
next view between two steps (`admit`), and sends them the rest (`hand_over`).
"""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, LeaderGroup
from hvdtrain.comm.backends.tcp import NOTHING, TcpCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.feed import Follower, Place, Recorder
from hvdtrain.comm.stream import MAX_MESSAGE_BYTES, swap
from hvdtrain.launch.agent import FD
from hvdtrain.launch.line import HELLO, MOST_BYTES, TO_RANK, BrokenLine, decoded, encoded
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

CONNECT_S = 5.0
"""Time for the members of a new view to connect. A further lost host is noticed in less"""
JOIN_S = 300.0
"""Time for the slowest rank to start"""
AGENT = "the agent of this host"
PACE_STEPS = 10
"""Steps whose median a rank reports to the launcher"""


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
        self.places: list[Place] = []
        """Where the leaders of those hosts wait for the state of rank 0"""
        self.newest = View.read(hello["view"])
        threading.Thread(target=self._read, args=(reader,), name="hvdtrain-views", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._socket.sendall(encoded(message))

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
                    self.places = [Place(**place) for place in message["places"]]
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
        self.target = self.step = 0
        self.joining, self.begun = rendezvous.joining, self._channel.begun
        self.suspended = self._lost = self._prepared = False
        self._commits = 0
        self._pace: list[float] = []
        self.tap: LeaderGroup | None = None
        """On a leader: what exchanges use instead of the leaders. A `Recorder` or a `Player`"""
        self.on_interrupt: Callable[[], None] = lambda: None
        """Called in any thread when a host was lost, to interrupt other connections between the ranks too"""
        super().__init__(rendezvous, endpoint)
        self._channel.on_view = self.interrupt

    @property
    def broken(self) -> bool:
        return self._lost or self._channel.newest.number > self.view.number

    @property
    def number(self) -> int:
        return self._channel.number

    @property
    def newcomers(self) -> int:
        return self._channel.newcomers

    def begin(self, run: Mapping[str, Any]) -> None:
        self._channel.send({"began": dict(run)})

    def report_pace(self, compute_s: float) -> None:
        self._pace.append(compute_s)
        if len(self._pace) == PACE_STEPS:
            self._channel.send({"pace": statistics.median(self._pace)})
            self._pace.clear()

    @property
    def leaders(self) -> LeaderGroup | None:
        return self.tap or self._leaders

    @property
    def places(self) -> list[Place]:
        """On rank 0: where the leaders of hosts that have come back wait for its state."""
        return self._channel.places if self.rank == 0 and self._channel.newcomers and not self.suspended else []

    def join(self) -> None:
        self._channel.newer(self.view.number, {"ready": True})
        self.lost()

    def follow(self) -> Iterator[np.ndarray]:
        """If `joining`: yield the messages of rank 0's `Feed` until this rank may take part. `recover` follows.

        After a loss another rank 0 begins again.
        """
        if self._leader is not None:
            self._leader.blocks_rank = False  # the leader may wait long for rank 0
        while self.view.number == self._channel.newest.number:
            follower, ready = None, dict[str, Any](ready=True)
            if self._leader is None:
                follower = Follower(self._endpoint, self.job_key, self.number)
                self.on_interrupt = follower.stop
                ready["place"] = follower.place._asdict()
            self._channel.send(ready)
            if self._channel.newest.number != self.view.number and follower is not None:
                follower.stop()
            try:
                while (message := self._from_leader(follower)) is not None:
                    yield message
                    self.gather(None)  # all ranks of this host have used it
                    if follower is not None:
                        follower.acknowledge()
            except PeerLost:  # there is a newer view, or this host's leader is gone
                if self._channel.newest.number == self.view.number:
                    time.sleep(0.1)
            finally:
                self.on_interrupt = lambda: None
                if follower is not None:
                    follower.close()
        self.lost()

    def _from_leader(self, follower: Follower | None) -> np.ndarray | None:
        """Return the follower's next message on all ranks of this host; None if there are no more."""
        if follower is None:
            shared = swap(None, None, self._leader)
            return shared if shared.size else None
        message = follower.next()
        for member in self._members:
            swap(member, NOTHING if message is None else message, None)
        return message

    def admit(self, ranks: Sequence[int] | None = None) -> None:
        if self.rank == 0 and self._channel.newcomers and not self.suspended:
            self._channel.newer(self.view.number, {"admit": self.view.number, "ranks": ranks})
            self.lost()

    def hand_over(self, state: Callable[[], bytes]) -> bytes:
        joining = self.gather(self.joining)
        if not any(joining):
            return b""
        own = np.frombuffer(state() if self.rank == 0 else b"", np.uint8)
        hosts = {self._host_of[rank] for rank, joins in enumerate(joining) if joins}
        if self._leaders is None:
            return swap(None, None, self._leader).tobytes()
        self._leaders.max_message_bytes = MAX_MESSAGE_BYTES
        parts = [own if host in hosts else NOTHING for host in range(self._leaders.count)]
        received = self._leaders.all_to_all(parts)[0]
        for member in self._members:
            swap(member, received, None)
        return received.tobytes()

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
        if isinstance(self.tap, Recorder):
            self.tap.seal()

    def commit(self) -> None:
        try:
            self.confirm()
        except PeerLost:
            self.lost()
            if not self.recover():
                raise Aborted from None

    def recover(self) -> bool:
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
        if isinstance(self.tap, Recorder) and counts:
            self.tap.seal()
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
        if not self.broken:
            self.suspended = False
        if self.broken:  # the newer view may have arrived in between
            self.suspended = True
