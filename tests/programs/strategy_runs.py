"""Runs several trainings one after the other in the same ranks, which take seconds to start.

    strategy_runs.py torch|tensorflow RANKS_PER_HOST RUNS [WORKLOAD]

RUNS is a JSON list of objects with these keys:

    flags               flags of the training
    stop_before         step before which the last rank gets SIGUSR1 (optional)
    from_step, folder   copy the run in `folder` to --run-dir, as if it was killed after this checkpoint (optional)
    choices, choose_at  two strategies that --strategy auto chooses by turns; the last rank requests a choice in these
                        steps (optional). Each rank writes digests of its state around choices to --run-dir
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

import pytest
from strategy_hosts import joined, prepared_once
from strategy_linear import trained as linear

from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Rendezvous, digest
from hvdtrain.config import workloads
from hvdtrain.plan import choice
from hvdtrain.strategies import CHOOSE, shares
from hvdtrain.system.exits import Failure
from hvdtrain.training import adaptive, profiled
from hvdtrain.training.duties import Choose

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


@contextlib.contextmanager
def chosen(choices: list[str], steps: list[int], rank: int, folder: Path, *, requests: bool) -> Iterator[None]:
    """Let --strategy auto choose these by turns, when this rank `requests` it in one of the steps."""
    first, second = choices
    around: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiled, "AUTO_STEPS_S", 0.1)
        patch.setattr(profiled, "AUTO_CODING_S", 0.1)
        patch.setattr(choice, "choose", lambda *_: choice.Chosen(second if _[4:5] == (first,) else first, "forced"))
        counted, choose = adaptive.Adaptive.add, Choose.apply

        def add(self: Any, *step: Any) -> None:
            self.steps = getattr(self, "steps", 0) + 1
            counted(self, *step)

        def asks(self: Any) -> float:
            return CHOOSE * (requests and getattr(self, "steps", 0) in steps)

        def watched(self: Any, result: Any) -> None:
            parts = (self._state.replica.state, self._state.replica.local_state)
            before = [digest(part()) for part in parts]
            choose(self, result)
            after = [digest(part()) for part in parts]
            around.append([before, after])
            (folder / f"around-{rank}.json").write_text(json.dumps(around))

        patch.setattr(adaptive.Adaptive, "add", add)
        patch.setattr(adaptive.Adaptive, "request", property(asks))
        patch.setattr(Choose, "apply", watched)
        yield


def exit_code(workload: Any, run: dict[str, Any], meeting: Rendezvous, replica: Any) -> int:
    flags = run["flags"]
    if "from_step" in run and meeting.rank == 0:
        cut_off(Path(run["folder"]), Path(flags[flags.index("--run-dir") + 1]), run["from_step"])
    meeting.gather_bytes(b"the folder is there")
    sys.argv = [workload.__name__, *flags]
    step = run.get("stop_before") if meeting.rank == meeting.size - 1 else None
    choosing: Any = contextlib.nullcontext()
    if "choices" in run:
        folder = Path(flags[flags.index("--run-dir") + 1])
        last = meeting.rank == meeting.size - 1
        choosing = chosen(run["choices"], run["choose_at"], meeting.rank, folder, requests=last)
    with signalled(replica, step), choosing, contextlib.redirect_stdout(io.StringIO()):
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
    shares.GAIN = 1.0  # and other work on this machine must not change them
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
