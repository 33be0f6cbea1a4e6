"""Ranks with unequal shares of each batch train the model of exchange.py, for test_hybrid.py; rank 0 prints JSON.

The settings are `TrainConfig`'s; without shares they are measured, and nothing may be left of that.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
from exchange import FEATURES, tensorflow_model, torch_model

from hvdtrain import config as configuration
from hvdtrain import strategies
from hvdtrain.config import TrainConfig
from hvdtrain.data import Batch, ImageSplit
from hvdtrain.data.loader import Loader
from hvdtrain.measures import Accuracy
from hvdtrain.strategies import hybrid
from hvdtrain.timing import Clock
from hvdtrain.world import World

SAMPLES, CLASSES, GLOBAL_BATCH, EPOCHS, LR, SEED = 54, 3, 12, 2, 0.1, 7


def problem() -> tuple[ImageSplit, np.ndarray]:
    """The samples, and the weights to start from."""
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(SAMPLES, 1, 1, FEATURES)).astype(np.float32)
    split = ImageSplit(samples=inputs, labels=draw.integers(0, CLASSES, SAMPLES))
    return split, draw.normal(size=(CLASSES, FEATURES)).astype(np.float32)


def flat(batch: Batch) -> Batch:
    inputs, labels = batch.arrays
    return dataclasses.replace(batch, arrays=(inputs.reshape(-1, FEATURES), labels))


def main() -> None:
    framework, settings = sys.argv[1], json.loads(sys.argv[2])
    config = TrainConfig(global_batch_size=GLOBAL_BATCH, lr=LR, weight_decay=0.01, **settings)
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as Replica
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare("cpu", 0, 1, one_each=True)
    world = World(framework, carrier=strategies.chosen(config).strategy.carrier)
    split, weight = problem()
    strategy = strategies.make(config, world, [weight.shape])
    if framework == "torch":
        model = torch_model()
    else:
        with world.tensorflow.scope():
            model = tensorflow_model()
    replica = Replica(model, device=device, config=config, world=world, strategy=strategy, measure=Accuracy())
    replica.load({"parameter.weight": weight})
    given = strategies.chosen(config).shares(world.size)
    loader = Loader(
        split,
        global_batch=configuration.global_batch(config, world.size),
        rank=world.rank,
        size=world.size,
        seed=SEED,
        shares=given,
    )
    unmeasured = replica.state()
    if given is None:
        hybrid.TRY_S, hybrid.LONGEST_S = 0.05, 0.5  # that they are exact is no matter here
        shares, _ = strategy.measured_shares(replica, lambda shares: flat(loader.first_of(shares)))
        loader = loader.divided(shares)
        assert sum(shares) > 0.999 and len(shares) == world.size
    state = replica.state()
    losses, samples = [], []
    for epoch in range(EPOCHS):
        for batch in loader.epoch(epoch):
            replica.backward(flat(batch), LR, stop=False)
            losses.append(strategy.step(replica, LR, Clock()).loss)
            samples.append(batch.weight)
    traces = 1 if framework == "torch" else replica._backward_graph.experimental_get_tracing_count()
    report = {
        "untouched": unmeasured.keys() == state.keys()
        and all(np.array_equal(state[name], array) for name, array in unmeasured.items()),
        "weights": world.gather(replica.state()["parameter.weight"].tolist()),
        "losses": losses,
        "samples": world.gather(samples),
        "traces": traces,
    }
    if world.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
