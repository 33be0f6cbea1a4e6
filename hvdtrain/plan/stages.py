"""Times a pipeline: one stage of the model on each host, activations and their gradients on the links between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hvdtrain.pipeline.schedule import Order, order
from hvdtrain.plan.network import Link

STEPS, WARM_UP_STEPS = 6, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A host with a part of the model. Times are of a micro-batch, bytes of its activations."""

    link: Link
    forward_s: float
    backward_s: float
    update_s: float
    sent: float = 0.0
    """Bytes of the activations for the next stage, and of their gradients on the way back"""


def step_s(stages: Sequence[Stage], micro_batches: int, schedule: Order = "1f1b") -> float:
    """Return the mean time of a step.

    Of the actions whose inputs are known, the one that ends first is next. So links carry messages in the order in
    which they were given to them.
    """
    count = len(stages)
    todo = [
        [(step, *each) for step in range(STEPS) for each in order(schedule, stage, count, micro_batches)][::-1]
        for stage in range(count)
    ]
    free, up, down = ([0.0] * count for _ in range(3))
    arrived: dict[tuple[int, int, bool, int], float] = {}
    ends = list[float]()

    def end_s(stage: int) -> float:
        """Return the end of a stage's next action, infinity if its input is not known."""
        _, forward, _ = action = todo[stage][-1]
        begins = 0.0 if stage == (0 if forward else count - 1) else arrived.get((stage, *action), math.inf)
        return max(free[stage], begins) + (stages[stage].forward_s if forward else stages[stage].backward_s)

    while any(todo):
        now, stage = min((end_s(stage), stage) for stage in range(count) if todo[stage])
        step, forward, part = todo[stage].pop()
        other = stage + 1 if forward else stage - 1
        if 0 <= other < count:
            sender, receiver, nbytes = stages[stage].link, stages[other].link, stages[min(stage, other)].sent
            sent_s = max(now, up[stage], down[other]) + max(nbytes / sender.up, nbytes / receiver.down)
            up[stage] = down[other] = sent_s
            arrived[other, step, forward, part] = sent_s + sender.latency_s
        is_end = not forward and part == micro_batches - 1
        free[stage] = now + is_end * stages[stage].update_s
        ends += [free[0]] if is_end and stage == 0 else []
    return (ends[-1] - ends[WARM_UP_STEPS - 1]) / (STEPS - WARM_UP_STEPS)
