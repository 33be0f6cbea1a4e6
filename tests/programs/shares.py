"""Ranks with unequal shares of each batch train the model of exchange.py, for test_shares.py. Rank 0 prints JSON.

    shares.py torch|tensorflow STRATEGY SHARES...

Trains once with each value of --shares.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import exchange
import numpy as np
from exchange import FEATURES

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config import batch_plan
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch, ImageSplit
from hvdtrain.data.loader import Loader
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import shares as unequal_shares

SAMPLES, CLASSES, GLOBAL_BATCH, EPOCHS, LR, SEED = 54, 3, 12, 2, 0.1, 7


def problem() -> tuple[ImageSplit, np.ndarray]:
    """Return the samples and the initial weights."""
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(SAMPLES, 1, 1, FEATURES)).astype(np.float32)
    split = ImageSplit(samples=inputs, labels=draw.integers(0, CLASSES, SAMPLES))
    return split, draw.normal(size=(CLASSES, FEATURES)).astype(np.float32)


def flat(batch: Batch) -> Batch:
    inputs, labels = batch.arrays
    return dataclasses.replace(batch, arrays=(inputs.reshape(-1, FEATURES), labels))


def trained(config: TrainConfig, ranks: Communicator, device: str) -> dict[str, Any]:
    split, weight = problem()
    strategy, replica = exchange.trainer(config, ranks, device, weight)
    given = unequal_shares.given(config, ranks.size)
    loader = Loader(
        split,
        global_batch=batch_plan.global_batch(config, ranks.size),
        rank=ranks.rank,
        size=ranks.size,
        seed=SEED,
        shares=given,
    )
    unmeasured = replica.state()
    if given is None:
        unequal_shares.TRIAL_S, unequal_shares.MAX_S = 0.05, 0.5  # the measured shares need not be accurate here
        found = unequal_shares.measure(ranks, replica, lambda shares: flat(loader.first_of(shares)))
        shares = found.shares
        loader = loader.divided(shares)
        assert sum(shares) > 0.999 and len(shares) == ranks.size
    state = replica.state()
    losses, samples = [], []
    for epoch in range(EPOCHS):
        for batch in loader.epoch(epoch):
            replica.backward(flat(batch), LR, stop=False)
            losses.append(strategy.step(replica, LR, Clock()).loss)
            samples.append(batch.weight)
    traces = 1 if config.framework == "torch" else replica._backward_graph.experimental_get_tracing_count()
    return {
        "untouched": unmeasured.keys() == state.keys()
        and all(np.array_equal(state[name], array) for name, array in unmeasured.items()),
        "weights": ranks.gather(replica.state()["parameter.weight"].tolist()),
        "losses": losses,
        "samples": ranks.gather(samples),
        "traces": traces,
    }


def main() -> None:
    framework, strategy, *shares = sys.argv[1:]
    settings = {"strategy": strategy, "global_batch_size": GLOBAL_BATCH}
    configs = [exchange.config_of(framework, "{}", shares=each, **settings) for each in shares]
    ranks, device = exchange.joined(configs[0])
    exchange.finish(ranks, {"trained": [trained(config, ranks, device) for config in configs]})


if __name__ == "__main__":
    main()
