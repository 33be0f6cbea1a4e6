"""Simulates a pipeline: one stage of the model on each host, activations and their gradients on the links between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import simpy

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
    """Return the mean time of a step."""
    env = simpy.Environment()
    events: dict[tuple[Any, ...], simpy.Event] = {}
    up, down = ([simpy.Resource(env) for _ in stages] for _ in range(2))
    ends: list[float] = []

    def arrived(*key: Any) -> simpy.Event:
        return events.setdefault(key, env.event())

    def send(sender: int, receiver: int, *key: Any) -> Generator[Any, Any, None]:
        with up[sender].request() as sending, down[receiver].request() as receiving:
            yield sending & receiving
            nbytes = stages[min(sender, receiver)].sent
            yield env.timeout(max(nbytes / stages[sender].link.up, nbytes / stages[receiver].link.down))
        yield env.timeout(stages[sender].link.latency_s)
        arrived(*key).succeed()

    def run(number: int, stage: Stage) -> Generator[Any, Any, None]:
        first, last = number == 0, number == len(stages) - 1
        for step in range(STEPS):
            for forward, part in order(schedule, number, len(stages), micro_batches):
                if forward:
                    if not first:
                        yield arrived("forward", step, number, part)
                    yield env.timeout(stage.forward_s)
                    if not last:
                        env.process(send(number, number + 1, "forward", step, number + 1, part))
                else:
                    if not last:
                        yield arrived("backward", step, number, part)
                    yield env.timeout(stage.backward_s)
                    if not first:
                        env.process(send(number, number - 1, "backward", step, number - 1, part))
            yield env.timeout(stage.update_s)
            if first:
                ends.append(env.now)

    for number, stage in enumerate(stages):
        env.process(run(number, stage))
    env.run()
    between = [after - before for before, after in itertools.pairwise(ends)]
    return sum(between[WARM_UP_STEPS - 1 :]) / len(between[WARM_UP_STEPS - 1 :])
