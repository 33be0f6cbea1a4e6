"""Drop-in module for `import horovod.torch as hvd`, with Horovod's names and hvdtrain's strategies.

Horovod's functions are used unchanged. `init` decides whether Horovod or, with HVDTRAIN_STRATEGY, hvdtrain's TCP
backend carries their calls (see `hvdtrain.horovod_api.job`). Without Horovod, `standalone` has the same functions for
the TCP backend. docs/reference/horovod-compatibility.md lists the names and how each behaves.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.horovod_api import job
from hvdtrain.horovod_api.record import log as log
from hvdtrain.torch import elastic as elastic
from hvdtrain.torch.api import *  # noqa: F403
from hvdtrain.torch.api import MISSING as _MISSING
from hvdtrain.torch.api import mpi_ops
from hvdtrain.torch.operations import Operations
from hvdtrain.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.torch.optimizer import broadcast_optimizer_state as broadcast_optimizer_state

_FRONT = job.Front("torch", mpi_ops, "mpi_lib", Operations, _MISSING)
init, shutdown = _FRONT.init, _FRONT.shutdown


def ddp_hook(strategy: str) -> tuple[Any, Any]:
    """Return a hook for DistributedDataParallel: `ddp.register_comm_hook(*ddp_hook("powersgd"))`. Collective.

    For scripts that use torch.distributed under torchrun, which need not call `init`. Raises Failure if the strategy is
    not a reducer.
    """
    from hvdtrain.torch.hook import Buckets

    return Buckets(_FRONT, strategy), lambda state, bucket: state.hook(bucket)
