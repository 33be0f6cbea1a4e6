"""`import hvdtrain.torch as hvd` in place of `import horovod.torch as hvd`: the same names, and our strategies.

Horovod's functions are handed through as they are. What carries them is decided by `init`: Horovod itself, or, with
HVDTRAIN_STRATEGY, our streams (see `hvdtrain.horovod_api.job`). docs/reference/horovod-compatibility.md says
what each name does on both.
"""

from __future__ import annotations

from typing import Any

from horovod.torch import *  # noqa: F403
from horovod.torch import mpi_ops

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.record import log as log
from hvdtrain.torch.operations import Operations
from hvdtrain.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.torch.optimizer import broadcast_optimizer_state as broadcast_optimizer_state

_FRONT = job.Front("torch", mpi_ops, "mpi_lib", Operations)
init, shutdown, elastic = _FRONT.init, _FRONT.shutdown, job.Elastic()


def ddp_hook(strategy: str) -> tuple[Any, Any]:
    """The gradients of DistributedDataParallel summed by a reducer: `ddp.register_comm_hook(*ddp_hook("powersgd"))`.

    For scripts on torch.distributed, under torchrun; `init` need not be called. Collective. Raises Failure for what is
    no reducer.
    """
    from hvdtrain.torch.hook import Buckets

    return Buckets(_FRONT, strategy), lambda state, bucket: state.hook(bucket)
