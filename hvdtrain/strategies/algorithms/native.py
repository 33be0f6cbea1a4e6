"""The framework's own data parallelism, without Horovod.

PyTorch: DistributedDataParallel over Gloo (CPU) or NCCL (GPU). It fills buckets in the order in which backward computes
gradients and sums each full bucket in a ring while backward continues. With `hook=fp16` PyTorch's own hook
sends half precision.

TensorFlow: MultiWorkerMirroredStrategy over gRPC (CPU) or NCCL (GPU). Its all_reduce sums gradients in the replica's
context, as Keras' optimizers do, also in a ring.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020;
TensorFlow's guide "Distributed training with TensorFlow" (tensorflow.org/guide/distributed_training).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from hvdtrain.config.constraints import Checked
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies.base import Capabilities, ReducerCost, Strategy
from hvdtrain.strategies.cost import Cost, Layout, Shape, elements, ring
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import ring_bytes

NUMBER_BYTES = {"none": 4, "fp16": 2}


class Native(Strategy):
    """Gradients are summed during backward by the framework."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(Checked):
        hook: Literal["none", "fp16"] = dataclasses.field(default="none", metadata={"example": "fp16"})
        """Gradient compression by DistributedDataParallel's hooks, with PyTorch only"""

    capabilities = Capabilities(backend="native", in_backward=True)

    @classmethod
    def cost(cls, shapes: Sequence[Shape], layout: Layout, settings: Any, reducer_cost: ReducerCost) -> Cost:
        codec = "fp16" if settings.hook == "fp16" else "fp32"
        return ring(payload_bytes(shapes, settings), layout.ranks, codec=codec, exact=settings.hook == "none")

    @classmethod
    def check(cls, settings: Any, config: TrainConfig) -> None:
        if settings.hook != "none" and config.framework == "tensorflow":
            raise Failure(
                f"hook={settings.hook} exists only in PyTorch's DistributedDataParallel; hint: --framework torch",
                exits.BAD_CONFIG,
            )

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        return Exchanged.of(tail, ring_bytes(payload_bytes(self._shapes, self.settings), self._world.size))


def payload_bytes(shapes: Sequence[Shape], settings: Native.Settings) -> int:
    """Bytes that one rank contributes to the sums of a step."""
    return NUMBER_BYTES[settings.hook] * elements(shapes)
