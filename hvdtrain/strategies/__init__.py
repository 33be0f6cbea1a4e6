"""How the ranks' gradients, or weights, become one: the protocol, and the tables of strategies.

A reducer says how one vector is summed between hosts (`hierarchical`, `powersgd` ...), a schedule when and what is
summed (`allreduce`, `local-sgd`, `delayed` ...). `--strategy` takes either: a reducer alone sums the gradients of every
step; a schedule made for slow networks takes its reducer from `--inner`. A new one is one file and one line below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvdtrain import exits
from hvdtrain.arguments import near
from hvdtrain.config import TrainConfig, flag
from hvdtrain.exits import Failure
from hvdtrain.strategies.allreduce import AllReduce
from hvdtrain.strategies.async_ps import AsyncPS
from hvdtrain.strategies.delayed import Delayed
from hvdtrain.strategies.half import BF16, FP16
from hvdtrain.strategies.hierarchical import Hierarchical
from hvdtrain.strategies.hybrid import Hybrid
from hvdtrain.strategies.local_sgd import LocalSGD
from hvdtrain.strategies.native import Native
from hvdtrain.strategies.onebit import OneBit
from hvdtrain.strategies.payload import Layout, Shape
from hvdtrain.strategies.powersgd import PowerSGD
from hvdtrain.strategies.reducer import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.strategies.rounded import Int4, Int8
from hvdtrain.strategies.synchronous import Synchronous
from hvdtrain.strategies.topk import TopK
from hvdtrain.timing import Clock
from hvdtrain.world import Carrier, World

__all__ = ["REDUCERS", "SCHEDULES", "Exchanged", "Layout", "Reducer", "Strategy", "Vectors"]


class Strategy(Protocol):
    """One object, one verb. Its state lives in it and goes into the checkpoint."""

    carrier: Carrier
    """What connects the ranks"""
    in_backward: bool
    """True: the world's own step (Horovod's optimizer or tape, DistributedDataParallel, MultiWorkerMirroredStrategy)
    exchanges each gradient while backward still computes the others"""
    local: bool
    """True: each rank updates its weights by its own gradients for a while, so its gradients are divided by its own
    sample count and its momentum is its own"""

    uses: tuple[str, ...]
    """Settings of the config that it goes by"""

    def __init__(self, world: World, shapes: Sequence[Shape], config: TrainConfig, reducer: Reducer | None) -> None:
        """`shapes`: of the trainable arrays, in the model's order; `reducer`: the one to use, if it uses one."""

    @staticmethod
    def bytes_per_step(
        shapes: Sequence[Shape], layout: Layout, config: TrainConfig, reducer: type[Reducer] | None
    ) -> float:
        """Payload bytes that each host gives to the network in a step on average, once the strategy is in its stride;
        on one host, what each rank sends there."""
        ...

    @property
    def level(self) -> bool:
        """Whether the weights are the same on all ranks now."""
        ...

    @property
    def common(self) -> np.ndarray | None:
        """What the ranks' weights have in common while they differ: a checkpoint may be made of that, `state` and each
        rank's own. None: when level, or if there is none but when level."""
        ...

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        """After backward: exchanges, and updates the replica's weights. What it waits for the others is spent under
        the clock's label "communication", the update under "compute".
        """
        ...

    def settle(self, replica: Vectors, clock: Clock) -> Exchanged:
        """Before an evaluation: makes the weights the same on all ranks and waits for what is on its way."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """What this rank must have to continue as if never interrupted."""
        ...

    def load(self, state: dict[str, np.ndarray]) -> None: ...

    @property
    def bound(self) -> str | None:
        """Why its state belongs to the very ranks that made it; None: it can be handed on to another number."""
        ...

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """What this rank is to `load` after `states`, those of all ranks when they were another number (unless it is
        `bound`), or as many on other hosts."""
        ...


REDUCERS: dict[str, type[Reducer]] = {
    "hierarchical": Hierarchical,
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int4": Int4,
    "powersgd": PowerSGD,
    "topk": TopK,
    "onebit": OneBit,
}
SCHEDULES: dict[str, type[Strategy]] = {
    "allreduce": AllReduce,
    "native": Native,
    "local-sgd": LocalSGD,
    "delayed": Delayed,
    "async-ps": AsyncPS,
    "hybrid": Hybrid,
}
USES = {name: one.uses for name, one in REDUCERS.items()} | {name: one.uses for name, one in SCHEDULES.items()}
SETTINGS = {setting for uses in USES.values() for setting in uses}


def chosen(config: TrainConfig) -> tuple[type[Strategy], type[Reducer] | None]:
    """What --strategy and --inner mean; raises Failure (78) if they are unknown, or settings do not go with them."""
    schedule, reducer = lookup(config)
    used = {*schedule.uses, *(reducer.uses if reducer else ())}
    for field in dataclasses.fields(config):
        if field.name in SETTINGS - used and getattr(config, field.name) != field.default:
            takers = ", ".join(name for name, uses in USES.items() if field.name in uses)
            raise Failure(
                f"{flag(field.name)} means nothing to --strategy {config.strategy}"
                + (f" --inner {config.inner}" if "inner" in used else "")
                + f", only to {takers}: leave it out",
                exits.BAD_CONFIG,
            )
    late = schedule.local or config.strategy == "delayed"
    if config.precision == "fp16" and (late or (reducer is not None and reducer.remembers)):
        raise Failure(
            f"--precision fp16 does not go with {fact_words(config)}: its loss scaling makes infinite gradients, and "
            "scales each step differently, so nothing can be kept from step to step; take --precision bf16",
            exits.BAD_CONFIG,
        )
    return schedule, reducer


def lookup(config: TrainConfig) -> tuple[type[Strategy], type[Reducer] | None]:
    """As `chosen`, whatever the other settings are."""
    name = config.strategy
    if name in REDUCERS:
        return Synchronous, REDUCERS[name]
    if name not in SCHEDULES:
        known = ", ".join([*SCHEDULES, *REDUCERS])
        what = f"--strategy {name}: unknown{near(name, [*SCHEDULES, *REDUCERS])}; known: {known} (see --strategy help)"
        raise Failure(what, exits.BAD_CONFIG)
    if SCHEDULES[name].carrier != "streams":
        return SCHEDULES[name], None
    if config.inner not in REDUCERS:
        what = f"--inner {config.inner}: unknown{near(config.inner, REDUCERS)}; known: {', '.join(REDUCERS)}"
        raise Failure(what, exits.BAD_CONFIG)
    return SCHEDULES[name], REDUCERS[config.inner]


def make(config: TrainConfig, world: World, shapes: Sequence[Shape]) -> Strategy:
    """The strategy that the config asks for, in this world."""
    schedule, reducer = chosen(config)
    return schedule(world, shapes, config, reducer(shapes, config) if reducer else None)


def fact(config: TrainConfig, shapes: Sequence[Shape], layout: Layout) -> str:
    """The strategy and what it sends, for people."""
    schedule, reducer = chosen(config)
    sent = schedule.bytes_per_step(shapes, layout, config, reducer)
    if layout.hosts == 1 and reducer:
        return f"{fact_words(config)}: all ranks are on one host, nothing is compressed"
    where = "per host and step" if layout.hosts > 1 else "per rank and step"
    return f"{fact_words(config)}: {sent / 1e6:.2f} MB sent {where}"


def fact_words(config: TrainConfig) -> str:
    schedule, _ = lookup(config)
    return f"{config.strategy} of {config.inner}" if "inner" in schedule.uses else config.strategy
