"""How a host that has come back catches up while the others train (see `comm.feed`), and takes part again."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable

import msgspec
import numpy as np

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.elastic import ElasticCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.comm.feed import Feed, Place, Player, Recorder
from hvdtrain.frameworks import Replica
from hvdtrain.strategies import Strategy
from hvdtrain.training import snapshot
from hvdtrain.training.elastic import Welcome

PATIENCE = 100
"""Steps of the others after which they wait for a host that has the state, but does not catch up"""
FULL = 2
"""Exchanges with up to this many times the bytes of the state may wait to be sent"""
REST = "rest"
"""Name of the array with the last exchanges in the final message"""


class State(msgspec.Struct, tag=True):
    """The first message to a host that has come back: a `Welcome` with all arrays."""

    welcome: bytes


class Exchanges(msgspec.Struct, tag=True):
    """The exchanges of one step."""

    hosts: int
    exchanges: list[list[bytes]]
    lr: float = 0.0
    decay: float | None = None
    """Decay of the moving average of the weights; None if the step does not update it"""


class Joining:
    """Gives the state of rank 0 to hosts that have come back, on rank 0 and on those hosts."""

    def __init__(
        self,
        world: Communicator,
        replica: Replica,
        strategy: Strategy,
        welcome: Callable[[int], Welcome],
        enter: Callable[[Welcome, str], None],
        use: Callable[[str], None],
    ) -> None:
        """`welcome(metrics_at)` returns rank 0's position. `enter(welcome, earlier)` continues there in a new rank.

        `use(name)` changes the strategy, and calls this object's `use`.
        """
        self._world, self._replica, self._strategy = world, replica, strategy
        self._welcome, self._enter, self._use_named = welcome, enter, use
        self._feeds: dict[Place, Feed] = {}
        self._used: set[Place] = set()
        """Places to which a feed has begun. A host whose feed ended waits at another place"""
        self._steps = 0
        """Steps since the last feed began"""
        self._caught_up = False
        """Whether the hosts that are being admitted have caught up"""
        self._metrics_at = 0
        """Bytes of rank 0's records that the hosts have. On such a host they are in `_metrics`"""
        self._metrics = ""

    # --- on rank 0 -------------------------------------------------------------------------------------------------

    def admit(self, has_room: Callable[[int], bool], consumed: int) -> None:
        """Between two steps: begin to feed new hosts, and admit those that have caught up.

        `has_room(n)`: whether an epoch has samples for them after the first n. `consumed`: those before this step.
        """
        world = self._world
        if not isinstance(world, ElasticCommunicator) or world.suspended or not (world.places or self._feeds):
            return
        self._caught_up = False
        self._drop_lost(world)
        if self._strategy.is_idle and world.hosts_count > 1 and has_room(0):
            for place in world.places:
                if place not in self._used:
                    self._begin(world, place)
        if not has_room(consumed):
            return
        if world.hosts_count == 1:  # a single host exchanges nothing that could be repeated
            world.admit([place.number for place in world.places])
        elif full := [place for place, feed in self._feeds.items() if feed.waiting_bytes > FULL * feed.state_bytes]:
            self._end_feeds()  # these hosts get the state while the others wait
            world.admit([place.number for place in full])
        elif self._near() and all(
            feed.finish(functools.partial(self._is_wanted, place)) for place, feed in self._feeds.items()
        ):
            self._caught_up = True
            world.admit([place.number for place in self._feeds])

    def _drop_lost(self, world: ElasticCommunicator) -> None:
        for place in [place for place, feed in self._feeds.items() if feed.failed or place not in world.places]:
            if self._feeds[place].is_unreachable and place in world.places:
                problem = f"rank 0 cannot connect to {place.address}, whose host waits to take part"
                print(f"hvdtrain: {problem}; hint: open TCP between the hosts", file=sys.stderr, flush=True)
            self._feeds.pop(place).close()
        if not self._feeds:
            world.tap = None

    def _begin(self, world: ElasticCommunicator, place: Place) -> None:
        if not isinstance(world.tap, Recorder):
            assert world.leaders is not None
            world.tap = Recorder(world.leaders)
        self._used.add(place)
        welcome = self._welcome(0)
        self._metrics_at = min([len(welcome.metrics.encode()), *([self._metrics_at] if self._feeds else [])])
        state = welcome.as_bytes(snapshot.for_newcomers(self._replica, self._strategy))
        self._feeds[place] = Feed(place, world.job_key, msgspec.msgpack.encode(State(state)))
        self._steps = 0

    def _near(self) -> bool:
        """Whether the others can wait for all hosts to catch up: that takes one step, or would never end otherwise."""
        feeds = self._feeds.values()
        if not feeds or any(not feed.has_state for feed in feeds):
            return False
        if self._steps > PATIENCE:
            return True
        return all(feed.behind <= 1 or feed.waiting_bytes > feed.state_bytes for feed in feeds)

    def add_step(self, lr: float, decay: float | None) -> None:
        """After a step: send its exchanges."""
        if not self._feeds or self._world.suspended:  # `hand_over` sends the rest
            return
        self._steps += any(feed.has_state for feed in self._feeds.values())
        if message := self._recorded(lr, decay):
            for feed in self._feeds.values():
                feed.add(message)

    def _recorded(self, lr: float = 0.0, decay: float | None = None) -> bytes:
        """Return the message with the exchanges since the last one; empty if there are none."""
        tap = self._world.tap if isinstance(self._world, ElasticCommunicator) else None
        exchanges = tap.take() if isinstance(tap, Recorder) else []
        return msgspec.msgpack.encode(Exchanges(tap.count, exchanges, lr, decay)) if tap and exchanges else b""

    def _last_message(self) -> bytes:
        arrays = snapshot.for_newcomers(self._replica, self._strategy, caught_up=self._caught_up)
        if self._caught_up and (rest := self._recorded()):
            arrays[REST] = np.frombuffer(rest, np.uint8)
        return self._welcome(self._metrics_at if self._caught_up else 0).as_bytes(arrays)

    def _is_wanted(self, place: Place) -> bool:
        return isinstance(self._world, ElasticCommunicator) and place in self._world.places

    def use(self, strategy: Strategy) -> None:
        """Continue with another strategy. New hosts begin again."""
        self._strategy = strategy
        self._end_feeds()

    # --- on all ranks ----------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """After a change of members: give the rest to new ranks. Collective."""
        try:
            message = self._world.hand_over(self._last_message)
        finally:
            self._end_feeds()
        if not self._world.joining:
            return
        welcome, arrays = Welcome.read(message)
        if REST in arrays:
            self._replay(msgspec.msgpack.decode(arrays.pop(REST).tobytes(), type=Exchanges))
        self._use_named(welcome.position["strategy"])
        snapshot.welcome(arrays, self._replica, self._strategy)
        self._enter(welcome, self._metrics)
        self._world.joining = False

    def _end_feeds(self) -> None:
        for feed in self._feeds.values():
            feed.close()
        self._feeds, self._caught_up = {}, False
        if isinstance(self._world, ElasticCommunicator):
            self._world.tap = None

    # --- on a host that has come back ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Catch up until this rank may take part."""
        assert isinstance(self._world, ElasticCommunicator)
        for message in self._world.follow():
            item: State | Exchanges = msgspec.msgpack.decode(message, type=State | Exchanges)  # type: ignore[call-overload]
            if isinstance(item, State):
                welcome, arrays = Welcome.read(item.welcome)
                self._metrics = welcome.metrics
                self._use_named(welcome.position["strategy"])
                snapshot.welcome(arrays, self._replica, self._strategy)
            else:
                with contextlib.suppress(PeerLost):  # there is a newer view, so `follow` ends
                    self._replay(item)

    def _replay(self, step: Exchanges) -> None:
        world = self._world
        assert isinstance(world, ElasticCommunicator)
        world.tap = Player(step.hosts, step.exchanges) if world.leaders is not None else None
        self._strategy.replay(self._replica, self._replica.blank(), step.lr, len(step.exchanges))
        world.tap = None
        if step.decay is not None:
            self._replica.average(step.decay, None)
