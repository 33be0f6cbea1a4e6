"""Chooses the layers of each stage so that the slowest stage or link is as fast as possible.

A full pipeline is as fast as its slowest part: the time that a stage computes for a micro-batch, forward and backward,
or the time that a link needs for the activations of a micro-batch. (Their gradients have the same size and travel back
at the same time.) Dynamic programming over the layers finds the partition with the least such time; among equal ones it
takes the one that sends least.
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
from hvdtrain.pipeline.schedule import StageModel
from hvdtrain.system import exits
from hvdtrain.system.arguments import near
from hvdtrain.system.exits import Failure

REPEATS = 3
"""Measurements of a layer; the fastest counts, because other programs may use the processor"""
Candidate = tuple[float, float, tuple[int, ...]]
"""A partition's slowest part, the numbers that it sends, and its borders"""


@dataclasses.dataclass(frozen=True)
class Partition:
    """The layers of a model and which of them begin a stage. Raises Failure (78) if stages would share an array."""

    layers: Sequence[Layer]
    borders: tuple[int, ...]
    """Stage s has the layers borders[s] to borders[s + 1] - 1"""

    def __post_init__(self) -> None:
        known = dict[str, int]()
        for stage in range(len(self.borders) - 1):
            for name in self.arrays(stage):
                if known.setdefault(name, stage) != stage:
                    sharing = [layer.name for layer in self.layers if name in layer.arrays]
                    raise Failure(
                        f"{name} is shared by the layers {', '.join(sharing)}, which must be in one stage; hint: let "
                        "--cut-at name layers before or after them",
                        exits.BAD_CONFIG,
                    )

    @property
    def names(self) -> tuple[str, ...]:
        """The first layer of each stage except the first stage, as --cut-at takes them."""
        return tuple(self.layers[border].name for border in self.borders[1:-1])

    def part(self, stage: int) -> range:
        """Return the indices of a stage's layers."""
        return range(self.borders[stage], self.borders[stage + 1])

    def arrays(self, stage: int) -> list[str]:
        """Return the parameters and running statistics of a stage."""
        return [name for layer in self.part(stage) for name in self.layers[layer].arrays]

    def boundary(self, stage: int) -> tuple[int, ...]:
        """Return the shape of what a stage sends to the next one for one sample."""
        return self.layers[self.borders[stage + 1] - 1].output

    def boundary_numbers(self, stage: int) -> int:
        """Return how many numbers a stage sends to the next one for one sample."""
        return math.prod(self.boundary(stage))


def named(layers: Sequence[Layer], stages: int, names: Sequence[str]) -> Partition:
    """Return the partition whose stages begin with the layers of these names. Raises Failure (78) for invalid names."""
    known = [layer.name for layer in layers]
    for name in names:
        if name not in known[1:]:
            raise Failure(
                f"--cut-at: no layer {name!r} can begin a stage{near(name, known)}; hint: these can: "
                f"{', '.join(known[1:])}",
                exits.BAD_CONFIG,
            )
    borders = (0, *(known.index(name) for name in names), len(known))
    if len(borders) != stages + 1 or any(a >= b for a, b in itertools.pairwise(borders)):
        raise Failure(
            f"--cut-at {','.join(names)} does not make {stages} stages; hint: give {stages - 1} "
            f"layer{'s' * (stages > 2)} in the model's order, the first of each stage except the first stage",
            exits.BAD_CONFIG,
        )
    return Partition(layers, borders)


def balanced(layers: Sequence[Layer], stages: int, seconds: Sequence[float], seconds_per_number: float) -> Partition:
    """Return the partition whose slowest part is fastest. Raises Failure (78) for more stages than layers.

    `seconds`: time of each layer for one sample, forward and backward. `seconds_per_number`: time of a link.
    """
    if stages > len(layers):
        raise Failure(
            f"--stages {stages}: the model can be partitioned into at most {len(layers)} stages; hint: use fewer",
            exits.BAD_CONFIG,
        )
    total_s = [0.0, *itertools.accumulate(seconds)]
    sent = [math.prod(layer.output) for layer in layers]

    def slowest(stage: int, begin: int, end: int) -> float:
        crossing = sent[end - 1] if stage < stages - 1 else 0
        return max(total_s[end] - total_s[begin], crossing * seconds_per_number)

    def best(limit: float, key: Callable[[Candidate], float]) -> Candidate:
        """Return the candidate with the least `key` among those without a part above `limit`."""
        by_end: dict[int, Candidate] = {0: (0.0, 0.0, (0,))}
        for stage in range(stages):
            extended: dict[int, Candidate] = {}
            last = stage == stages - 1
            for begin, (worst, numbers, borders) in by_end.items():
                for end in range(len(layers) if last else begin + 1, len(layers) - stages + stage + 2):
                    crossing = 0 if last else sent[end - 1]
                    candidate = (max(worst, slowest(stage, begin, end)), numbers + crossing, (*borders, end))
                    if candidate[0] <= limit:
                        extended[end] = min(extended.get(end, candidate), candidate, key=key)
            by_end = extended
        return by_end[len(layers)]

    fastest, _, _ = best(math.inf, lambda candidate: candidate[0])
    return Partition(layers, best(fastest, lambda candidate: candidate[1])[2])


def measured_s(make: Callable[[int], StageModel], layers: Sequence[Layer], batch: Batch) -> list[float]:
    """Measure the seconds of each layer for one sample of the batch, forward and backward; `make` makes one layer."""
    samples, seconds = len(batch.arrays[0]), list[float]()
    inputs: np.ndarray | None = None
    for number in range(len(layers)):
        layer, times = make(number), list[float]()
        for _ in range(REPEATS):
            began = time.perf_counter()
            output = layer.forward(0, batch, inputs)
            layer.back(0, None if output is None else np.ones_like(output))
            times.append(time.perf_counter() - began)
        inputs = None if output is None else np.ones_like(output)
        seconds.append(min(times) / samples)
    return seconds


def bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step in which a stage is idle if all stages are equally fast (GPipe, section 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)
