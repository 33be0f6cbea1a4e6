"""A rank of a training that becomes slow, or that dies once.

    launch/mpirun.sh --elastic -H 127.0.0.1:1,127.0.0.2:1,... python elastic_slow.py MARKER ROLES --width 0.125 ...

ROLES is a JSON object: "slow" and "dies" name a rank and the step from which its backward passes take SAMPLE_S longer
for each sample, or before which it dies. It dies unless the file MARKER exists. The flags are those of hvdtrain.resnet.
Used by test_elastic.py.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hvdtrain import resnet
from hvdtrain.comm import lifecycle
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.frameworks.pytorch import TorchReplica
from hvdtrain.strategies import shares
from hvdtrain.training import profiled

SAMPLE_S = 0.004


def change(marker: Path, slow_from: int | None, dies_at: int | None) -> None:
    backward, steps = TorchReplica.backward, itertools.count()

    def changed(self: TorchReplica, batch: Any, lr: float, stop: float) -> None:
        step = next(steps) if lr else -1  # a pass that only measures has a learning rate of 0
        if dies_at is not None and step >= dies_at and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if slow_from is not None and step >= slow_from:
            time.sleep(SAMPLE_S * batch.weight)
        backward(self, batch, lr, stop)

    TorchReplica.backward = changed  # type: ignore[method-assign]


roles = json.loads(sys.argv.pop(2))
own = launch_env().rank
at = {name: step for name, (rank, step) in roles.items() if rank == own}
change(Path(sys.argv.pop(1)), at.get("slow"), at.get("dies"))
shares.TRIAL_S, shares.MAX_S = 0.1, 0.6  # what is measured before step 0 need not be accurate here
profiled.AUTO_STEPS_S = profiled.AUTO_CODING_S = 0.5
lifecycle.run(resnet.main, debug=True)
