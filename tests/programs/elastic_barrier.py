"""A rank of a training that dies in the barrier after its first evaluation, when one other rank has heard from it.

    launch/mpirun.sh --elastic -H 127.0.0.1:1,127.0.0.2:1,... python elastic_barrier.py RANK --width 0.125 ...

RANK dies. The flags are those of hvdtrain.resnet. Used by test_elastic.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from hvdtrain import resnet
from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends import tcp
from hvdtrain.comm.elastic import ElasticCommunicator
from hvdtrain.training.evaluation import Evaluator


def die_after_an_evaluation() -> None:
    after_epoch, confirm, swap = Evaluator.after_epoch, ElasticCommunicator.confirm, tcp.swap
    evaluated, messages = False, 0

    def evaluate(*arguments: Any) -> Any:
        nonlocal evaluated
        result, evaluated = after_epoch(*arguments), True
        return result

    def deadly(*arguments: Any) -> Any:
        nonlocal messages
        messages += 1
        if messages == 2:
            time.sleep(1)  # the other rank passes the barrier and begins the next epoch
            os.kill(os.getpid(), signal.SIGKILL)
        return swap(*arguments)

    def die(self: ElasticCommunicator) -> None:
        if evaluated:
            tcp.swap = deadly
        confirm(self)

    Evaluator.after_epoch, ElasticCommunicator.confirm = evaluate, die  # type: ignore[method-assign]


if os.environ["HVDTRAIN_ELASTIC_RANK"] == sys.argv.pop(1):
    die_after_an_evaluation()
lifecycle.run(resnet.main, debug=True)
