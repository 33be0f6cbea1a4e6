"""What the ranks do together, done for real on a model without BatchNorm, and printed by rank 0 as JSON.

Three steps of SGD with momentum on uneven shares of one fixed batch; a collective of each kind. Used by
test_ranks.py and test_native.py, which compare ranks with each other and with NumPy.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from hvdtrain import strategies
from hvdtrain.config import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.measures import Accuracy
from hvdtrain.timing import Clock
from hvdtrain.world import World

FEATURES, CLASSES, SAMPLES, STEPS, LR = 6, 3, 11, 3, 0.1


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return inputs, draw.integers(0, CLASSES, SAMPLES), draw.normal(size=(CLASSES, FEATURES)).astype(np.float32)


def torch_model():
    import torch

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(CLASSES, FEATURES))

        def loss(self, inputs, labels):
            logits = inputs @ self.weight.T
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            return losses, {"correct": (logits.argmax(1) == labels).sum()}

    return Linear()


def tensorflow_model():
    import tensorflow as tf

    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = {"weight": tf.Variable(tf.zeros((CLASSES, FEATURES)))}

        def loss(self, inputs, labels, training):
            logits = tf.matmul(inputs, self.weights["weight"], transpose_b=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            return tf.reduce_sum(losses), {"correct": tf.math.count_nonzero(tf.argmax(logits, 1) == labels)}

    return Linear()


def refused(world: World) -> str:
    """Why these ranks cannot sum a vector by a reducer; empty: they can."""
    try:
        with world.hosts(np.ones(1, np.float32)):
            return ""
    except NotImplementedError as error:
        return str(error)


def main() -> None:
    framework, settings = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    config = TrainConfig(lr=LR, momentum=0.9, weight_decay=0.01, **settings)
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as Replica
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
        from hvdtrain.frameworks.tensorflow import prepare
    device = prepare("cpu", 0, 1)
    world = World(framework, carrier=strategies.chosen(config).strategy.carrier)
    inputs, labels, weight = problem()
    strategy = strategies.make(config, world, [weight.shape])
    if framework == "torch":
        model = torch_model()
    else:
        with world.tensorflow.scope():
            model = tensorflow_model()
    replica = Replica(model, device=device, config=config, world=world, strategy=strategy, measure=Accuracy())
    replica.load({"parameter.weight": weight})

    # Rank r takes the samples behind its triangular number: shares as uneven as 1, 2, 3 ... and the rest.
    borders = [r * (r + 1) // 2 for r in range(world.size)] + [SAMPLES]
    mine = slice(borders[world.rank], borders[world.rank + 1])
    batch = Batch(arrays=(inputs[mine], labels[mine]), weight=mine.stop - mine.start, total_weight=SAMPLES)
    losses = []
    for _ in range(STEPS):
        replica.backward(batch, LR, stop=world.rank == world.size - 1)
        done = strategy.step(replica, LR, Clock())
        losses.append(done.loss)
    agreed = world.agreed({"own": np.full(3, float(world.rank)), "same": np.arange(2)})
    report = {
        "size": world.size,
        "weight": replica.state()["parameter.weight"].tolist(),
        "weights_of_ranks": world.gather(replica.state()["parameter.weight"].tolist()),
        "losses": losses,
        "correct": done.totals[1],
        "samples": done.totals[2],
        "stopping": done.stop,
        "bytes_sent": done.sent_bytes,
        "sum": world.sum(np.array([1.0, world.rank]), "test").tolist(),
        "gathered": world.gather({"rank": world.rank, "text": "ä" * world.rank}),
        "agreed": {name: array.tolist() for name, array in agreed.items()},
        "horovod": "horovod" in sys.modules,
        "refused": refused(world),
    }
    if world.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    world.leave()


if __name__ == "__main__":
    main()
