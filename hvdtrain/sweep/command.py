"""Builds the command line and environment of each run. A dry run prints exactly the commands that a sweep executes."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.config import workloads
from hvdtrain.lab import enter
from hvdtrain.sweep import file
from hvdtrain.sweep.dry_run import MONITORS
from hvdtrain.sweep.file import ClusterSpec
from hvdtrain.sweep.grid import UNLIMITED, Run
from hvdtrain.system.commands import CHECKOUT, Command, as_caller, calling_user

SCRIPTS = {
    "tools/cluster.sh": ["hvdtrain.lab"],
    "tools/throttle.sh": ["hvdtrain.lab.throttle"],
    "launch/mpirun.sh": ["hvdtrain.cli", "launch", "mpirun"],
    "launch/horovodrun.sh": ["hvdtrain.cli", "launch", "horovodrun"],
}
"""Scripts of the checkout, and the modules that they call"""


def script(name: str) -> Command:
    """Calls a script of the checkout, or its module if the package is installed without a checkout."""
    if not (CHECKOUT / name).is_file():
        # -P prevents root from importing modules from the current folder.
        return [sys.executable, "-P", "-m", *SCRIPTS[name]]
    return [name if Path.cwd() == CHECKOUT else str(CHECKOUT / name)]


def as_root(command: Command) -> Command:
    """Adds sudo, which must not ask for a password. Returns the command unchanged for root."""
    return command if os.geteuid() == 0 else ["sudo", "-n", *command]


def environment() -> dict[str, str]:
    """The environment of a run on this machine: the sweep's own, or under sudo the variables of a virtual host, SSH and
    Slurm. HVDTRAIN_* are omitted because they would override the sweep file.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HVDTRAIN_")}
    if os.geteuid() == 0 and calling_user() != "root":
        # cluster.sh uses SUDO_* to create and enter the cluster of the calling user.
        kept = ("SUDO_*", "SSH_AUTH_SOCK", "SLURM_*", "HOSTNAME")
        variables = enter.environment(variables, pwd.getpwnam(calling_user()), kept)
    folder = str(Path(sys.executable).parent)
    path = variables.get("PATH", os.defpath)
    if folder not in path.split(os.pathsep):
        variables["PATH"] = os.pathsep.join([folder, path])
    return variables


def launch(run: Run, flags: Command, folder: Path, *, hosts: Sequence[str], cluster: str | None) -> Command:
    """The full command of a run on these hosts. `cluster` is the virtual cluster they belong to, if any."""
    settings = run.experiment.settings
    if "command" in settings:
        program = ["env", *_variables(run, folder), *file.program(settings["command"]), *flags]
    else:
        module = workloads.known()[settings["workload"]]
        program = ["python", "-m", module, *flags, "--run-dir", str(folder), "--json"]
    slots = ",".join(f"{host}:{int(settings['ranks_per_host'])}" for host in hosts)
    launcher = settings["launcher"].split()
    if launcher[0] == "none":
        launcher = []
    elif launcher[0] in SCRIPTS:
        launcher = [*script(launcher[0]), "-H", slots]
    else:
        # By default Gloo gives up a transfer after 30 s. A longer limit does not change the speed.
        patience = ["--gloo-timeout-seconds", "1800"] if "--gloo" in launcher else []
        launcher = [*launcher, *patience, "-np", str(run.experiment.ranks), "-H", slots]
    if cluster:
        return [*script("tools/cluster.sh"), "exec", "--name", cluster, hosts[0], "--", *launcher, *program]
    return [*as_caller(), *launcher, *program]


def _variables(run: Run, folder: Path) -> list[str]:
    """Variables of a command, passed through env(1) so that they are set on every host."""
    variables = {key: value for key, value in run.flags.items() if key.isupper()}
    if "strategy" in run.flags:
        variables["HVDTRAIN_STRATEGY"] = run.flags["strategy"]
    if MONITORS[run.kind] != "none":
        variables["HVDTRAIN_MONITOR"] = MONITORS[run.kind]
    return [f"{name}={value}" for name, value in {**variables, "HVDTRAIN_RUN_DIR": folder}.items()]


def up(cluster: ClusterSpec, name: str) -> Command:
    words = [*script("tools/cluster.sh"), "up", "--name", name, "--hosts", ",".join(cluster.virtual)]
    return as_root(words + (["--cpu-share", f"{cluster.cpu_share:g}"] if cluster.cpu_share is not None else []))


def down(name: str) -> Command:
    return as_root([*script("tools/cluster.sh"), "down", "--name", name])


def throttle(rate: str, cluster: ClusterSpec, name: str) -> Command:
    """Sets the rate of all links. `unlimited` restores their original state."""
    target = ["--name", name]
    if cluster.hostfile:
        target = ["--hostfile", cluster.hostfile, "--dev", cluster.dev or ""]
    return [*script("tools/throttle.sh"), "clear" if rate == UNLIMITED else rate, *target]


def verify(cluster: ClusterSpec, name: str, off_percent: float) -> list[Command]:
    """Commands that measure the links of all hosts.

    A virtual cluster needs one command. Real machines need one each, to measure against the next machine.
    """
    words = [*script("tools/throttle.sh"), "verify", "--json", "--tolerance", f"{off_percent:g}", "--seconds", "2"]
    if not cluster.hostfile:
        return [[*words, "--name", name]]
    hosts = cluster.names
    ring = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return [[*words, "--hosts", host, "--dev", cluster.dev or "", "--peer", peer] for host, peer in ring]
