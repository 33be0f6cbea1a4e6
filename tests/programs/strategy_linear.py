"""Strategies on the model of exchange.py, each from the same start; what became of it, printed by rank 0 as JSON.

    strategy_linear.py torch|tensorflow RANKS_PER_HOST STEPS SETTINGS

SETTINGS is a JSON list of objects with `TrainConfig`'s fields. Every rank has the same uneven share of one fixed batch
in each step (see exchange.py's `borders`), and synchronises after the last one. Used by test_strategies.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import exchange
import numpy as np
from exchange import LR
from strategy_hosts import joined, prepared_once

from hvdtrain import world
from hvdtrain.timing import Clock


def trained(framework: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    config = exchange.config_of(framework, json.dumps(settings))
    ranks, device = exchange.joined(config)
    strategy, replica = exchange.trainer(config, ranks, device, exchange.problem()[2])
    batch = exchange.share(ranks)
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
    prepared_once(framework)
    meeting = joined(per_host)
    reports = [trained(framework, settings, steps) for settings in json.loads(sys.argv[4])]
    if meeting.rank == 0:
        sys.stdout.write(json.dumps({"reports": reports}) + "\n")
    meeting.leave()
    return 0


if __name__ == "__main__":
    world.run(main, debug=True)
