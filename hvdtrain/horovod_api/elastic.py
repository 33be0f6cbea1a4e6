"""Horovod's elastic API: a script continues without a lost host (`launch/mpirun.sh --elastic`).

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 10):
            ...
            state.commit()

If a host is lost, each collective call raises an error in the ranks that are left. `run` catches it. The ranks connect
again, return to the last commit, and call the function once more. A commit is a transaction (see `comm.elastic`), so
all ranks return to the same one. A host that has come back takes part after a commit of rank 0. Without --elastic,
`run` only calls the function.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hvdtrain.comm.backends.horovod import internal_error
from hvdtrain.comm.elastic import ElasticCommunicator
from hvdtrain.comm.errors import PeerLost, lost_peer
from hvdtrain.horovod_api import job, record
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class State:
    """Values that return to the last commit if a host is lost; each is an attribute.

    Subclasses copy, restore and share values that are not plain objects.
    """

    def __init__(self, **values: Any) -> None:
        self._names = list(values)
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._before: dict[str, Any] | None = None
        """While a commit is not confirmed: the one before it"""
        for name, value in values.items():
            setattr(self, name, value)
        self.save()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these functions after a loss, for example to adapt the learning rate to the new `hvd.size()`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the present values, on all ranks or on none. Collective. Raises PeerLost if a host was lost.

        With a strategy that averages weights, it averages them first. Raises PeerLost too if a host has come back.
        """
        for name in self._names:
            if (synchronize := getattr(getattr(self, name), "synchronize_weights", None)) is not None:
                synchronize()
        self._before = self._saved
        self.save()
        if (world := _elastic_world()) is not None:
            world.confirm()
        self._before = None
        if world is not None:
            world.admit()
            self.check_host_updates()

    def settle(self, counts: bool) -> None:
        """After a loss: keep the commit that it interrupted if it `counts`, else the one before."""
        if self._before is not None and not counts:
            self._saved = self._before
        self._before = None

    def check_host_updates(self) -> None:
        """Raise PeerLost if a host was lost, without waiting for the next collective call."""
        world = _elastic_world()
        if world is not None and world.broken:
            raise PeerLost("the members of the job changed")

    def save(self) -> None:
        """Keep the present values on this rank only."""
        self._saved = {name: self._copy(getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Return to the values that were kept last."""
        for name, saved in self._saved.items():
            self._put(name, copy.deepcopy(saved))

    def sync(self) -> None:
        """Give all ranks rank 0's values, and keep them. Collective."""
        self._share()
        self.save()

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value)

    def _put(self, name: str, saved: Any) -> None:
        setattr(self, name, saved)

    def _share(self) -> None:
        raise NotImplementedError


def _elastic_world() -> ElasticCommunicator | None:
    return job.job().elastic if job.is_connected() else None


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function whose first argument is a state continue, from the last commit, if a host is lost.

    All ranks must call it, and reach each of its collective calls within 5 minutes. Losses before and after the call
    end the job. Raises Failure (78) under horovodrun's own elastic mode.
    """

    @functools.wraps(function)
    def until_done(state: State, *arguments: Any, **named: Any) -> Any:
        world = _elastic_world()
        if world is None:
            if os.environ.get("HOROVOD_ELASTIC") == "1":
                hint = "use launch/mpirun.sh --elastic, or horovodrun without host discovery"
                raise Failure(f"hvd.elastic.run cannot use horovodrun's elastic mode; hint: {hint}", exits.BAD_CONFIG)
            state.sync()
            return function(state, *arguments, **named)
        job.job().protected = True
        world.begin({})
        lost = ended = False
        result = None
        if world.joining:
            world.join()
            _regroup(world)
            world.joining, lost = False, True
        while True:
            try:
                if lost:
                    state.restore()
                    state.on_reset()
                state.sync()
                result = function(state, *arguments, **named)
                ended = True
                world.confirm()  # no rank returns before all have come this far
                return result
            except Exception as error:
                if not _is_loss(error, world):
                    raise
            counts, lost = _regroup(world), True
            if ended and counts:
                return result
            ended = False
            state.settle(counts)

    return until_done


def _is_loss(error: Exception, world: ElasticCommunicator) -> bool:
    """Whether an error means that a host was lost. Connections that cannot be made are Failures, also in a graph."""
    in_graph = type(error).__module__.startswith("tensorflow.") and "Failure: " in str(error)
    return lost_peer(error) or (world.broken and (in_graph or isinstance(error, Failure)))


def _regroup(world: ElasticCommunicator) -> bool:
    """Connect the ranks that are left. Return whether the transaction that the loss interrupted counts. Collective."""
    counts = False
    while True:
        try:
            job.job().close()
            counts |= world.recover()
            job.reconnect()
        except (PeerLost, Failure, internal_error()):
            continue
        world.resume()
        if not world.suspended:
            break
    record.interrupted(world.view.reason)
    if world.rank == 0:
        text = f"view {world.view.number}: {world.size} ranks continue from the last commit"
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
    return counts
