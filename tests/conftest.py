"""Starts real ranks for the tests: mpirun and horovodrun from this environment, on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import json
import os
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from hvdtrain.system import cgroup
from hvdtrain.system import locks as lock
from hvdtrain.system.exits import Failure

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"
# The smallest run that exercises everything: digits as they are, 8x8, and an eighth of ResNet-34's channels.
SMALL = ["--image-size", "8", "--width", "0.125", "--batch-size", "48"]


LIMIT_S = 300
"""What takes longer hangs: a busy machine may take ten times what an idle one does"""

# A busy machine may stop a test for seconds between two examples.
UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("unhurried", deadline=None, suppress_health_check=UNHURRIED)
settings.load_profile("unhurried")

NETWORK_TOOLS = ("ip", "tc", "sshd")

# The arrays of tests are small, and workers share the cores: several threads spin, waiting for one that has no core.
# And a sum of one thread, in this process as in those it starts, has the same bits.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as workloads set it

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background command: so would be all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `root` run where they can, and elsewhere say what they lack. Files with tests marked `alone` come
    last, because then no other worker has much left to do."""
    lacking = "root: sudo make test" if os.geteuid() else ""
    for tool in NETWORK_TOOLS:
        if not lacking and shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            lacking = f"{tool} (Debian: apt-get install iproute2 openssh-server)"
    for item in items:
        if lacking and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason=f"needs {lacking}"))
    last = {item.path for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: item.path in last)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With several workers (`pytest -n 2`, as `make test` has it) tests share a lock, which one marked `alone` has for
    itself. Whoever waits for it holds the gate, so that later ones queue up behind."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with opened(item.config.rootpath) as lock:
        with opened(item.config.rootpath / "tests") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        return (yield)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


@pytest.fixture
def iproute2() -> None:
    """For tests that look at this machine's network as any user may."""
    if shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("no ip on this machine (Debian: apt-get install iproute2)")


class Cluster:
    """A virtual cluster of the tests, driven by the command that users type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, *words: str) -> list[str]:
        return [str(ROOT / "tools" / "cluster.sh"), words[0], "--name", self.name, *words[1:]]

    def run(self, *words: str, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """`hvdtrain cluster WORDS` to its end; output as text."""
        return finished(self.command(*words), limit_s=timeout_s)

    def on(self, host: str, *words: str, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """A command on a host."""
        return self.run("exec", host, "--", *words, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two virtual hosts, a and b, with all of the machine's processor; unlimited links."""
    made = Cluster(f"t{secrets.token_hex(3)}")
    done = made.run("up", "--hosts", "a,b")
    assert done.returncode == 0, done.stderr
    try:
        yield made
    finally:
        assert made.run("down").returncode == 0


@pytest.fixture
def half_core() -> Iterator[tuple[Path, list[str]]]:
    """A control group with a quota of half a core, and what to put before a command to run it there. Needs root."""
    v2 = (cgroup.MOUNT / "cgroup.controllers").exists()
    group = cgroup.MOUNT / ("" if v2 else "cpu") / f"hvdtrain-test-{secrets.token_hex(3)}"
    group.mkdir()
    try:
        if v2:
            (group / "cpu.max").write_text("50000 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("50000")
        yield group, ["sh", "-c", 'echo 0 >"$1" && shift && exec "$@"', "sh", str(group / "cgroup.procs")]
    finally:
        group.rmdir()


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' environment without hvdtrain's own settings, one thread per rank, mpirun allowed for root,
    ranks that wait give the core away."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_COMM"))}
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # a waiting rank polls: tests' ranks are more than the cores
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HVDTRAIN_RECORD": "1" if "HVDTRAIN_RUN_DIR" in (extra or {}) else "0",  # scripts leave no folders here
        **(extra or {}),
    }


def until(true: Callable[[], object], seconds: float = LIMIT_S, what: Callable[[], str] = str) -> None:
    """Waits until it is true; fails after so long, telling `what` is the matter."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.05)


def command(ranks: int, arguments: list[str], launcher: str = "mpirun") -> list[str]:
    """`arguments` to python on `ranks` ranks; without a launcher for ranks=0."""
    python = [sys.executable, *arguments]
    if not ranks:
        return python
    if shutil.which(launcher.split()[0], path=environment()["PATH"]) is None:
        pytest.skip(f"no {launcher} in this environment: run `make setup`")
    start = {
        "mpirun": ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe"],
        "horovodrun": ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}"],
        "horovodrun --hostfile": ["horovodrun", "-np", str(ranks), "--hostfile", f"hostfiles/local{ranks}.txt"],
        "torchrun": ["torchrun", "--standalone", "--no-python", "--nproc-per-node", str(ranks)],
        "horovodrun --gloo": ["horovodrun", "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"],
    }
    return [*start[launcher], *python]


def finished(
    words: Sequence[str | Path], *, extra: Mapping[str, str] | None = None, cwd: Path = ROOT, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the tests' environment to its end (for `limit_s` at most); output as text."""
    return subprocess.run(
        words,
        env=environment(extra),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
    )


