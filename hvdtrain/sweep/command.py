"""The command line and environment of each run. A dry run prints the same lists of words that are executed."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.config import workloads
from hvdtrain.lab import enter
from hvdtrain.sweep import file
from hvdtrain.sweep.file import ClusterSpec
from hvdtrain.sweep.plan import UNLIMITED, Run
from hvdtrain.sweep.preview import MONITORS
from hvdtrain.system.commands import CHECKOUT, Command, as_user, calling_user

SCRIPTS = {
    "tools/cluster.sh": ["hvdtrain.lab"],
    "tools/throttle.sh": ["hvdtrain.lab.throttle"],
    "launch/mpirun.sh": ["hvdtrain.launch", "mpirun"],
    "launch/horovodrun.sh": ["hvdtrain.launch", "horovodrun"],
}
"""The checkout's scripts, and the modules they stand for"""


def script(name: str) -> Command:
    """The words that call a script of the checkout; an installed package without a checkout calls its module."""
    if not (CHECKOUT / name).is_file():
        return [sys.executable, "-P", "-m", *SCRIPTS[name]]  # -P: nothing is imported from the current folder, as root
    return [name if Path.cwd() == CHECKOUT else str(CHECKOUT / name)]


def as_root(command: Command) -> Command:
    """The command through sudo, which must not ask for a password; unchanged for root."""
    return command if os.geteuid() == 0 else ["sudo", "-n", *command]


def environment() -> dict[str, str]:
    """Environment of a run on this machine: as on a virtual host, without HVDTRAIN_*, which would override the file."""
    try:
        user = pwd.getpwnam(calling_user())
    except KeyError:  # as in a container that runs as any number
        about = (calling_user(), "x", os.geteuid(), os.getegid(), "", os.environ.get("HOME", "/"), "/bin/sh")
        user = pwd.struct_passwd(about)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HVDTRAIN_")}
    more = ("SUDO_*", "SSH_AUTH_SOCK", "SLURM_*", "HOSTNAME")
    kept = enter.environment(inherited, user, more)  # SUDO_*: cluster.sh makes and enters the caller's cluster
    folder = str(Path(sys.executable).parent)
    if folder not in kept["PATH"].split(os.pathsep):
        kept["PATH"] = os.pathsep.join([folder, kept["PATH"]])
    return kept


def launch(run: Run, flags: Command, folder: Path, *, hosts: Sequence[str], inside: str | None) -> Command:
    """The whole command of a run on these hosts; `inside`: the virtual cluster that they are of."""
    asked = run.point.settings
    if "command" in asked:
        program = ["env", *_variables(run, folder), *file.program(asked["command"]), *flags]
    else:
        program = ["python", "-m", workloads.known()[asked["workload"]], *flags, "--run-dir", str(folder), "--json"]
    listed = ",".join(f"{host}:{int(asked['ranks_per_host'])}" for host in hosts)
    placed = ["-np", str(run.point.ranks), "-H", listed]
    start = {
        "launch/mpirun.sh": [*script("launch/mpirun.sh"), "-H", listed],
        "launch/horovodrun.sh": [*script("launch/horovodrun.sh"), "-H", listed],
        "horovodrun": ["horovodrun", *placed],
        # Gloo would give up a transfer after 30 s; the limit changes no speed.
        "horovodrun --gloo": ["horovodrun", "--gloo", "--gloo-timeout-seconds", "1800", *placed],
        "none": [],
    }[asked["launcher"]]
    enter = [*script("tools/cluster.sh"), "exec", "--name", inside, hosts[0], "--"] if inside else _rights()
    return [*enter, *start, *program]


def _rights() -> Command:
    """The words by which a sweep under sudo trains as its caller."""
    return as_user(pwd.getpwnam(calling_user())) if os.geteuid() == 0 else []


def _variables(run: Run, folder: Path) -> list[str]:
    """Those of a command, for env(1), which sets them on every host."""
    asked = {key: value for key, value in run.flags.items() if key.isupper()}
    asked |= {"HVDTRAIN_STRATEGY": run.flags["strategy"]} if "strategy" in run.flags else {}
    asked |= {"HVDTRAIN_MONITOR": MONITORS[run.kind]} if MONITORS[run.kind] != "none" else {}
    return [f"{name}={value}" for name, value in {**asked, "HVDTRAIN_RUN_DIR": folder}.items()]


def up(cluster: ClusterSpec, name: str) -> Command:
    words = [*script("tools/cluster.sh"), "up", "--name", name, "--hosts", ",".join(cluster.virtual)]
    words += ["--cpu-share", f"{cluster.cpu_share:g}"] if cluster.cpu_share is not None else []
    return as_root(words + (["--cpus", cluster.cpus] if cluster.cpus else []))


def down(name: str) -> Command:
    return as_root([*script("tools/cluster.sh"), "down", "--name", name])


def throttle(rate: str, cluster: ClusterSpec, name: str) -> Command:
    """Sets the rate of every link; `unlimited` restores the links as they were."""
    where = ["--name", name]
    if cluster.hostfile:
        where = ["--hostfile", cluster.hostfile, "--dev", cluster.dev or ""]
    return [*script("tools/throttle.sh"), "clear" if rate == UNLIMITED else rate, *where]


def verify(hosts: Sequence[str], cluster: ClusterSpec, name: str, off_percent: float) -> list[Command]:
    """Commands that measure the links of these hosts: one for a virtual cluster, one per host for real machines, each
    against the next host."""
    words = [*script("tools/throttle.sh"), "verify", "--json", "--tolerance", f"{off_percent:g}", "--seconds", "2"]
    if not cluster.hostfile:
        return [[*words, "--name", name, "--host", ",".join(hosts)]]
    ring = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return [[*words, "--hosts", host, "--dev", cluster.dev or "", "--peer", peer] for host, peer in ring]
