"""Runs several trainings one after the other in the same ranks, which take seconds to start.

    strategy_runs.py torch|tensorflow RANKS_PER_HOST RUNS [WORKLOAD]

RUNS is a JSON list of objects with these keys:

    flags               flags of the training
    stop_before         step before which the last rank gets SIGUSR1 (optional)
    from_step, folder   copy the run in `folder` to --run-dir, as if it was killed after this checkpoint (optional)
    refused             exit code with which all ranks reject the training (optional)
    workload            instead of WORKLOAD (optional)
    linear, steps       instead of flags: settings for strategy_linear.py, whose report replaces the exit code

Rank 0 prints the exit codes as JSON. Used by test_strategies.py, and by other tests through conftest.py.
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
from hvdtrain.strategies import shares
from hvdtrain.system.exits import Failure

sys.path.append(str(Path(__file__).parent.parent))
from runs import cut_off


@contextlib.contextmanager
def signalled(replica: Any, step: int | None) -> Iterator[None]:
    """Send SIGUSR1 to this process before the given step, counted from 0 within the training.

    Backward passes that only measure shares have a learning rate of 0 and are not counted.
    """
    backward, numbers = replica.backward, itertools.count()

    def after_signal(self: Any, batch: Any, lr: float, stop: bool) -> None:
        if lr and next(numbers) == step:
            os.kill(os.getpid(), signal.SIGUSR1)
            stop = True
        backward(self, batch, lr, stop)

    replica.backward = after_signal
    yield
    replica.backward = backward


def exit_code(workload: Any, run: dict[str, Any], meeting: Rendezvous, replica: Any) -> int:
    flags = run["flags"]
    if "from_step" in run and meeting.rank == 0:
        cut_off(Path(run["folder"]), Path(flags[flags.index("--run-dir") + 1]), run["from_step"])
    meeting.gather_bytes(b"the folder is there")
    sys.argv = [workload.__name__, *flags]
    step = run.get("stop_before") if meeting.rank == meeting.size - 1 else None
    with signalled(replica, step), contextlib.redirect_stdout(io.StringIO()):
        try:
            return workload.main(lifecycle.StopSignal())
        except Failure as failure:
            if failure.code != run.get("refused"):
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
    shares.TRIAL_S, shares.MAX_S = 0.05, 0.5  # measured shares need not be accurate here
    default = sys.argv[4] if len(sys.argv) > 4 else "resnet"

    def result(run: dict[str, Any]) -> Any:
        if "linear" in run:
            return linear(framework, run["linear"], run["steps"])
        workload = workloads.module(run.get("workload", default))
        return exit_code(workload, run, meeting, Pipeline if "--stages" in run["flags"] else Replica)

    codes = [result(run) for run in runs]
    if meeting.rank == 0:
        sys.stdout.write(json.dumps({"codes": codes}) + "\n")
    meeting.shutdown()
    return 0


lifecycle.run(main, debug=True)
