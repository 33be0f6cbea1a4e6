"""Imports the framework that a run uses, and makes model replicas in it."""

from __future__ import annotations

import sys
from typing import Any

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.config.options import TrainConfig
from hvdtrain.pipeline.schedule import Pipe
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.records.metrics import Metric
from hvdtrain.strategies import Strategy
from hvdtrain.training.threads import Threads


def prepare(
    framework: str, threads: Threads, *, device: str = "cpu", local_rank: int = 0, exclusive_gpu: bool = False
) -> str:
    """Import the framework and return this rank's device.

    `device`: see `options.TrainConfig`. `exclusive_gpu`: ranks without a GPU of their own use the CPU.
    """
    if framework not in sys.modules:  # otherwise OpenMP has already read its variables
        threads.use()
    if framework == "torch":
        from hvdtrain.frameworks.pytorch import prepare
    else:
        from hvdtrain.frameworks.tensorflow import prepare
    return prepare(device, local_rank, threads.count, exclusive_gpu=exclusive_gpu)


def make_replica(
    model: Any,
    config: TrainConfig,
    ranks: Communicator,
    strategy: Strategy,
    device: str,
    metric: Metric,
    pipe: Pipe | None = None,
) -> Any:
    """Put the model on its device with its optimizer: a `frameworks.Replica`; with a `pipe`, also a `StageModel`."""
    options = {"device": device, "config": config, "world": ranks, "strategy": strategy, "metric": metric}
    cls: Any
    if config.framework == "torch":
        from hvdtrain.frameworks.pytorch import TorchReplica as cls

        if pipe is not None:
            from hvdtrain.frameworks.pipeline_torch import PipelineTorch as cls
    else:
        from hvdtrain.frameworks.tensorflow import TensorFlowReplica as cls

        if pipe is not None:
            from hvdtrain.frameworks.pipeline_tensorflow import PipelineTensorFlow as cls
    return cls(model, **options) if pipe is None else cls(model, **options, pipe=pipe)


def load_first(replica: Any, state: Arrays) -> None:
    """Load a job's first state, arrays by name: parameters, and arrays of `Replica.local_state`."""
    local = state.keys() & replica.local_state().keys()
    replica.load({f"parameter.{name}": array for name, array in state.items() if name not in local})
    replica.load_local({name: state[name] for name in local})
