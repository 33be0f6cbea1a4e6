#!/usr/bin/env python3
"""Replay training with real exchanges and sleeps instead of computation, which removes the CPU's noise.

    launch/mpirun.sh -H a:1,b:1 python tools/replay.py --strategy powersgd:rank=4 --compute-s 0.2 --steps 20

The strategy exchanges random gradients with the shapes of ResNet-34 at --width, through the same replica as in
training. Each step sleeps a third of --compute-s before backward. The rest is divided equally between the convolutions
in backward, because they take about the same time. So exchanges overlap with backward as in training.
DDP's PowerSGD hook, which starts with exact steps, starts after them. Rank 0 prints one JSON document.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain import strategies
from hvdtrain.comm import lifecycle, world
from hvdtrain.comm.backends import ddp_powersgd
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config import parser
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.models import resnet
from hvdtrain.observe.timing import Clock
from hvdtrain.records.metrics import Accuracy
from hvdtrain.system import exits
from hvdtrain.training import threads

SCHEMA = "hvdtrain/replay/1"
FORWARD_SHARE = 1 / 3
"""Share of forward in a step's computation; backward computes two products for each product of forward"""
TINY_LR = 1e-9
"""Learning rate at which random gradients hardly change the weights"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(TrainConfig):
    """Options of a replay."""

    width: float = 1.0
    """Channels relative to ResNet-34"""
    compute_s: float = 0.2
    """Seconds that forward and backward of a step sleep"""
    steps: int = 10
    """Timed steps"""
    untimed: int = 2
    """Steps before the timed ones"""


def stand_in(shapes: list[tuple[int, ...]], compute_s: float) -> Any:
    """Return a model for `TorchReplica` with random gradients, equal in each step."""
    import torch

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, passed: Any, weight: Any, gradient: Any, seconds: float) -> Any:
            ctx.gradient, ctx.seconds = gradient, seconds
            return passed.clone()

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            if ctx.seconds:
                time.sleep(ctx.seconds)
            return upstream, ctx.gradient.clone(), None, None

    class StandIn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = torch.Generator().manual_seed(1)
            self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)
            self._gradients = [1e-3 * torch.randn(shape, generator=draw) for shape in shapes]
            parts = sum(len(shape) > 1 for shape in shapes)
            self._seconds = [(1 - FORWARD_SHARE) * compute_s / parts * (len(shape) > 1) for shape in shapes]

        def loss(self, passed: Any) -> Any:
            time.sleep(FORWARD_SHARE * compute_s)
            passed = passed.sum()
            for weight, gradient, seconds in zip(self.weights, self._gradients, self._seconds, strict=True):
                passed = Layer.apply(passed, weight, gradient, seconds)
            return passed, {"correct": torch.zeros(())}

    return StandIn()


def main(stop: lifecycle.StopSignal) -> int:
    config = parser.parse(ReplayConfig, prog="python tools/replay.py", purpose=__doc__ or "")
    env = launch_env()
    used = threads.per_rank(config.threads, env, math.inf)
    used.use()
    spec = resnet.ResNetSpec(channels=1, classes=10, width=config.width)
    shapes = list(resnet.parameters(spec).values())

    from hvdtrain.frameworks.pytorch import TorchReplica, prepare

    device = prepare("cpu", env.local_rank, used.count)
    exchange = strategies.chosen(config)
    ranks = world.connect("torch", backend=exchange.capabilities.backend)
    strategy = exchange.make(config, ranks, shapes)
    model = stand_in(shapes, config.compute_s)
    replica = TorchReplica(model, device=device, config=config, world=ranks, strategy=strategy, metric=Accuracy())
    if getattr(strategy.settings, "hook", "") == "powersgd":
        strategy.load({"step": np.array(ddp_powersgd.START_STEP), "powersgd.step": np.array(ddp_powersgd.START_STEP)})
    batch = Batch(arrays=(np.zeros(1, np.float32),), weight=1, total_weight=ranks.size)
    hosts = len(set(ranks.gather(ranks.host)))

    clock, steps_s, waited_s, sent_bytes = Clock(), [], [], 0
    before: tuple[int, int] | None = None
    for number in range(config.untimed + config.steps):
        if number == config.untimed:
            before = ranks.nic_counters()
        clock.take("communication")
        began = time.perf_counter()
        replica.backward(batch, TINY_LR, stop=False)
        done = strategy.step(replica, TINY_LR, clock)
        if number >= config.untimed:
            steps_s.append(time.perf_counter() - began)
            waited_s.append(clock.take("communication") + (replica.waited_s() or 0.0))
            sent_bytes += done.sent_bytes
    strategy.synchronize(replica, clock)  # gather must not meet exchanges under way
    layout = strategies.Layout(ranks=ranks.size, hosts=hosts)
    document = {
        "schema": SCHEMA,
        "steps_s": steps_s,
        "communication_s": waited_s,
        "bytes_sent_per_step": sent_bytes / config.steps,
        "bytes_per_step": exchange.cost(shapes, layout).sent_bytes,
        "nic_bytes": [each for each in ranks.gather(ranks.nic_bytes(before)) if each],
        "parameters": sum(map(math.prod, shapes)),
        "hosts": hosts,
        "ranks": ranks.size,
    }
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
    ranks.shutdown()
    return exits.OK


if __name__ == "__main__":
    lifecycle.run(main, debug="--debug" in sys.argv)