def launch(
    ranks: int,
    arguments: list[str],
    launcher: str = "mpirun",
    extra: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """`finished` with `arguments` to python on `ranks` ranks; without a launcher for ranks=0."""
    return finished(command(ranks, arguments, launcher), extra=extra, limit_s=limit_s)


def forked(program: Callable[[], object], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a process does that runs `program`: a fork of this one, which has imported what takes seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open() as null:
        pid = os.fork()
        if not pid:
            _child(program, folder, [null.fileno(), out.fileno(), err.fileno()])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0), err.seek(0)
        texts = [stream.read().decode(errors="replace") for stream in (out, err)]
    return subprocess.CompletedProcess([], code, *texts)


def _child(program: Callable[[], object], folder: Path, streams: list[int]) -> NoReturn:
    code: Any = 120
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in ((0, "r"), (1, "w"), (2, "w")))
        os.chdir(folder)
        try:
            program()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout and sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def alone(module: str, *words: str, extra: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m hvdtrain.MODULE WORDS` in a fork. Not for what imports TensorFlow or computes with PyTorch."""

    def program() -> None:
        variables = environment(extra)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv = [module, *words]
        warnings.filterwarnings("ignore", "'hvdtrain.* found in sys.modules")
        runpy.run_module(f"hvdtrain.{module}", run_name="__main__", alter_sys=True)

    importlib.import_module(f"hvdtrain.{module}")
    return forked(program)


def here(workload: str, *flags: str) -> Any:
    """What `python -m hvdtrain.WORKLOAD --json FLAGS` prints. This process runs it, which has imported frameworks."""

    from hvdtrain.comm import lifecycle  # not above: it imports NumPy, which reads the variables there

    shown, stop = io.StringIO(), lifecycle.StopSignal()
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
            for name in os.environ.keys() - environment().keys():
                patch.delenv(name)
            patch.setattr(sys, "argv", [workload, "--json", *flags])
            assert importlib.import_module(f"hvdtrain.{workload}").main(stop) == 0
    finally:
        stop.restore()
        lock.release()
    return json.loads(shown.getvalue())


def first_of(ranks: int) -> dict[str, str]:
    """What mpirun tells the first of so many ranks on one host."""
    told = {"RANK": 0, "LOCAL_RANK": 0, "SIZE": ranks, "LOCAL_SIZE": ranks}
    return {f"OMPI_COMM_WORLD_{what}": str(number) for what, number in told.items()}


def refused(module: str, *words: str, code: int, said: str, extra: Mapping[str, str] | None = None) -> None:
    """The command ends with this code and one line, which has these words."""
    done = alone(module, *words, extra=extra)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert said in done.stderr


def installed(folder: Path, entry: str, group: str = "hvdtrain.workloads") -> dict[str, str]:
    """The variables with which Python finds a workload in the folder, `name = module`, as an installed package's; or
    what another group of entry points names. Called again, it renames it."""
    about = folder / "mine-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return {"PYTHONPATH": str(folder)}


@contextlib.contextmanager
def failing(code: int, words: str | None = None) -> Iterator[pytest.ExceptionInfo[Failure]]:
    """The block ends with a Failure of this code, in which these words (a regular expression) are found."""
    with pytest.raises(Failure, match=words) as failure:
        yield failure
    assert failure.value.code == code, failure.value


def fails(action: Callable[[], object], code: int, *words: str) -> None:
    """The action ends with a Failure of this code and one line, which has all these words."""
    with failing(code) as failure:
        action()
    assert all(word in str(failure.value) for word in words), failure.value
    assert "\n" not in str(failure.value)


def document(done: subprocess.CompletedProcess[str]) -> Any:
    """The one JSON document on stdout, behind whatever a launcher puts before it."""
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def resnet(ranks: int, *flags: str, launcher: str = "mpirun") -> subprocess.CompletedProcess[str]:
    return launch(ranks, ["-m", "hvdtrain.resnet", *flags], launcher)


def trainings(
    ranks: int, runs: list[dict[str, Any]], framework: str = "torch", workload: str = "resnet"
) -> tuple[list[int], str]:
    """Exit codes of several trainings in one start of ranks, each a host of its own, and what they said (see
    programs/strategy_runs.py)."""
    done = launch(ranks, [str(PROGRAMS / "strategy_runs.py"), framework, "1", json.dumps(runs), workload], limit_s=600)
    return document(done)["codes"], done.stderr
