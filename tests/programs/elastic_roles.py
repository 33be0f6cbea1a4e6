"""A training whose ranks become slow or die, and whose --strategy auto chooses by turns.

    launch/mpirun.sh --elastic -H 127.0.0.1:1,127.0.0.2:1,... python elastic_roles.py FOLDER ROLES --width 0.125 ...

The flags are those of hvdtrain.resnet. ROLES is a JSON object with these keys, all optional:

    slow      [rank, step]: from this step on, its backward passes take SAMPLE_S longer for each sample
    dies      [rank, step]: it dies before this step
    hangs     [rank, number]: once it has come back, it hangs in this backward pass of its own
    chooses   [rank, number]: it dies at the end of this choice of its own, from 1, before all ranks know it
    stops     [rank, number]: it asks for a stop STOP_STEPS steps after this choice
    choices   strategies that --strategy auto chooses by turns, only after a change of members

A rank dies or hangs once: it leaves a file in FOLDER. Used by test_elastic.py.
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
from hvdtrain.plan import choice
from hvdtrain.strategies import shares
from hvdtrain.training import adaptive, profiled

SAMPLE_S = 0.004
STOP_STEPS = 20
FOLDER, ROLES = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))


def own(role: str) -> float:
    """Return the step or number of this rank in a role; infinite if it is another rank's."""
    rank, number = ROLES.get(role, (None, 0))
    return float(number) if rank == launch_env().rank else float("inf")


def is_first(event: str) -> bool:
    """Whether this has not happened yet in this run."""
    try:
        (FOLDER / event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(role: str) -> None:
    if is_first(f"died-{role}"):
        os.kill(os.getpid(), signal.SIGKILL)


def take_roles() -> None:
    backward, steps = TorchReplica.backward, itertools.count()
    again, choices, more = adaptive.Adaptive.again, itertools.count(1), itertools.count(1)
    stopping = False

    def changed(self: TorchReplica, batch: Any, lr: float, stop: float) -> None:
        step = next(steps) if lr else -1  # a pass that only measures has a learning rate of 0
        if step >= own("dies"):
            die("dies")
        if step >= own("hangs") and (FOLDER / "died-dies").exists() and is_first("hung"):
            time.sleep(3600)
        if step >= own("slow"):
            time.sleep(SAMPLE_S * batch.weight)
        if stopping and next(more) == STOP_STEPS:
            os.kill(os.getpid(), signal.SIGUSR1)
        backward(self, batch, lr, stop)

    def choose(self: Any, current: str) -> choice.Chosen:
        nonlocal stopping
        chosen, number = again(self, current), next(choices)
        stopping = number >= own("stops")
        if number >= own("chooses"):
            time.sleep(0.1)  # others are waiting for the end of the choice
            die("chooses")
        return chosen

    TorchReplica.backward = changed  # type: ignore[method-assign]
    adaptive.Adaptive.again = choose  # type: ignore[method-assign]
    if turns := ROLES.get("choices"):

        def by_turns(*arguments: Any) -> choice.Chosen:
            running = next(iter(arguments[4:]), turns[-1])
            return choice.Chosen(turns[(turns.index(running) + 1) % len(turns)], "its turn")

        choice.choose = by_turns
        adaptive.Pace.departed = lambda self: False  # type: ignore[method-assign]


take_roles()
shares.TRIAL_S, shares.MAX_S = 0.1, 0.6  # what is measured before step 0 need not be accurate here
profiled.AUTO_STEPS_S = profiled.AUTO_CODING_S = 0.3
lifecycle.run(resnet.main, debug=True)
