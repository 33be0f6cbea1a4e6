"""Chooses which layers make a stage, so that the slowest stage, or the slowest link between two, is as fast as can be.

A pipeline with all its stages at work goes on as fast as its slowest part: the time that a stage computes for a
micro-batch, forward and backward, or the time that a micro-batch's activations need for a link (their gradients, as
large, come back at the same time). The cut with the least such time is found by dynamic programming over the row of
layers; of equal ones that which sends least.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from hvdtrain.data import Batch
from hvdtrain.models.layers import Layer
from hvdtrain.pipeline.schedule import Part
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

MEASURED = 3
"""Times that a layer is tried; the fastest counts, since others may have used the processor meanwhile"""
Found = tuple[float, float, tuple[int, ...]]
"""Of a cut: the slowest part, the numbers sent, the borders"""

Needed = Callable[[int, int, int], float]
"""Of a stage's number and the borders of its layers: what it takes"""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Layers, and which of them begin a stage. Raises Failure (78) for an array that two stages would have."""

    layers: Sequence[Layer]
    borders: tuple[int, ...]
    """Stage s has layers borders[s] to borders[s + 1] - 1"""

    def __post_init__(self) -> None:
        known = dict[str, int]()
        for stage in range(len(self.borders) - 1):
            for name in self.arrays(stage):
                if known.setdefault(name, stage) != stage:
                    sharing = [layer.name for layer in self.layers if name in layer.arrays]
                    raise Failure(
                        f"{name} is shared by the layers {', '.join(sharing)}, which a stage must have together: let "
                        "--cut-at name layers before or behind them",
                        exits.BAD_CONFIG,
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers that begin a stage, but the first: what --cut-at takes."""
        return tuple(self.layers[border].name for border in self.borders[1:-1])

    def part(self, stage: int) -> range:
        """The numbers of a stage's layers."""
        return range(self.borders[stage], self.borders[stage + 1])

    def arrays(self, stage: int) -> list[str]:
        """The parameters and running statistics of a stage."""
        return [name for layer in self.part(stage) for name in self.layers[layer].arrays]

    def boundary(self, stage: int) -> tuple[int, ...]:
        """Shape of what a stage sends to the next for one sample."""
        return self.layers[self.borders[stage + 1] - 1].output

    def boundary_numbers(self, stage: int) -> int:
        """How many those are."""
        return math.prod(self.boundary(stage))


def named(layers: Sequence[Layer], stages: int, names: Sequence[str]) -> Cut:
    """The cut before the layers of these names. Raises Failure (78) for names that make no such cut."""
    known = [layer.name for layer in layers]
    for name in names:
        if name not in known[1:]:
            told = f"--cut-at: no layer {name!r} can begin a stage{near(name, known)}; these can: "
            raise Failure(told + ", ".join(known[1:]), exits.BAD_CONFIG)
    borders = (0, *(known.index(name) for name in names), len(known))
    if len(borders) != stages + 1 or any(a >= b for a, b in itertools.pairwise(borders)):
        raise Failure(
            f"--cut-at {','.join(names)}: give {stages - 1} layer{'s' * (stages > 2)} in the model's order, the first "
            f"of each of the {stages} stages but the first",
            exits.BAD_CONFIG,
        )
    return Cut(layers, borders)


def within(cut: Cut, needed: Needed, most_bytes: float) -> Cut:
    """The cut. Raises Failure (78) for the first stage that needs more."""
    for stage, (begin, end) in enumerate(itertools.pairwise(cut.borders)):
        if (bytes_ := needed(stage, begin, end)) > most_bytes:
            first, last = cut.layers[begin].name, cut.layers[end - 1].name
            raise Failure(
                f"--stage-memory: stage {stage} ({first} to {last}) needs {bytes_ / 1e6:,.0f} MB, "
                f"{most_bytes / 1e6:,.0f} are allowed: take more --stages, more --micro-batches or --recompute",
                exits.BAD_CONFIG,
            )
    return cut


def balanced(
    layers: Sequence[Layer],
    stages: int,
    seconds: Sequence[float],
    seconds_per_number: float,
    needed: Needed = lambda stage, begin, end: 0.0,
    most_bytes: float = math.inf,
) -> Cut:
    """The cut whose slowest part is the fastest, of those with no stage that needs more than `most_bytes`: `seconds` of
    each layer and sample, forward and backward; `seconds_per_number` of a link. Raises Failure (78) for more stages
    than layers, and where all cuts need more: for the one whose largest stage is the smallest."""
    if stages > len(layers):
        raise Failure(
            f"--stages {stages}: the model has {len(layers)} layers that can be cut apart; take fewer", exits.BAD_CONFIG
        )
    until = [0.0, *itertools.accumulate(seconds)]
    sent = [math.prod(layer.output) for layer in layers]

    def slow(stage: int, begin: int, end: int) -> float:
        if needed(stage, begin, end) > most_bytes:
            return math.inf
        crossing = sent[end - 1] if stage < stages - 1 else 0
        return max(until[end] - until[begin], crossing * seconds_per_number)

    def best(part: Needed, limit: float, key: Callable[[Found], float]) -> Found:
        """The cut with the least `key` among those with no `part` above `limit`."""
        known: dict[int, Found] = {0: (0.0, 0.0, (0,))}  # by the end of the last stage
        for stage in range(stages):
            found: dict[int, Found] = {}
            last = stage == stages - 1
            for begin, (worst, total, borders) in known.items():
                for end in range(len(layers) if last else begin + 1, len(layers) - stages + stage + 2):
                    crossing = 0 if last else sent[end - 1]
                    made = (max(worst, part(stage, begin, end)), total + crossing, (*borders, end))
                    if made[0] <= limit:
                        found[end] = min(found.get(end, made), made, key=key)
            known = found
        return known[len(layers)]

    if most_bytes < math.inf:
        within(Cut(layers, best(needed, math.inf, lambda made: made[0])[2]), needed, most_bytes)
    fastest, _, _ = best(slow, math.inf, lambda made: made[0])
    return Cut(layers, best(slow, fastest, lambda made: made[1])[2])


def timed(part: Callable[[int], Part], layers: Sequence[Layer], batch: Batch) -> list[float]:
    """Seconds of each layer by itself, forward and backward, for a sample of the batch; `part` makes one."""
    rows, found = len(batch.arrays[0]), list[float]()
    inputs: np.ndarray | None = None
    for number in range(len(layers)):
        layer, times = part(number), list[float]()
        for _ in range(MEASURED):
            began = time.perf_counter()
            output = layer.forward(0, batch, inputs)
            layer.back(0, None if output is None else np.ones_like(output))
            times.append(time.perf_counter() - began)
        inputs = None if output is None else np.ones_like(output)
        found.append(min(times) / rows)
    return found


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step that a stage has nothing to do, if all are equally fast (GPipe, section 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)
