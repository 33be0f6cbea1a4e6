"""The framework's own data parallelism, with no Horovod: what one would use without this package.

PyTorch: DistributedDataParallel over Gloo (CPU) or NCCL (GPU). Gradients are put into buckets in the order in which
backward makes them; a full bucket is summed over ranks in a ring while backward goes on. --ddp-hook fp16 sends them as
half precision, --ddp-hook powersgd as factors of --rank (see `collectives.powersgd`), both by PyTorch's own hooks.

TensorFlow: MultiWorkerMirroredStrategy over gRPC (CPU) or NCCL (GPU). Gradients are summed by the strategy's all_reduce
in the replica's context, as Keras' optimizers do, in a ring too.

Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", 2020;
TensorFlow's guide "Distributed training with TensorFlow" (tensorflow.org/guide/distributed_training).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.collectives import powersgd
from hvdtrain.config import TrainConfig
from hvdtrain.strategies.payload import Layout, Shape, elements, ring_bytes
from hvdtrain.strategies.reducer import Reducer
from hvdtrain.strategies.replicas import Exchanged, Vectors
from hvdtrain.timing import Clock
from hvdtrain.world import Carrier, World

HALF = 2
"""Bytes"""


class Native:
    """Gradients summed by the framework itself during backward; its state is that of the hook."""

    carrier: Carrier = "native"
    uses: tuple[str, ...] = ("ddp_hook", "rank")
    in_backward = True
    local = False
    level = True
    common = None

    def __init__(self, world: World, shapes: Sequence[Shape], config: TrainConfig, reducer: Reducer | None) -> None:
        self._world, self._shapes, self._config = world, shapes, config
        self._step = 0

    @property
    def bound(self) -> str | None:
        held = self._config.ddp_hook == "powersgd"
        return "PyTorch's PowerSGD keeps in each rank what that one left out" if held else None

    @staticmethod
    def bytes_per_step(
        shapes: Sequence[Shape], layout: Layout, config: TrainConfig, reducer: type[Reducer] | None
    ) -> float:
        return ring_bytes(payload_bytes(shapes, config, powersgd.START_STEP), layout.ranks)

    def step(self, replica: Vectors, lr: float, clock: Clock) -> Exchanged:
        with clock.span("compute"):
            replica.apply(lr)
            tail = replica.tail()
        sent = ring_bytes(payload_bytes(self._shapes, self._config, self._step), self._world.size)
        self._step += 1
        return Exchanged.of(tail, sent)

    def settle(self, replica: Vectors, clock: Clock) -> Exchanged:
        return Exchanged()

    def state(self) -> dict[str, np.ndarray]:
        return {"step": np.array(self._step), **self._world.exchange_state()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._step = int(state["step"])
        self._world.load_exchange_state({name: array for name, array in state.items() if name != "step"})

    def handed_on(self, states: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return states[self._world.rank if len(states) == self._world.size else 0]


def payload_bytes(shapes: Sequence[Shape], config: TrainConfig, step: int) -> int:
    """What one rank gives to the sums of step `step`."""
    if config.ddp_hook == "powersgd":
        return 4 * powersgd.elements_sent(shapes, config.rank, step)
    return (HALF if config.ddp_hook == "fp16" else 4) * elements(shapes)
