"""Horovod's functions for PyTorch if it is installed, otherwise hvdtrain's own."""

import importlib
from typing import Any

MISSING = ""
"""Why Horovod cannot be imported; empty if it can"""

try:
    from horovod.torch import *  # noqa: F403
    from horovod.torch import DistributedOptimizer as DistributedOptimizer
    from horovod.torch import broadcast_optimizer_state as broadcast_optimizer_state
except ImportError as error:
    from hvdtrain.torch.standalone import *  # noqa: F403

    MISSING = f"Horovod for PyTorch is missing ({error})"
mpi_ops: Any = importlib.import_module("hvdtrain.torch.standalone" if MISSING else "horovod.torch.mpi_ops")
