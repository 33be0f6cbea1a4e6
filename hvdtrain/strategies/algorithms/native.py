"""The framework's own data parallelism, with no Horovod: what one would use without this package.

PyTorch: DistributedDataParallel over Gloo (CPU) or NCCL (GPU). Gradients are put into buckets in the order in which
backward makes them; a full bucket is summed over ranks in a ring while backward goes on. `hook=fp16` sends them as
half precision, `hook=powersgd` as factors of `rank` (see `comm.backends.ddp_powersgd`), both by PyTorch's own hooks.

TensorFlow: MultiWorkerMirroredStrategy over gRPC (CPU) or NCCL (GPU). Gradients are summed by the strategy's all_reduce
in the replica's context, as Keras' optimizers do, in a ring too.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020;
TensorFlow's guide "Distributed training with TensorFlow" (tensorflow.org/guide/distributed_training).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.comm.backends import ddp_powersgd
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements, ring, ring_bytes
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

HALF = 2
"""Bytes"""


class Native(Strategy):
    """Gradients summed by the framework itself during backward; its state is that of the hook."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        hook: Literal["none", "fp16", "powersgd"] = dataclasses.field(default="none", metadata={"example": "powersgd"})
        """Gradient compression with PyTorch: DistributedDataParallel's own hooks"""
        rank: int = bounded(2, least=1, example=4)
        """Of the factors that the hook powersgd sends"""

    backend = "native"
    in_backward = True
    _step = 0

    @property
    def bound(self) -> str | None:
        held = self.settings.hook == "powersgd"
        return "PyTorch's PowerSGD keeps in each rank what that one left out" if held else None

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, round_: Cost | None) -> Cost:
        """With the hook powersgd two sums that wait for all of backward (`comm.backends.ddp`). Raises Failure (78)."""
        if settings.hook == "powersgd" and not all(map(len, shapes)):
            told = "PyTorch's hook takes no parameter without dimensions; give it the shape (1,), or take powersgd"
            raise Failure(f"--strategy native:hook=powersgd: {told}", exits.BAD_CONFIG)
        payload = payload_bytes(shapes, settings, ddp_powersgd.START_STEP)
        cost = ring(payload, layout.ranks, exact=settings.hook == "none")
        return dataclasses.replace(cost, rounds=2 * cost.rounds, behind="") if settings.hook == "powersgd" else cost

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if settings.hook != "none" and config.framework == "tensorflow":
            raise Failure(
                f"hook={settings.hook}: only PyTorch's DistributedDataParallel has such hooks; add --framework torch, "
                "or leave it out",
                exits.BAD_CONFIG,
            )
        if settings.hook == "powersgd" and config.precision == "fp16":
            told = "it would keep the infinite gradients that loss scaling makes; take --precision bf16"
            raise Failure(f"hook=powersgd does not go with --precision fp16: {told}", exits.BAD_CONFIG)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        sent = ring_bytes(payload_bytes(self._shapes, self.settings, self._step), self._world.size)
        self._step += 1
        return Exchanged.of(tail, sent)

    def state(self) -> dict[str, np.ndarray]:
        if self.settings.hook != "powersgd":
            return {}
        return {"step": np.array(self._step), **self._world.state()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._step = int(state.get("step", 0))
        self._world.load({name: array for name, array in state.items() if name != "step"})

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return states[self._world.rank if len(states) == self._world.size else 0]


def payload_bytes(shapes: Sequence[Shape], settings: Native.Settings, step: int) -> int:
    """What one rank gives to the sums of step `step`."""
    if settings.hook == "powersgd":
        return 4 * ddp_powersgd.elements_sent(shapes, settings.rank, step)
    return (HALF if settings.hook == "fp16" else 4) * elements(shapes)
