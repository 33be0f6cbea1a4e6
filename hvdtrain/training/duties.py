"""What the ranks of a run do together between two steps, if it is due.

`Membership.attempt` runs a duty, because the members may change during it: `run` is collective and may have to be
repeated with the new members, and `apply` uses its result once it counts on all of them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Protocol

import numpy as np

from hvdtrain import records
from hvdtrain.plan.choice import Chosen
from hvdtrain.strategies import parse
from hvdtrain.training import consistency, elastic, snapshot
from hvdtrain.training.adaptive import Adaptive, mean_optimizer
from hvdtrain.training.balance import Balance
from hvdtrain.training.state import RunState
from hvdtrain.training.summary import show_shares


class Duty(Protocol):
    """Collective work between two steps. All ranks know alike when it is due."""

    def is_due(self, last: bool) -> bool:
        """Whether to do it now. `last`: at the end of an epoch, before its evaluation."""

    def run(self) -> Any: ...

    def apply(self, result: Any) -> None: ...


class Choose:
    """--strategy auto: choose the strategy again, and change it if that pays."""

    def __init__(self, state: RunState, adaptive: Adaptive) -> None:
        self._state, self._adaptive = state, adaptive

    def is_due(self, last: bool) -> bool:
        return self._state.due.choose and not self._state.due.stop and self._state.strategy.in_sync

    def run(self) -> tuple[Chosen, dict[str, np.ndarray] | None, float]:
        began, state, optimizer = time.perf_counter(), self._state, None
        chosen = self._adaptive.again(state.at.strategy)
        if chosen.strategy != state.at.strategy:
            local = state.strategy.capabilities.local_updates
            if local and not parse(chosen.strategy).capabilities.local_updates:
                optimizer = mean_optimizer(state.replica, state.data)
            consistency.check(state.replica.state(), state.data)
        return chosen, optimizer, began

    def apply(self, result: tuple[Chosen, dict[str, np.ndarray] | None, float]) -> None:
        state, (chosen, optimizer, began), before = self._state, result, self._state.at.strategy
        state.due.choose = False
        if state.world.hosts_count == 1:  # the others were lost during the choice; if one comes back, all ask again
            return
        state.use(chosen.strategy)
        if optimizer is not None:
            state.replica.load(optimizer)
        self._adaptive.settle()
        seconds, step = time.perf_counter() - began, state.at.step
        state.at.epoch_s += seconds
        state.record(
            records.Chosen(
                step=step, strategy=chosen.strategy, reason=chosen.reason, choice_s=seconds, links=self._adaptive.links
            )
        )
        change = "kept" if chosen.strategy == before else f"instead of {before}"
        state.say(f"strategy       {chosen.strategy} from step {step}, {change}: {chosen.reason}")


class Compare:
    """--check-replicas: compare the weights of all ranks."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def is_due(self, last: bool) -> bool:
        return self._state.due.check and self._state.strategy.in_sync

    def run(self) -> None:
        consistency.check(self._state.replica.state(), self._state.data)

    def apply(self, result: None) -> None:
        self._state.due.check = False


class Share:
    """--shares measured: divide the batches of the next epoch by the ranks' present speed, if that pays."""

    def __init__(self, state: RunState, balance: Balance) -> None:
        self._state, self._balance = state, balance
        self.divided = False
        """Whether the last division changed the shares"""

    def is_due(self, last: bool) -> bool:
        return last and self._state.at.epoch + 1 < self._state.config.epochs and not self._state.due.stop

    def run(self) -> None:
        state = self._state
        shares = self._balance.shares(state.world)
        self.divided = shares != state.plan.shares
        if not self.divided:
            return
        state.loader = state.loader.divided(shares)
        state.plan = dataclasses.replace(state.plan, shares=shares)
        elastic.keep_division(state.folder, state.world, state.plan)
        text = show_shares(shares, state.loader.rank_samples)
        state.say(f"shares         {text} from step {state.at.step} on: the speeds of the ranks have changed")

    def apply(self, result: None) -> None: ...


class Save:
    """Save a checkpoint: after a number of steps, when a signal stops the run, and after epochs."""

    def __init__(self, state: RunState, *, best: bool = False) -> None:
        """`best`: whether the present weights are those of the best epoch."""
        self._state, self._best = state, best

    def is_due(self, last: bool) -> bool:
        state = self._state
        savable = state.strategy.in_sync or state.strategy.capabilities.saves_anytime
        return savable and (state.due.stop or (state.due.save and not last))

    def run(self) -> float:
        began, state = time.perf_counter(), self._state
        shared, local = snapshot.taken(state.replica, state.strategy)
        state.checkpoints.save(state.at.step, shared, local, dataclasses.asdict(state.at), best=self._best)
        return began

    def apply(self, result: float) -> None:
        state, seconds = self._state, time.perf_counter() - result
        state.due.save, state.stopped = False, state.due.stop
        state.at.checkpoint_s += seconds
        state.record(records.Saved(step=state.at.step, checkpoint_s=seconds, best=self._best))
