"""The ranks of a script's job on the TCP backend: connections for its calls and for each of its strategies."""

from __future__ import annotations

import collections
import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Communicator, RankGroup
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.elastic import ElasticCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.world import connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api.calls import Calls
from hvdtrain.strategies import Spec, Strategy, presets
from hvdtrain.strategies.cost import Shape
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

NOT_INITIALISED = "Horovod has not been initialized; use hvd.init()."
"""Horovod's error message"""
current: Job | None = None
"""The job on the TCP backend"""


def is_connected() -> bool:
    """Whether there is a job on the TCP backend."""
    return current is not None


def job() -> Job:
    """The job on the TCP backend. Raises ValueError if there is none."""
    if current is None:
        raise ValueError(NOT_INITIALISED)
    return current


def fresh(exchange: Spec, world: Communicator, shapes: Sequence[Shape], optimizer: type) -> Strategy:
    """A new strategy; see `Job.strategy`. HVDTRAIN_BUCKETS has the meaning of --buckets."""
    text = os.environ.get("HVDTRAIN_BUCKETS", "0")
    if text not in ("0", "1", "2", "3", "4"):
        raise Failure(f"HVDTRAIN_BUCKETS={text}: must be a number from 0 to 4", exits.BAD_CONFIG)
    config = TrainConfig(strategy=str(exchange), buckets=int(text), optimizer=presets.family(optimizer))
    return exchange.make(config, world, shapes)


