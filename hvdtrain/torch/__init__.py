"""`import hvdtrain.torch as hvd` in place of `import horovod.torch as hvd`: the same names, and our strategies.

Horovod's functions are handed through as they are. What carries them is decided by `init`: Horovod itself, or, with
HVDTRAIN_STRATEGY, our streams (see `hvdtrain.script.job`). docs/OWN.md says what each name does on both.
"""

from __future__ import annotations

from typing import Any

from horovod.torch import *  # noqa: F403
from horovod.torch import mpi_ops

from hvdtrain.script import job, record
from hvdtrain.script.record import log as log
from hvdtrain.torch.operations import Operations
from hvdtrain.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.torch.optimizer import broadcast_optimizer_state as broadcast_optimizer_state

_FRONT = job.Front("torch", mpi_ops, "mpi_lib", Operations)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meets the other ranks; see `horovod.torch.init` for the arguments. A second time does nothing.

    Raises Failure if HVDTRAIN_STRATEGY is none that a script can have, or the ranks cannot find each other.
    """
    job.init(_FRONT, comm, process_sets)


def shutdown() -> None:
    """Writes the end of the run's records, and leaves the other ranks as `horovod.torch.shutdown` does."""
    record.finish()
    mpi_ops.shutdown()


def ddp_hook(strategy: str) -> tuple[Any, Any]:
    """The gradients of DistributedDataParallel summed by a reducer: `ddp.register_comm_hook(*ddp_hook("powersgd"))`.

    For scripts on torch.distributed, under torchrun; `init` need not be called. Collective. Raises Failure for what is
    no reducer.
    """
    from hvdtrain.torch import hook

    return hook.of(_FRONT, strategy)


class _Elastic:
    """What stands in for `horovod.torch.elastic`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"hvd.elastic.{name}: the number of ranks is fixed here; save the model and optimizer.state_dict(), and "
            "start the script again, which torchrun --max-restarts does by itself (docs/OWN.md)"
        )


elastic = _Elastic()
