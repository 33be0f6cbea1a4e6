"""Drop-in module for `import horovod.torch as hvd`, with Horovod's names and hvdtrain's strategies.

`init` decides whether Horovod or hvdtrain's TCP backend carries the calls (see `hvdtrain.horovod_api.job`). A name is
Horovod's function in the first case, and hvdtrain's own with the same results in the second.
docs/reference/horovod-compatibility.md lists the names and how each behaves.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.frameworks.muon_torch import Muon as Muon
from hvdtrain.horovod_api.record import log as log
from hvdtrain.torch import collectives as mpi_ops  # noqa: F401
from hvdtrain.torch import elastic as elastic
from hvdtrain.torch.api import *  # noqa: F403
from hvdtrain.torch.collectives import FRONT as _FRONT
from hvdtrain.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from hvdtrain.torch.optimizer import broadcast_optimizer_state as broadcast_optimizer_state

init, shutdown = _FRONT.init, _FRONT.shutdown


def __getattr__(name: str) -> Any:
    """What Horovod's module has besides, if it is installed. Raises AttributeError."""
    return _FRONT.get(name)


def attach(model: Any, optimizer: Any, *, strategy: str | None = None) -> None:
    """Let a model, usually DistributedDataParallel, and its optimizer exchange by a strategy. Collective.

    Does for a line of the script what `python -m hvdtrain.ddp` does without one: see `hvdtrain.torch.attached.attach`.
    """
    from hvdtrain.torch import attached

    attached.attach(model, optimizer, strategy=strategy)
