"""Times the steps that a user's script makes itself, for `hvdtrain plan` and for `auto`.

Nothing is repeated and nothing is added to the training: the script calls its optimizer, and the times between these
calls are the profile. So there is one batch size, the script's own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hvdtrain.comm.launch_env import launch_env
from hvdtrain.plan import profile
from hvdtrain.plan.profile import Point, Profile, Waking
from hvdtrain.strategies.cost import Shape
from hvdtrain.system import cgroup

WARM_UP_STEPS = 4
"""Steps that are not timed. Between them it is measured how late threads wake."""


class Steps:
    """Times of an optimizer's steps."""

    _last_used: ClassVar[float] = 0.0
    _last_end: ClassVar[float | None] = None
    """When an optimizer of this process ended a step. If several take turns, each has its own part of the time."""

    def __init__(self, most: int, limit_s: float, wait: Callable[[], None] = lambda: None) -> None:
        """Times `most` steps after warm-up, or fewer if they take longer than `limit_s`.

        `wait`: waits until the device has finished all work given to it.
        """
        self._most, self._limit_s, self._wait = most, limit_s, wait
        self.made = 0
        """Number of steps, with warm-up"""
        self._rows: list[tuple[float, float]] = []
        """Seconds until the gradients were ready, and seconds of the update"""
        self._used: list[float] = []
        """Processor seconds of each timed step, of all threads"""
        self._late: list[float] = []
        self._waking: Waking | None = None
        self._first: float | None = None
        self._computed: float | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether the next step is not timed: one of the first, unless steps are very slow."""
        slow = self._first is not None and time.perf_counter() - self._first > self._limit_s / 2
        return self.made < WARM_UP_STEPS and not (slow and self.made)

    @property
    def timed(self) -> int:
        """The number of timed steps."""
        return len(self._rows)

    @property
    def are_enough(self) -> bool:
        late = self._first is not None and time.perf_counter() - self._first > self._limit_s
        return self.timed >= self._most or (late and self.timed > 0)

    def computed(self) -> None:
        """The gradients of a step are ready. A second call in a step does nothing."""
        if self._computed is not None:
            return
        self._wait()
        self._computed = time.perf_counter()
        self._first = self._first or self._computed
        if self._waking:
            self._waking.__exit__()
            self._late.append(self._waking.late_s)
            self._waking = None

    @property
    def began(self) -> float | None:
        """When the step began whose gradients are ready."""
        return Steps._last_end

    def ended(self, waited_s: float) -> bool:
        """A step has ended, which waited for other ranks for `waited_s` after its gradients were ready.

        Returns whether it counts: a step without `computed` exchanged nothing.
        """
        if self._computed is None:
            return False
        self._wait()
        now, used, began = time.perf_counter(), time.process_time(), Steps._last_end
        if not self.is_warming_up and began is not None:
            self._used.append(used - Steps._last_used)
            self._rows.append((self._computed - began, max(0.0, now - self._computed - waited_s)))
        self.made, self._computed, Steps._last_end = self.made + 1, None, now
        Steps._last_used = used
        if self.is_warming_up:
            self._waking = Waking()
            self._waking.__enter__()
        return True

    def profile(
        self,
        *,
        script: str,
        setup: Mapping[str, Any],
        shapes: Sequence[Shape],
        batch: int,
        threads: int,
        accumulation: int = 1,
        averaging_s: float = 0.0,
        ready: Sequence[float] = (),
    ) -> Profile:
        """Return the profile, without the cost of coding. At least one step must have been timed.

        Times are medians, so that an evaluation between two steps does not count.

        `script`: its name. `shapes`: of the trained arrays. `batch`: this rank's samples of a step. `accumulation`,
        `ready`: see `Profile`.
        """
        backward_s, update_s = (statistics.median(column) for column in zip(*self._rows, strict=True))
        if launch_env().size == 1:  # a median of short steps leaves out the time in which a quota is used up
            backward_s = max(backward_s, statistics.median(self._used) / cgroup.process_cores() - update_s)
        variation = profile.variation([sum(row) for row in self._rows])
        parameters = sum(math.prod(shape) for shape in shapes)
        return Profile(
            machine=profile.machine(),
            workload=script,
            model=f"{script}: {parameters:,} parameters",
            setup=dict(setup),
            shapes=[list(shape) for shape in shapes],
            epoch_samples=None,
            threads=threads,
            points=[
                Point(batch=batch, backward_s=backward_s, update_s=update_s, variation=variation, steps=len(self._rows))
            ],
            accumulation=accumulation,
            averaging_s=averaging_s,
            waking_s=statistics.mean(self._late) if self._late else 0.0,
            ready=list(ready),
            peak_rss_bytes=profile.peak_rss_bytes(),
            drop_in=True,
        )


@dataclasses.dataclass(frozen=True)
class Script:
    """The steps of a script so far, as `hvdtrain plan` sees them."""

    steps: Steps
    framework: str
    profiled: Callable[[], Profile]
    """Returns the profile. Raises Failure (78) if the batch is unknown."""
