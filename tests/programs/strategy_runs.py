"""Several trainings one after the other in the same ranks, which takes seconds to start only once.

    strategy_runs.py torch|tensorflow RANKS_PER_HOST RUNS [WORKLOAD]

RUNS is a JSON list of objects: `flags`; `stop_before` (optional): the step before which the last rank is sent SIGUSR1;
`from_step` and `folder` (optional): the run in --run-dir is first made from that in `folder` as if it had been killed
after its checkpoint of this step; `refused` (optional): the code with which all ranks refuse it, and tell why; or
`linear` and `steps`: settings for strategy_linear.py, whose report stands in the code's place. Rank 0 prints their exit
codes as JSON. Used by test_strategies.py, and by others through conftest.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strategy_hosts import joined, prepared_once
from strategy_linear import trained as linear

from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Rendezvous
from hvdtrain.config import workloads
from hvdtrain.strategies.algorithms import hybrid
from hvdtrain.system.exits import Failure

sys.path.append(str(Path(__file__).parent.parent))
from runs import cut_off


@contextlib.contextmanager
def signalled(replica: Any, step: int | None) -> Iterator[None]:
    """This process gets SIGUSR1 before its step of this number, counted from 0 within the training. Passes that only
    measure shares have a learning rate of 0."""
    backward, numbers = replica.backward, itertools.count()

    def after_signal(self: Any, batch: Any, lr: float, stop: bool) -> None:
        if lr and next(numbers) == step:
            os.kill(os.getpid(), signal.SIGUSR1)
            stop = True
        backward(self, batch, lr, stop)

    replica.backward = after_signal
    yield
    replica.backward = backward


def trained(workload: Any, about: dict[str, Any], meeting: Rendezvous, replica: Any) -> int:
    flags = about["flags"]
    if "from_step" in about and meeting.rank == 0:
        cut_off(Path(about["folder"]), Path(flags[flags.index("--run-dir") + 1]), about["from_step"])
    meeting.gather_bytes(b"the folder is there")
    sys.argv = [workload.__name__, *flags]
    step = about.get("stop_before") if meeting.rank == meeting.size - 1 else None
    with signalled(replica, step), contextlib.redirect_stdout(io.StringIO()):
        try:
            return workload.main(lifecycle.StopSignal())
        except Failure as failure:
            if failure.code != about.get("refused"):
                raise
            sys.stderr.write(f"{failure}\n")
            return failure.code


def main(stop: lifecycle.StopSignal) -> int:
    framework, per_host, runs = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    prepared_once(framework)
    meeting = joined(per_host)
    if framework == "torch":
        from hvdtrain.frameworks.pipeline_torch import PipelineTorch as Pipeline
        from hvdtrain.frameworks.pytorch import TorchReplica as Replica
    else:
        from hvdtrain.frameworks.pipeline_tensorflow import PipelineTensorFlow as Pipeline
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as Replica
    hybrid.TRY_S, hybrid.LONGEST_S = 0.05, 0.5  # that measured shares are exact is no matter here
    workload = workloads.module(*sys.argv[4:] or ["resnet"])

    def run(about: dict[str, Any]) -> Any:
        if "linear" in about:
            return linear(framework, about["linear"], about["steps"])
        return trained(workload, about, meeting, Pipeline if "--stages" in about["flags"] else Replica)

    codes = [run(about) for about in runs]
    if meeting.rank == 0:
        sys.stdout.write(json.dumps({"codes": codes}) + "\n")
    meeting.shutdown()
    return 0


lifecycle.run(main, debug=True)
