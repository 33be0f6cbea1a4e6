"""Chooses the strategy of a run with `--strategy auto` again when its steps take another time than before.

Each rank compares its recent steps with the level that it recorded after the last choice. The level is measured in the
run itself, because a prediction may be wrong by 10 %. A rank whose steps have departed for 20 steps adds a request to
the tail of its gradients, as a request to stop does. All ranks read the sum in the same step, synchronize, measure the
links, and rank 0 chooses. If another strategy is clearly faster, all ranks change to it. If not, the recent level
becomes the usual one, so that the same change is not examined twice.

In an elastic job all ranks also request a choice when the members have changed. It uses the links that were measured
last, because a lost host changes no other link, and a host that comes back has the same link as before. A rank of a
host that has come back uses another rank's profile from before step 0.

Weights and running statistics stay as they are. So does the optimizer's state, with one exception: after local steps
each rank has its own, and a strategy without local steps starts from their mean. The residual of a lossy reducer is
dropped, because a residual of gradients is not one of weight changes.
"""

from __future__ import annotations

import collections
import statistics
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hvdtrain import records
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.batch_plan import BatchPlan
from hvdtrain.frameworks import Replica
from hvdtrain.plan import choice
from hvdtrain.plan.profile import FIXED_SAMPLES, Profile
from hvdtrain.strategies import CHOOSE, automatic
from hvdtrain.training import profiled
from hvdtrain.training.connected import Connected

GROUP, GROUPS = 4, 5
"""Steps in a group, and groups. Local steps repeat every two or four, so the means of groups are comparable"""
DEPARTURE = 0.15
"""Relative difference that every group must have from the usual level"""
MOST, PERIOD_S = 10, 3600.0
"""Choices in an hour. One takes about two seconds, so they take less than 1 % of it"""


class Level(NamedTuple):
    """Mean times of a rank's steps."""

    step_s: float
    compute_s: float


class Pace:
    """The recent steps of a rank, compared with its usual level."""

    def __init__(self) -> None:
        self.usual: Level | None = None
        """None until it is known"""
        self._group: list[Level] = []
        self._groups: collections.deque[Level] = collections.deque(maxlen=GROUPS)

    def add(self, step_s: float, compute_s: float) -> None:
        self._group.append(Level(step_s, compute_s))
        if len(self._group) == GROUP:
            self._groups.append(Level(*map(statistics.mean, zip(*self._group, strict=True))))
            self._group = []
        if self.usual is None and len(self._groups) == GROUPS:
            self.settle()

    def recent(self) -> Level | None:
        """Return the medians over the groups, which a few slow steps do not move; None without a group."""
        return Level(*map(statistics.median, zip(*self._groups, strict=True))) if self._groups else None

    def settle(self) -> None:
        """Take the recent level as the usual one."""
        self.usual = self.recent()
        self.clear()

    def clear(self) -> None:
        self._group = []
        self._groups.clear()

    def departed(self) -> bool:
        """Whether all recent steps, in groups, were slower than usual, or all faster."""
        if self.usual is None or len(self._groups) < GROUPS:
            return False
        ratios = [each.step_s / self.usual.step_s for each in self._groups]
        return min(ratios) > 1 + DEPARTURE or max(ratios) < 1 / (1 + DEPARTURE)


class Adaptive:
    """Watches the pace of a run on several hosts whose strategy was chosen from `job.profile`."""

    def __init__(self, job: Connected) -> None:
        rule = automatic.rule(job.auto or "")
        assert rule is not None and job.profile is not None
        self._exchanges = profiled.candidates(job, rule)
        self._profile, self._ranks, self._plan = job.profile, job.ranks, job.run.plan
        self._pace = Pace()
        self._regrouped = False
        """Whether the members have changed since the last choice"""
        self.links: list[dict[str, Any]] = []
        """The links of the last choice: see `records.Manifest.links`"""
        self._chosen_at: collections.deque[float] = collections.deque(maxlen=MOST)

    def add(self, step: records.Step, seconds: float) -> None:
        """Add a step of this rank that took `seconds`."""
        if not step.warmup:
            self._pace.add(seconds, step.compute_s)

    @property
    def request(self) -> float:
        """This rank's request for the next step: `CHOOSE` or 0."""
        if self._ranks.hosts_count == 1:  # a host that is left alone sends nothing
            return 0.0
        if self._regrouped:
            return CHOOSE
        many = len(self._chosen_at) == MOST and time.monotonic() - self._chosen_at[0] < PERIOD_S
        return CHOOSE if self._pace.departed() and not many else 0.0

    def regroup(self, plan: BatchPlan) -> None:
        """Request a choice, because the members have changed, and have divided the work by this plan."""
        self._scale((plan.rank_batch + FIXED_SAMPLES) / (self._plan.rank_batch + FIXED_SAMPLES))
        self._plan, self._pace, self._regrouped = plan, Pace(), True

    def _scale(self, factor: float = 1.0) -> None:
        """Multiply the profile's times by this factor and by the recent change of this rank's computation."""
        usual, recent = self._pace.usual, self._pace.recent()
        if usual and recent and usual.compute_s:
            factor *= recent.compute_s / usual.compute_s
        self._profile = slowed(self._profile, factor)

    def again(self, current: str) -> choice.Chosen:
        """Measure the links and return the strategy to continue with. Collective, while nothing is exchanged.

        The profile's times change by the factor by which this rank's computation changed since the last choice.
        """
        usual, recent = self._pace.usual, self._pace.recent()
        if not self._regrouped:
            self._chosen_at.append(time.monotonic())
            self._ranks.measure_links()
            self._scale()
        self.links = self._ranks.links
        if self._ranks.elastic:  # a rank of a host that came back may know none
            self.links = next((links for links in self._ranks.gather(self.links) if links), [])
        batch = self._plan.global_batch
        chosen = choice.choose(self._profile, self._ranks, self._exchanges, batch, current, self.links)
        if self._regrouped:
            return chosen._replace(reason=f"on {self._ranks.hosts_count} hosts now; {chosen.reason}")
        if chosen.strategy == current:
            self._pace.settle()
        else:
            self._pace = Pace()
        times = f"steps took {recent.step_s:.3g} s instead of {usual.step_s:.3g} s; " if usual and recent else ""
        return chosen._replace(reason=times + chosen.reason)

    def settle(self) -> None:
        """All members know the choice."""
        if self._regrouped:
            self._pace, self._regrouped = Pace(), False


def slowed(profile: Profile, factor: float) -> Profile:
    """Return the profile of a host that computes `factor` times as long."""
    points = [
        msgspec.structs.replace(each, backward_s=each.backward_s * factor, update_s=each.update_s * factor)
        for each in profile.points
    ]
    return msgspec.structs.replace(profile, points=points)


def mean_optimizer(replica: Replica, ranks: Communicator) -> dict[str, np.ndarray] | None:
    """Return a state with the mean of the ranks' optimizers, which differ after local steps. Collective.

    None if the optimizer has no state.
    """
    state = replica.state()
    own = {name: array for name, array in state.items() if not name.startswith(("parameter.", "average."))}
    if not own:
        return None
    total = ranks.sum(np.concatenate([array.reshape(-1) for array in own.values()], dtype=np.float32), "optimizer")
    parts = np.split(total / np.float32(ranks.size), np.cumsum([array.size for array in own.values()])[:-1])
    return state | {
        name: part.reshape(array.shape).astype(array.dtype)
        for (name, array), part in zip(own.items(), parts, strict=True)
    }
