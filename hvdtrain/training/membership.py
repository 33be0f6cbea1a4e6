"""The members of a run. This is the only part of a training that knows that they can change (`mpirun.sh --elastic`).

The loop does all collective work through a `Membership`: a step by `step`, anything else by `attempt`. If a host is
lost or comes back, the outcome is CHANGED: the work was undone, the rest of the epoch is divided among the present
members, and the loop continues from there. With fixed members the work is only done.

A host that has come back, or is new, waits until rank 0 lets it take part between two steps. All others stop while it
receives the state of the run: the arrays of a checkpoint, with the optimizer's state rounded to bfloat16.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import time
import zlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hvdtrain.comm.elastic import Aborted, ElasticCommunicator
from hvdtrain.comm.errors import PeerLost
from hvdtrain.records.arrays_file import pieces, views
from hvdtrain.training import elastic, snapshot
from hvdtrain.training.adaptive import Adaptive
from hvdtrain.training.balance import Balance
from hvdtrain.training.state import Due, RunState
from hvdtrain.training.train_state import Position

T = TypeVar("T")
LOST = (PeerLost, Aborted)
"""What collective work raises if a host was lost"""
DOCUMENT = "document"
"""Name of the array with everything but arrays in the message to a new rank"""


class Outcome(enum.Enum):
    DONE = enum.auto()
    CHANGED = enum.auto()
    """The members changed, and the rest of the epoch was divided again"""
    STOPPED = enum.auto()
    """A signal stopped the run, after saving a checkpoint"""


class Membership:
    """Members that never change."""

    def begin(self) -> None:
        """The run begins on all ranks."""

    def step(self, work: Callable[[], object]) -> Outcome:
        """Do a step, whose strategy makes sure that it counts on all members."""
        work()
        return Outcome.DONE

    def attempt(self, work: Callable[[], T], apply: Callable[[T], object] = lambda _: None) -> Outcome:
        """Do collective work that changes nothing but running statistics.

        `apply` uses the result if it counts, on all members. Not collective.
        """
        apply(work())
        return Outcome.DONE

    def until_done(self, work: Callable[[], T]) -> T:
        """Do collective work as in `attempt`, however often the members change during it. Returns its result."""
        results: list[T] = []
        while not results:
            self.attempt(work, results.append)
        return results[0]

    def agree(self, synchronize: Callable[[], object]) -> Outcome:
        """At the end of an epoch: `synchronize` again if the members changed while the strategy synchronized."""
        return Outcome.DONE


class ElasticMembership(Membership):
    """Members that the launcher changes. The present ones are the last view of `comm.elastic`."""

    def __init__(
        self, state: RunState, world: ElasticCommunicator, balance: Balance | None, adaptive: Adaptive | None
    ) -> None:
        self._state, self._world, self._balance, self._adaptive = state, world, balance, adaptive
        self._noticed_s: float | None = None
        """When the members changed; None if they have not since the last division"""
        self._began_s = 0.0
        """When the current work began"""
        self._divisions = 0
        """How often the work was divided again"""
        self._behind = False
        """Whether other ranks have done more steps since the members changed. This rank does them without exchanging"""
        self._rounded = False
        """Whether the optimizer's state was rounded since the last division"""
        self._received: dict[str, np.ndarray] | None = None
        """In a new rank, the strategy's state, until it takes part"""

    def begin(self) -> None:
        self._world.begin(elastic.begun(self._state.job, self._state.folder))
        if self._world.joining:
            self._world.join()
            self._regroup()

    def step(self, work: Callable[[], object]) -> Outcome:
        state, world = self._state, self._world
        world.step = state.at.step
        if elastic.has_room(state.job, world, state.at.consumed):
            world.admit()
        before, divisions, outcome = self._statistics(), self._divisions, Outcome.DONE
        try:
            if world.suspended and not state.strategy.capabilities.local_updates:
                raise PeerLost("a host was lost")
            work()
        except LOST:
            outcome = Outcome.CHANGED
            self._interrupt()
            state.strategy.abandon()
            state.replica.load_local(before)
        world.step = state.at.step
        self._regroup()
        return outcome if self._divisions == divisions else Outcome.CHANGED

    def attempt(self, work: Callable[[], T], apply: Callable[[T], object] = lambda _: None) -> Outcome:
        if self._behind:  # it stays due until this rank has done as many steps as the others
            return Outcome.DONE
        before, divisions, outcome = self._statistics(), self._divisions, Outcome.DONE
        try:
            result = work()
            self._world.commit()
        except LOST:
            outcome = Outcome.CHANGED
            self._interrupt()
            self._state.replica.load_local(before)
        else:
            apply(result)
        self._regroup()
        return outcome if self._divisions == divisions else Outcome.CHANGED

    def agree(self, synchronize: Callable[[], object]) -> Outcome:
        state, world = self._state, self._world
        if state.strategy.in_sync:
            return Outcome.DONE
        if self._regroup():
            synchronize()
        else:  # other ranks have gone on with smaller batches
            state.at.step = world.step = world.target
        return Outcome.CHANGED

    def _statistics(self) -> dict[str, np.ndarray]:
        """Return a copy of the running statistics, which the work changes before it exchanges anything."""
        self._began_s = time.perf_counter()
        return {name: array.copy() for name, array in self._state.replica.local_state().items()}

    def _interrupt(self) -> None:
        """Use the present connections no more, unless they are new: `commit` may have recovered before it failed."""
        self._noticed_s = self._noticed_s or self._began_s
        if not self._world.suspended:
            self._world.lost()

    def _regroup(self) -> bool:
        """After a change, continue with the present members. Returns False if other ranks have done more steps."""
        state, world = self._state, self._world
        while world.suspended:
            self._noticed_s = self._noticed_s or time.perf_counter()
            try:
                if world.broken:
                    world.lost()
                    state.strategy.abandon()
                    counts = world.recover()
                    state.learn(state.strategy.settle(state.replica, counts))
                self._behind = world.step < world.target and not world.joining
                if self._behind:
                    return False
                self._hand_over()
                state.strategy.regroup(state.replica, self._received)
                self._received = None
                self._divide(time.perf_counter() - self._noticed_s)
            except PeerLost:
                world.lost()
                continue
            self._noticed_s, self._rounded = None, False
            world.resume()
        return True

    def _hand_over(self) -> None:
        """Give the state of the run to new ranks. Collective; repeated after PeerLost.

        A rank that was interrupted does not know whether others have rounded their optimizer, so all report it.
        """
        state, world = self._state, self._world
        flags = world.gather([world.joining, self._rounded])
        if not any(joins or rounded for joins, rounded in flags):
            return
        capabilities = state.strategy.capabilities
        if not world.joining and not capabilities.local_updates and not capabilities.own_optimizer_state:
            snapshot.round_optimizer(state.replica)
        self._rounded, joining = True, [joins for joins, _ in flags]
        message = world.hand_over(joining, self._message) if any(joining) else None
        if message is not None and world.joining:
            self._enter(message)

    def _message(self) -> bytes:
        state = self._state
        document = {
            "position": dataclasses.asdict(state.at),
            "due": dataclasses.asdict(state.due),
            "files": elastic.files_of_rank_0(state.folder),
        }
        packed = np.frombuffer(zlib.compress(json.dumps(document).encode()), np.uint8)
        return b"".join(pieces({DOCUMENT: packed} | snapshot.for_newcomers(state.replica, state.strategy)))

    def _enter(self, message: np.ndarray) -> None:
        """Continue at the position of rank 0, as a rank whose host has come back or is new."""
        state, arrays = self._state, views(message)
        document = json.loads(zlib.decompress(arrays.pop(DOCUMENT).tobytes()))
        position = Position(**document["position"])
        state.use(position.strategy)
        self._received = snapshot.welcome(arrays, state.replica)
        state.at, state.due = position, Due(**document["due"])
        self._world.step = state.at.step
        elastic.copy_records(state.folder, state.number, document["files"])
        state.reopen_records(state.number)
        self._world.joining = False

    def _divide(self, lost_s: float) -> None:
        """Divide the rest of the epoch among the present members. Collective; repeated after PeerLost."""
        state, world, at = self._state, self._world, self._state.at
        # A rank that saw the end of an evaluation is in the next epoch, and others are not yet.
        positions = world.gather([at.epoch, at.consumed])
        at.consumed = max(consumed for epoch, consumed in positions if epoch == at.epoch)
        state.renew_checkpoints()
        state.loader, state.plan = elastic.divided(state.job, world, self._balance)
        if not state.loader.can_continue(at.consumed):  # the epoch ends without the few samples that are left
            at.consumed = state.loader.samples
        elastic.keep_division(state.folder, world, state.plan)
        if self._adaptive:
            state.due.choose = False  # some ranks may not have read the request
            self._adaptive.regroup(state.plan)
        if world.rank == 0 and state.number != 0:
            elastic.take_over(state.folder, state.number)
            state.reopen_records(0)
        at.epoch_s += lost_s
        self._divisions += 1
        record = elastic.view_record(world, at, state.plan, lost_s)
        state.writer.write(record)
        state.say(elastic.described(record, state.plan))


def members_of(state: RunState, balance: Balance | None, adaptive: Adaptive | None) -> Membership:
    if isinstance(state.world, ElasticCommunicator):
        return ElasticMembership(state, state.world, balance, adaptive)
    return Membership()
