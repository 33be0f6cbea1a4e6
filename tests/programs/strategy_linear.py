"""Strategies on the model of exchange.py, each from the same start; what became of it, printed by rank 0 as JSON.

    strategy_linear.py torch|tensorflow RANKS_PER_HOST STEPS SETTINGS

SETTINGS is a JSON list of objects with `TrainConfig`'s fields. Every rank has the same uneven share of one fixed batch
in each step (see `borders`), and synchronises after the last one. Used by test_strategies.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from exchange import LR, SAMPLES, problem, tensorflow_model, torch_model
from strategy_hosts import joined

from hvdtrain import strategies, world
from hvdtrain.config import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.measures import Accuracy
from hvdtrain.timing import Clock


def borders(ranks: int) -> list[int]:
    """Rank r takes the samples from borders[r] to borders[r + 1]: 1, 2, 3 ... and the rest."""
    return [r * (r + 1) // 2 for r in range(ranks)] + [SAMPLES]


def trained(settings: dict[str, Any], framework: str, device: str, steps: int) -> dict[str, Any]:
    config = TrainConfig(**{"lr": LR, "momentum": 0.9, "weight_decay": 0.01, **settings})
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as Replica
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
    ranks = world.World(framework, carrier=strategies.chosen(config).strategy.carrier)
    inputs, labels, weight = problem()
    strategy = strategies.make(config, ranks, [weight.shape])
    model = torch_model() if framework == "torch" else tensorflow_model()
    replica = Replica(model, device=device, config=config, world=ranks, strategy=strategy, measure=Accuracy())
    replica.load({"parameter.weight": weight})

    begin, end = borders(ranks.size)[ranks.rank : ranks.rank + 2]
    batch = Batch(arrays=(inputs[begin:end], labels[begin:end]), weight=end - begin, total_weight=SAMPLES)
    losses, told, clock = [], [], Clock()
    for _ in range(steps):
        replica.backward(batch, LR, stop=ranks.rank == 0)
        told.append(strategy.step(replica, LR, clock))
        losses.append(told[-1].loss)
    told.append(strategy.synchronize(replica, clock))
    totals = np.sum([each.totals for each in told if each.totals is not None], axis=0)
    report = {
        "weights": ranks.gather(replica.state()["parameter.weight"].tolist()),
        "losses": ranks.gather([float(loss) for loss in losses]),
        "totals": totals.tolist(),
        "stopping": all(each.stop for each in told if each.totals is not None),
        "sent_bytes": ranks.gather(sum(each.sent_bytes for each in told)),
    }
    ranks.leave()
    return report


def main(stop: world.StopSignal) -> int:
    framework, per_host, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare("cpu", 0, 1)
    meeting = joined(per_host)
    reports = [trained(settings, framework, device, steps) for settings in json.loads(sys.argv[4])]
    if meeting.rank == 0:
        sys.stdout.write(json.dumps({"reports": reports}) + "\n")
    meeting.leave()
    return 0


if __name__ == "__main__":
    world.run(main, debug=True)
