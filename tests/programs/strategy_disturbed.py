"""`hvdtrain.resnet`, but a number of one weight changes on one rank, as faulty memory would do. For test_agreement.py.

    strategy_disturbed.py torch|tensorflow RANK STEP FLAGS...

It happens just before step STEP, counted from 0.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from hvdtrain import resnet
from hvdtrain.comm import lifecycle
from hvdtrain.comm.launch_env import launch_env

TENSOR = "layer2.0.conv1.weight"


def main(stop: lifecycle.StopSignal) -> int:
    framework, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as Replica
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
    backward, numbers = Replica.backward, itertools.count()

    def disturbed(self: Any, *arguments: Any, **named: Any) -> None:
        if next(numbers) == step and launch_env().rank == rank:
            state = {name: array.copy() for name, array in self.state().items()}
            state[f"parameter.{TENSOR}"].flat[7] += 0.001
            self.load(state)
        backward(self, *arguments, **named)

    Replica.backward = disturbed
    sys.argv = ["resnet", "--framework", framework, *sys.argv[4:]]
    return resnet.main(stop)


lifecycle.run(main, debug=False)
