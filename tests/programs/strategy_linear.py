"""A strategy on the model of exchange.py, and what became of it. For strategy_runs.py.

Every rank has the same uneven share of one fixed batch in each step (see exchange.py's `borders`), and synchronises
after the last one.
"""

from __future__ import annotations

import json
from typing import Any

import exchange
import numpy as np
from exchange import LR

from hvdtrain.observe.timing import Clock


def trained(framework: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """`settings`: fields of `TrainConfig`."""
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
    ranks.shutdown()
    return report
