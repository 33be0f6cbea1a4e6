"""Collectives and three training steps of real ranks; rank 0 prints the results as JSON.

    exchange.py torch|tensorflow SETTINGS [evaluate]

The ranks make three steps of SGD with momentum on uneven shares of one fixed batch, with a model without BatchNorm, and
call each collective. SETTINGS are fields of `TrainConfig`. With `evaluate` they also evaluate a ResNet whose BatchNorm
statistics differ between ranks but always have the same mean. Other programs import the model from here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from hvdtrain import data, strategies
from hvdtrain.comm import world
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.config.options import TrainConfig
from hvdtrain.frameworks import Replica
from hvdtrain.models import resnet
from hvdtrain.observe.timing import Clock
from hvdtrain.records.metrics import Accuracy
from hvdtrain.strategies import Strategy
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.framework import make_replica, prepare
from hvdtrain.training.threads import Threads

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
            self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
            self.weight = torch.nn.Parameter(torch.zeros(CLASSES, FEATURES))

        def loss(self, inputs, labels):
            logits = self.frozen * torch.nn.functional.linear(inputs, self.weight)
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


def config_of(framework: str, settings: str, **defaults: Any) -> TrainConfig:
    """Return a config with `settings`, fields as JSON, which take precedence over `defaults`."""
    fields = {"lr": LR, "momentum": 0.9, "weight_decay": 0.01} | defaults | json.loads(settings)
    return TrainConfig(framework=framework, device="cpu", **fields)


def joined(config: TrainConfig) -> tuple[Communicator, str]:
    """Connect the ranks; return them and the device of this rank."""
    device = prepare(
        config.framework, Threads(1, "a small model"), device=config.device, local_rank=launch_env().local_rank
    )
    backend = strategies.resolve(config).capabilities.backend
    return world.connect(config.framework, device != "cpu", backend=backend), device


def trainer(config: TrainConfig, ranks: Communicator, device: str, weight: np.ndarray) -> tuple[Strategy, Replica]:
    """Return the strategy and the replica that train the linear model from `weight`."""
    strategy = strategies.resolve(config).make(config, ranks, [weight.shape])
    if config.framework == "torch":
        model = torch_model()
    else:
        with ranks.in_framework.scope():
            model = tensorflow_model()
    replica = make_replica(model, config, ranks, strategy, device, Accuracy())
    replica.load({**replica.state(), "parameter.weight": weight})
    return strategy, replica


def borders(ranks: int) -> list[int]:
    """Return borders: rank r has the samples borders[r] to borders[r + 1] - 1, which are 1, 2, 3 ... and the rest."""
    return [r * (r + 1) // 2 for r in range(ranks)] + [SAMPLES]


def share(ranks: Communicator) -> data.Batch:
    """Return this rank's share of the batch."""
    inputs, labels, _ = problem()
    own = slice(*borders(ranks.size)[ranks.rank : ranks.rank + 2])
    return data.Batch(arrays=(inputs[own], labels[own]), weight=own.stop - own.start, total_weight=SAMPLES)


def finish(ranks: Communicator, report: dict[str, Any]) -> None:
    """Print the report on rank 0 and disconnect. Collective."""
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    ranks.shutdown()


def rejection(ranks: Communicator) -> str:
    """Return why these ranks cannot sum a vector by a reducer; empty if they can."""
    try:
        ranks.reduce(np.ones(1, np.float32))
        return ""
    except NotImplementedError as error:
        return str(error)


def evaluated(config: TrainConfig, ranks: Communicator, device: str) -> dict[str, float]:
    """Evaluate a ResNet; return loss and scores."""
    spec = resnet.ResNetSpec(channels=1, classes=10, width=0.125)
    if config.framework == "torch":
        from hvdtrain.models.resnet_torch import ResNetTorch as Model
    else:
        from hvdtrain.models.resnet_tf import ResNetTF as Model
    strategy = strategies.resolve(config).make(config, ranks, [(1,)])
    replica = make_replica(Model(spec), config, ranks, strategy, device, Accuracy())
    state = resnet.initial_state(spec, 3)
    replica.load({f"parameter.{name}": state[name] for name in resnet.parameters(spec)})
    # Offsets from -1/4 to 1/4, whose mean over ranks is 0.
    offset = 0.25 * (2 * ranks.rank / (ranks.size - 1) - 1) if ranks.size > 1 else 0.0
    replica.load_local({name: state[name] + offset * (state[name] != 0) for name in resnet.buffers(spec)})
    loss, scores, _ = evaluate(replica, Accuracy(), data.load("digits", (16, 16)).test, 32, ranks, ranks)
    return {"loss": loss, **scores}


def main() -> None:
    framework, settings, *more = sys.argv[1:]
    config = config_of(framework, settings)
    ranks, device = joined(config)
    strategy, replica = trainer(config, ranks, device, problem()[2])
    losses = []
    for _ in range(STEPS):
        replica.backward(share(ranks), LR, stop=ranks.rank == ranks.size - 1)
        done = strategy.step(replica, LR, Clock())
        losses.append(done.loss)
    agreed = ranks.agreed({"own": np.full(3, float(ranks.rank)), "same": np.arange(2)})
    report = {
        "size": ranks.size,
        "weight": replica.state()["parameter.weight"].tolist(),
        "weights_of_ranks": ranks.gather(replica.state()["parameter.weight"].tolist()),
        "losses": losses,
        "correct": done.totals[1],
        "samples": done.totals[2],
        "stopping": done.stop,
        "bytes_sent": done.sent_bytes,
        "sum": ranks.sum(np.array([1.0, ranks.rank]), "test").tolist(),
        "gathered": ranks.gather({"rank": ranks.rank, "text": "ä" * ranks.rank}),
        "agreed": {name: array.tolist() for name, array in agreed.items()},
        "loaded": [name for name in ("horovod", "torch._dynamo") if name in sys.modules],
        "refused": rejection(ranks),
        "evaluated": evaluated(config, ranks, device) if more else None,
    }
    finish(ranks, report)


if __name__ == "__main__":
    main()
