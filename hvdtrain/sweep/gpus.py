"""The GPUs of this machine. An experiment that needs more than this machine has is skipped with a reason."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Literal

from hvdtrain import frameworks
from hvdtrain.sweep.file import ALL_GPUS, Sweep
from hvdtrain.sweep.grid import Experiment

COUNT_GPUS = {
    "torch": "import torch; print(torch.cuda.device_count())",
    "tensorflow": "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))",
}
"""Programs that print how many GPUs a framework can use"""


@functools.cache
def count(framework: Literal["torch", "tensorflow", "auto"] = "auto") -> int:
    """Number of GPUs on this machine that the framework can use. Raises Failure (78) if it is not installed."""
    program = [sys.executable, "-P", "-c", COUNT_GPUS[frameworks.resolve(framework)]]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    last = (done.stdout.split() or [""])[-1]
    return int(last) if last.isdigit() else 0


def decide_ranks(sweep: Sweep) -> bool:
    """Whether the number of ranks of some experiment is that of the GPUs."""
    return any(ALL_GPUS in grid.values.get("ranks_per_host", []) for grid in sweep.grids)


def missing(experiment: Experiment) -> str | None:
    """Why the experiment has too few GPUs; None if it needs none, or those of other machines."""
    per_host, cluster = experiment.settings["ranks_per_host"], experiment.settings.get("cluster", {})
    if per_host != ALL_GPUS and (experiment.flags.get("device") != "gpu" or "hostfile" in cluster):
        return None
    available, needed = count(experiment.flags.get("framework", "auto")), 2 if per_host == ALL_GPUS else per_host
    return None if available >= needed else f"{available} GPUs on this machine; {needed} are needed"