class Job:
    """The ranks of this process's job, connected by the TCP backend."""

    def __init__(self, group: RankGroup, framework: str) -> None:
        """Collective."""
        self.group, self._framework = group, framework
        self.elastic = group.rendezvous if isinstance(group.rendezvous, ElasticCommunicator) else None
        """The ranks of an elastic job"""
        self.joins = self.elastic is not None and self.elastic.joining
        """Whether this rank's host has come back during the job"""
        self.generation = 0
        """Number of times that the ranks have connected again"""
        self.protected = False
        """Whether this rank has called a function of `hvd.elastic.run`"""
        self._joining: list[weakref.WeakMethod[Callable[[], bool]]] = []
        self._exchanged: set[Hashable] = set()
        self._connecting, self._registering = threading.Lock(), threading.Lock()
        self._worlds = weakref.WeakSet[Communicator]()
        """Open communicators; each lives as long as the strategy that uses it"""
        self._strategies = weakref.WeakSet[Strategy]()
        self._connect()
        if self.elastic is not None:
            self.elastic.on_interrupt = self.interrupt

    def _connect(self) -> None:
        """Collective. Raises PeerLost or Failure (69)."""
        rendezvous = self.group.rendezvous
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_rank, self.local_size = rendezvous.local_rank, rendezvous.local_size
        host = socket.gethostname() if self.elastic is None else self.elastic.view.hosts[self.rank]
        own = f"{host} {self.local_rank}"
        places = [each.decode().split() for each in rendezvous.gather_bytes(own.encode())]
        self.is_homogeneous = len(set(collections.Counter(host for host, _ in places).values())) == 1
        cross_hosts = [host for host, local_rank in places if int(local_rank) == self.local_rank]
        self.cross_rank, self.cross_size = cross_hosts.index(places[self.rank][0]), len(cross_hosts)
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(self.size))}
        """Ranks of each process set, by its number"""
        self.calls = Calls(rendezvous, self.group.endpoint)
        self._check_connected()

    def reconnect(self) -> None:
        """Connects the present ranks of an elastic job after `close`. Collective. Raises PeerLost or Failure (69)."""
        self.generation += 1
        self._connect()

    def strategy(
        self, exchange: Spec, shapes: Sequence[Shape], optimizer: type = object
    ) -> tuple[Strategy, Communicator]:
        """A strategy for arrays of these shapes, on separate connections. Collective.

        `optimizer`: type of the one that trains them; `object` if it is not known.
        """
        world = self.world()
        strategy = fresh(exchange, world, shapes, optimizer)
        self._strategies.add(strategy)
        return strategy, world

    def world(self) -> Communicator:
        """Connects the ranks once more. Collective."""
        with self._connecting:
            world = connect(self._framework, backend="tcp", group=self.group)
        with self._registering:
            self._worlds.add(world)
        self._check_connected()
        return world

    def on_join(self, take_part: Callable[[], bool]) -> None:
        """Register a method of an optimizer, which is forgotten with the optimizer, for a rank that has joined.

        It makes one exchange of the optimizer's strategy with zeros, and returns whether all ranks have joined. All
        ranks must learn that from the same exchange, for example from a number in the tail of its vector that sums up
        how many ranks have joined. Called repeatedly until it returns True, on a thread for each method.
        """
        self._joining.append(weakref.WeakMethod(take_part))

    def join(self) -> int:
        """This rank has no more steps: take part in the other ranks' allreduces and exchanges with zeros. Collective.

        Returns the rank that joined last, when all have. Raises NotImplementedError if a strategy cannot take part.
        """
        gc.collect()  # optimizers that the script no longer has do not count
        methods = [method for each in self._joining if (method := each()) is not None]
        if len(self._strategies) > len(methods):
            hint = f"use {DEFAULT_REDUCER} by calls (compression=), or the same number of steps on each rank"
            raise NotImplementedError(f"hvd.join cannot take part in the exchanges of a strategy; hint: {hint}")
        handle = self.calls.start("join")  # the thread of the calls takes part in allreduces
        if methods:
            with ThreadPoolExecutor(len(methods), thread_name_prefix="hvdtrain-join") as threads:
                for done in [threads.submit(_until_true, method) for method in methods]:
                    done.result()
        return int(self.calls.finish(handle))

    def exchanging(self, what: Hashable) -> None:
        """Called before gradients or values are reduced; `what` is equal in each step.

        An elastic job whose script trains outside `hvd.elastic.run` would end when a host is lost, although its user
        expects the opposite. So the second step ends the process with code 78. One step is allowed, because it creates
        the state of Keras' optimizers. This is not an exception, because one in a graph would not arrive as a Failure.
        """
        if self.elastic is None or self.protected:
            return
        if what in self._exchanged:
            problem = "--elastic: this script trains outside hvd.elastic.run, so it cannot continue without a lost host"
            hint = "call a function with the decorator @hvd.elastic.run, or start the script without --elastic"
            lifecycle.fail(Failure(f"{problem}; hint: {hint}", exits.BAD_CONFIG))
        self._exchanged.add(what)

    def leave(self) -> None:
        """This rank's script has ended. Ranks that still wait for it get an error, but not in an elastic job."""
        if self.elastic is None:
            for strategy in self._strategies:
                strategy.abandon()
            for world in self._tcp_worlds():
                world.leave()
            self.calls.close()

    def _check_connected(self) -> None:
        """Raises PeerLost if a host was lost while connections were made that `interrupt` did not know yet."""
        if self.elastic is not None and self.elastic.broken:
            raise PeerLost("the members of the job changed")

    def interrupt(self) -> None:
        """Ends all transfers of an elastic job with PeerLost. Called from any thread."""
        for world in self._tcp_worlds():
            world.interrupt()
        self.calls.interrupt()

    def _tcp_worlds(self) -> list[TcpCommunicator]:
        with self._registering:
            return [world for world in self._worlds if isinstance(world, TcpCommunicator)]

    def close(self) -> None:
        """Closes all connections. Ranks that still wait for this one get an error."""
        if self.elastic is not None:
            self.interrupt()
            for strategy in self._strategies:  # their threads no longer use the connections
                strategy.abandon()
        for world in self._worlds:
            world.shutdown()
        self._worlds.clear()
        self.calls.close()


def _until_true(function: Callable[[], bool]) -> None:
    while not function():
        pass
