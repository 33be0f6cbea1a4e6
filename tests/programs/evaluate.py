"""Evaluates a fixed ResNet whose BatchNorm statistics differ between ranks but have one mean. For test_ranks.py."""

from __future__ import annotations

import json
import sys

from hvdtrain import strategies
from hvdtrain.config import TrainConfig
from hvdtrain.data import load
from hvdtrain.evaluation import evaluate
from hvdtrain.measures import Accuracy
from hvdtrain.models import resnet
from hvdtrain.world import World

framework = sys.argv[1]
spec = resnet.ResNetSpec(channels=1, classes=10, width=0.125)
config = TrainConfig()
if framework == "torch":
    from hvdtrain.frameworks.pytorch import TorchReplica as Replica
    from hvdtrain.frameworks.pytorch import prepare
else:
    from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
    from hvdtrain.frameworks.tensorflow import prepare
device = prepare("cpu", 0, 1)
world = World(framework)
if framework == "torch":
    from hvdtrain.models.resnet_torch import ResNetTorch as Model
else:
    from hvdtrain.models.resnet_tf import ResNetTF as Model
strategy = strategies.make(config, world, [(1,)])
replica = Replica(Model(spec), device=device, config=config, world=world, strategy=strategy, measure=Accuracy())
state = resnet.initial_state(spec, 3)
replica.load({f"parameter.{name}": state[name] for name in resnet.parameters(spec)})
# Offsets whose mean over ranks is 0: -1 and 1, or -1, 0 and 1, times a quarter.
offset = 0.25 * (2 * world.rank / (world.size - 1) - 1) if world.size > 1 else 0.0
replica.load_local({name: state[name] + offset * (state[name] != 0) for name in resnet.buffers(spec)})
loss, scores = evaluate(replica, Accuracy(), load("digits", (16, 16)).test, 32, world)
if world.rank == 0:
    sys.stdout.write(json.dumps({"loss": loss, **scores}) + "\n")
world.leave()
