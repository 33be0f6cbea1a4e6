"""Workers and parameter servers for real, on exchange.py's model; rank 0 prints as JSON what went in and came out.

    async_ps.py FRAMEWORK '{"strategy": "async-ps:servers=2"}' FOLDER

The last rank is slow: it makes its second step when all others have made their last, as each of them says by a file in
FOLDER. Did they wait for it, nobody would ever go on. Used by test_async_ps.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import exchange
import numpy as np

from hvdtrain.observe.timing import Clock

STEPS, LR = 6, 0.1


def main() -> None:
    framework, settings, folder = sys.argv[1:]
    config = exchange.config_of(framework, settings, lr=LR, momentum=0.0, weight_decay=0.0, schedule="constant")
    ranks, device = exchange.joined(config)
    weight, batch = exchange.problem()[2], exchange.share(ranks)
    strategy, replica = exchange.trainer(config, ranks, device, weight)
    pushed, notes, sent_bytes, in_sync = np.zeros(weight.shape), [], 0, []
    others = [Path(folder, str(rank)) for rank in range(ranks.size - 1)]
    for step in range(STEPS):
        replica.backward(batch, LR, stop=False)
        gradient = replica.vector()[: weight.size].reshape(weight.shape)
        pushed += gradient * (batch.weight / batch.total_weight)
        if step == 1 and ranks.rank == ranks.size - 1:  # servers begin with the first step of their own ranks
            while not all(file.exists() for file in others):
                time.sleep(0.01)
        done = strategy.step(replica, LR, Clock())
        in_sync.append(strategy.in_sync)
        notes.append(done.notes)
        sent_bytes += done.sent_bytes
    Path(folder, str(ranks.rank)).touch()
    last = strategy.synchronize(replica, Clock())
    report = {
        "before": weight.tolist(),
        "weights": ranks.gather(replica.state()["parameter.weight"].tolist()),
        "pushed": ranks.sum(pushed, "pushed").tolist(),
        "notes": ranks.gather(notes),
        "sent_bytes": ranks.gather(sent_bytes + last.sent_bytes + ranks.take_local_sent_bytes()),
        "in_sync": ranks.gather(in_sync),
        "totals": None if last.totals is None else last.totals.tolist(),
        "again": strategy.synchronize(replica, Clock()).totals is None,
        "state": ranks.gather({name: array.tolist() for name, array in strategy.state().items()}),
        "sum": ranks.sum(np.array([[1.0, ranks.rank]]), "test").tolist(),
        "agreed": {name: array.tolist() for name, array in ranks.agreed({"own": np.full(2, ranks.rank)}).items()},
        "gathered": ranks.gather("ä" * ranks.rank),
    }
    exchange.finish(ranks, report)


if __name__ == "__main__":
    main()
