"""Finds what a point needs and this machine lacks. Such a point is reported with the reason; the others run."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys

from hvdtrain.lab import virtual
from hvdtrain.launch import __main__ as launch
from hvdtrain.sweep import command
from hvdtrain.sweep.file import ALL_GPUS, ClusterSpec, Sweep
from hvdtrain.sweep.plan import Point
from hvdtrain.system import net
from hvdtrain.system.commands import PACKAGES, find, succeeds
from hvdtrain.system.exits import Failure

COUNT = {
    "torch": "import torch; print(torch.cuda.device_count())",
    "tensorflow": "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))",
}
"""Programs that print how many GPUs a framework can use"""
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", "--"]


def installed(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


@functools.cache
def gpus(framework: str = "auto") -> int:
    """How many GPUs of this machine the framework can use; auto: as the workloads choose it."""
    chosen = framework if framework != "auto" else "torch" if installed("torch") else "tensorflow"
    if chosen not in COUNT or not installed(chosen):
        return 0
    done = subprocess.run([sys.executable, "-P", "-c", COUNT[chosen]], capture_output=True, text=True, check=False)
    last = (done.stdout.split() or [""])[-1]
    return int(last) if last.isdigit() else 0


def asks_for_gpus(sweep: Sweep) -> bool:
    """Whether the number of GPUs decides what the points are."""
    return any(ALL_GPUS in grid.values.get("ranks_per_host", []) for grid in sweep.grids)


def reason(point: Point, cluster: ClusterSpec | None) -> str | None:
    """Why the point cannot run on this machine, and the remedy; None if no obstacle is known."""
    return framework(point) or _gpu(point) or _launcher(point) or (_hosts(point, cluster) if cluster else None)


def framework(point: Point) -> str | None:
    """Why the point's framework is not there, and the remedy; None if it is, or is none that we know."""
    asked = point.flags.get("framework", "auto")
    if asked in COUNT and not installed(asked):
        return f"{asked} is not installed: run `make setup FRAMEWORKS={asked}`"
    if asked == "auto" and not any(map(installed, COUNT)):
        return "neither torch nor tensorflow is installed: run `make setup`"
    return None


def _gpu(point: Point) -> str | None:
    per_host = point.settings["ranks_per_host"]
    if per_host != ALL_GPUS and point.flags.get("device") != "gpu":
        return None
    asked = point.flags.get("framework", "auto")
    if point.on_cluster and "hostfile" in point.settings["cluster"] and per_host != ALL_GPUS:
        return None  # the GPUs of other machines are found when the job starts there
    there = gpus(asked)
    wanted = 2 if per_host == ALL_GPUS else per_host
    who = "the framework" if asked == "auto" else asked
    return None if there >= wanted else f"{who} sees {there} GPUs here, and this needs {wanted}"


def _launcher(point: Point) -> str | None:
    asked = point.settings["launcher"]
    if asked == "none":
        return None
    path = command.environment()["PATH"]
    scripts = {"launch/mpirun.sh": ["mpirun"], "launch/horovodrun.sh": ["horovodrun", "mpirun"]}
    for program in scripts.get(asked, asked.split()[:1]):
        if shutil.which(program, path=path) is None:
            return f"no {program} in PATH: run `make setup`, or load your cluster's MPI"
    return None


def _hosts(point: Point, cluster: ClusterSpec) -> str | None:
    if not point.on_cluster:
        return None
    if cluster.hostfile:
        unreachable = [name for name in cluster.machines[1 : point.hosts] if not _lets_in(name)]
        return f"ssh does not let us in to {', '.join(unreachable)} without a prompt" if unreachable else None
    if not _root():
        return "virtual hosts need root: call it with sudo, or let sudo ask nothing (sudoers(5), NOPASSWD)"
    for program in ("ip", "tc", "nsenter", "unshare", "ssh", "sshd"):
        try:
            find(program)
        except Failure:
            return f"no {program} on this machine (Debian: apt-get install {PACKAGES.get(program, program)})"
    if cluster.existing:
        if cluster.existing not in virtual.clusters():
            return f"cluster {cluster.existing} is not up: sudo hvdtrain cluster up --name {cluster.existing} ..."
        there = len(virtual.load(cluster.existing).hosts)
        if there < point.hosts:
            return f"cluster {cluster.existing} has {there} hosts"
    return None


@functools.cache
def _root() -> bool:
    return os.geteuid() == 0 or succeeds(["sudo", "-n", "true"])


@functools.cache
def _lets_in(host: str) -> bool:
    try:
        return net.is_own(launch.address_of(host)) or succeeds([*SSH, host, "true"])
    except Failure:
        return False
