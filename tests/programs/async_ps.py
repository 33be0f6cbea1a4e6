"""Workers and parameter servers for real, on exchange.py's model; rank 0 prints as JSON what went in and came out.

    async_ps.py FRAMEWORK '{"servers": 2}'

The last rank is slow: it sleeps in each step. Used by test_async_ps.py.
"""

from __future__ import annotations

import json
import sys
import time

import exchange
import numpy as np

from hvdtrain import strategies
from hvdtrain.config import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.measures import Accuracy
from hvdtrain.timing import Clock
from hvdtrain.world import World

STEPS, LR, SLOW_S = 6, 0.1, 0.2


def main() -> None:
    framework, settings = sys.argv[1], json.loads(sys.argv[2])
    config = TrainConfig(lr=LR, momentum=0.0, schedule="constant", **settings)
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as Replica
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare("cpu", 0, 1)
    world = World(framework, carrier="servers")
    inputs, labels, weight = exchange.problem()
    strategy = strategies.make(config, world, [weight.shape])
    model = exchange.torch_model() if framework == "torch" else exchange.tensorflow_model()
    replica = Replica(model, device=device, config=config, world=world, strategy=strategy, measure=Accuracy())
    replica.load({"parameter.weight": weight})

    borders = [r * (r + 1) // 2 for r in range(world.size)] + [exchange.SAMPLES]
    mine = slice(borders[world.rank], borders[world.rank + 1])
    batch = Batch(arrays=(inputs[mine], labels[mine]), weight=mine.stop - mine.start, total_weight=exchange.SAMPLES)
    pushed, notes, sent_bytes, in_sync = np.zeros(weight.shape), [], 0, []
    began = time.perf_counter()
    for step in range(STEPS):
        replica.backward(batch, LR, stop=False)
        gradient = replica.vector()[: weight.size].reshape(weight.shape)
        pushed += gradient * (batch.weight / batch.total_weight)
        if world.rank == world.size - 1:
            time.sleep(SLOW_S)
        done = strategy.step(replica, LR, Clock())
        if step == 0:  # servers begin with the first step of their own ranks
            began = time.perf_counter()
        in_sync.append(strategy.in_sync)
        notes.append(done.notes)
        sent_bytes += done.sent_bytes
    seconds = time.perf_counter() - began
    last = strategy.synchronize(replica, Clock())
    report = {
        "before": weight.tolist(),
        "weights": world.gather(replica.state()["parameter.weight"].tolist()),
        "pushed": world.sum(pushed, "pushed").tolist(),
        "notes": world.gather(notes),
        "seconds": world.gather(seconds),
        "sent_bytes": world.gather(sent_bytes + last.sent_bytes),
        "in_sync": world.gather(in_sync),
        "totals": None if last.totals is None else last.totals.tolist(),
        "again": strategy.synchronize(replica, Clock()).totals is None,
        "state": world.gather({name: array.tolist() for name, array in strategy.state().items()}),
        "sum": world.sum(np.array([[1.0, world.rank]]), "test").tolist(),
        "agreed": {name: array.tolist() for name, array in world.agreed({"own": np.full(2, world.rank)}).items()},
        "gathered": world.gather("ä" * world.rank),
    }
    if world.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
