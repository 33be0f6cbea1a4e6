"""The framework's own data parallelism, without Horovod.

PyTorch: DistributedDataParallel over Gloo (CPU) or NCCL (GPU). It fills buckets in the order in which backward computes
gradients and sums each full bucket in a ring while backward continues. PyTorch's own hooks compress: `hook=fp16` sends
half precision, `hook=powersgd` low-rank factors of `rank`.

TensorFlow: MultiWorkerMirroredStrategy over gRPC (CPU) or NCCL (GPU). Its all_reduce sums gradients in the replica's
context, as Keras' optimizers do, also in a ring.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020;
TensorFlow's guide "Distributed training with TensorFlow" (tensorflow.org/guide/distributed_training).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from hvdtrain.comm.backends import ddp_powersgd
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.constraints import Checked, bounded
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements, ring
from hvdtrain.strategies.reducers.base import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import ring_bytes

NUMBER_BYTES = {"none": 4, "fp16": 2}


class Native(Strategy):
    """Gradients are summed during backward by the framework. Its state is the state of the hook."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        hook: Literal["none", "fp16", "powersgd"] = dataclasses.field(default="none", metadata={"example": "powersgd"})
        """Gradient compression by DistributedDataParallel's hooks, with PyTorch only"""
        rank: int = bounded(2, least=1, example=4)
        """Rank of the factors that the hook powersgd sends"""

    capabilities = Capabilities(backend="native", in_backward=True)
    _step = 0

    def __init__(
        self, world: Communicator, shapes: Sequence[Shape], config: TrainConfig, settings: Any, reducer: Reducer | None
    ) -> None:
        super().__init__(world, shapes, config, settings, reducer)
        if settings.hook == "powersgd":
            refusal = "PyTorch's PowerSGD hook keeps each rank's residual on that rank"
            self.capabilities = dataclasses.replace(self.capabilities, reshard_refusal=refusal)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        """The hook powersgd sends two sums after backward. Raises Failure (78) for arrays that it does not support."""
        if settings.hook != "powersgd":
            nbytes = payload_bytes(shapes, settings, 0)
            codec = "fp16" if settings.hook == "fp16" else "fp32"
            return ring(nbytes, layout.ranks, codec=codec, exact=settings.hook == "none")
        if not all(map(len, shapes)):
            raise Failure(
                "--strategy native:hook=powersgd: PyTorch's hook does not support parameters without dimensions; hint: "
                "use the shape (1,), or --strategy powersgd",
                exits.BAD_CONFIG,
            )
        nbytes = payload_bytes(shapes, settings, ddp_powersgd.START_STEP)
        (phase,) = ring(nbytes, layout.ranks, ready_at=1.0).phases or (None,)
        if phase is None:
            return Cost()
        half = dataclasses.replace(phase, bytes_per_peer=phase.bytes_per_peer / 2, codec="factors")
        return Cost(phases=(half, half))

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if settings.hook != "none" and config.framework == "tensorflow":
            raise Failure(
                f"hook={settings.hook} exists only in PyTorch's DistributedDataParallel; hint: --framework torch",
                exits.BAD_CONFIG,
            )
        if settings.hook == "powersgd" and config.precision == "fp16":
            raise Failure(
                "hook=powersgd cannot be combined with --precision fp16, because it would keep the infinite gradients "
                "of loss scaling; hint: --precision bf16",
                exits.BAD_CONFIG,
            )

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        sent = ring_bytes(payload_bytes(self._shapes, self.settings, self._step), self._world.size)
        self._step += 1
        return Exchanged.of(tail, sent)

    def state(self, *, newcomer: bool = False) -> dict[str, np.ndarray]:
        if self.settings.hook != "powersgd":
            return {}
        return {"step": np.array(self._step), **self._world.in_framework.state()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._step = int(state.get("step", 0))
        self._world.in_framework.load({name: array for name, array in state.items() if name != "step"})

    def reshard_state(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return states[self._world.rank if len(states) == self._world.size else 0]


def payload_bytes(shapes: Sequence[Shape], settings: Native.Settings, step: int) -> int:
    """Bytes that one rank contributes to the sums of step `step`."""
    if settings.hook == "powersgd":
        return 4 * ddp_powersgd.elements_sent(shapes, settings.rank, step)
    return NUMBER_BYTES[settings.hook] * elements(shapes)
