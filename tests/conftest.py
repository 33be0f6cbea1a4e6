"""Starts real ranks for the tests: mpirun and horovodrun from this environment, on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import os
import re
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
from untouched import Untouched

from hvdtrain.system import cgroup
from hvdtrain.system import locks as lock
from hvdtrain.system.exits import Failure

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"
# The smallest run that exercises everything: digits as they are, 8x8, and an eighth of ResNet-34's channels.
SMALL = ["--image-size", "8", "--width", "0.125", "--batch-size", "48"]


LIMIT_S = 300
"""Timeout for processes that may hang. A busy machine can be ten times slower than an idle one"""

# On a busy machine, seconds may pass between two examples.
UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("unhurried", deadline=None, suppress_health_check=UNHURRIED)
settings.load_profile("unhurried")

MARK = os.environ.setdefault("HVD_TESTS", secrets.token_hex(2))
"""Part of the names of what these tests make on the machine; workers inherit it"""

NETWORK_TOOLS = ("ip", "tc", "sshd")

# Tests share the cores, and several threads would spin while they wait for one that has no core. With one thread, sums
# in this process and in those that it starts also have the same bits.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")  # as workloads set it
os.environ["PYTHONFAULTHANDLER"] = "1"  # a rank that crashes shows where

WITHOUT_RIGHTS: list[str] = []
"""Words that start a command which can change nothing, and which sudo does not help"""
if os.geteuid():  # so that no test changes the machine of a user whose sudo asks for no password
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
else:
    WITHOUT_RIGHTS += ["setpriv", "--no-new-privs", "--reuid=65534", "--regid=65534", "--clear-groups"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Untouched(MARK))
        use_own_cache(config)


def use_own_cache(config: pytest.Config) -> None:
    """Let all tests share a cache folder of their own, which has the Horovod wheels of the user's."""
    users, own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), tempfile.mkdtemp(prefix="hvd-cache-")
    wheels = Path(own, "hvdtrain")
    wheels.mkdir()
    for folder in (users / "hvdtrain").glob("horovod-*"):
        (wheels / folder.name).symlink_to(folder)
    os.environ["XDG_CACHE_HOME"] = own
    os.environ.setdefault("PIP_CACHE_DIR", str(users / "pip"))
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


def unique() -> str:
    """A name for a cluster that no other test has."""
    return f"t{MARK}{secrets.token_hex(2)[1:]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `root` if they cannot run. Moves files with tests marked `alone` to the end, where the other
    workers have little left to do."""
    missing = "root: sudo make test" if os.geteuid() else ""
    for tool in NETWORK_TOOLS:
        if not missing and shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            missing = f"{tool} (Debian: apt-get install iproute2 openssh-server)"
    for item in items:
        if missing and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))
    last = {item.path for item in items if item.get_closest_marker("alone")}
    items.sort(key=lambda item: item.path in last)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs tests marked `alone` exclusively if there are several workers (`pytest -n 2`, as in `make test`).

    Tests share a lock, and a test marked `alone` takes it exclusively. A waiting test holds the gate, so that later
    tests queue behind it.
    """
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
    """For tests that read this machine's network settings, without root."""
    if shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("no ip on this machine (Debian: apt-get install iproute2)")


class Cluster:
    """A virtual cluster, controlled by the users' command."""

    def __init__(self, name: str) -> None:
        self.name = name

    def command(self, *words: str) -> list[str]:
        return [str(ROOT / "tools" / "cluster.sh"), words[0], "--name", self.name, *words[1:]]

    def run(self, *words: str, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Runs `hvdtrain cluster WORDS`."""
        return finished(self.command(*words), limit_s=timeout_s)

    def on(self, host: str, *words: str, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host."""
        return self.run("exec", host, "--", *words, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two virtual hosts, a and b, that may use all cores and have unlimited links."""
    made = Cluster(unique())
    done = made.run("up", "--hosts", "a,b")
    assert done.returncode == 0, done.stderr
    try:
        yield made
    finally:
        assert made.run("down").returncode == 0


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    """Two virtual hosts that share neither home folders nor the checkout, none of which has a key of the user."""
    made = Cluster(unique())
    done = made.run("up", "--hosts", "a,b", "--own-files")
    assert done.returncode == 0, done.stderr
    try:
        for host in "ab":
            assert made.on(host, "rm", "-rf", str(Path.home() / ".config/hvdtrain")).returncode == 0
        yield made
    finally:
        assert made.run("down").returncode == 0


@pytest.fixture
def half_core() -> Iterator[tuple[Path, list[str]]]:
    """A control group with a quota of half a core, and the words that start a command in it. Needs root."""
    v2 = (cgroup.MOUNT / "cgroup.controllers").exists()
    group = cgroup.MOUNT / ("" if v2 else "cpu") / f"hvdtrain-test-{unique()}"
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
    """This process's environment without hvdtrain's settings. mpirun may run as root, and waiting ranks yield."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HVDTRAIN_", "OMPI_COMM"))}
    return inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # waiting ranks poll, and there are fewer cores than ranks
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HVDTRAIN_BUCKETS": "4",  # measured numbers differ between runs, and with them the last bits
        "HVDTRAIN_RECORD": "1" if "HVDTRAIN_RUN_DIR" in (extra or {}) else "0",  # scripts leave no folders here
        **(extra or {}),
    }


def until(condition: Callable[[], object], seconds: float = LIMIT_S, what: Callable[[], str] = str) -> None:
    """Waits until the condition is true. After the timeout the test fails with the text of `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.05)


def command(ranks: int, arguments: list[str], launcher: str = "mpirun") -> list[str]:
    """The command that runs Python with `arguments` on `ranks` ranks, or without a launcher for ranks=0."""
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
    """Runs a command in the tests' environment, with a timeout."""
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
    """Runs Python with `arguments` on `ranks` ranks, or without a launcher for ranks=0.

    The launcher `forks` takes ranks from a process that has imported PyTorch, `forks-trainers` the trainers too.
    """
    if launcher in FORKS:
        return _forks(ranks, arguments, launcher, extra or {}, limit_s)
    return finished(command(ranks, arguments, launcher), extra=extra, limit_s=limit_s)


FORKS = {"forks": ["torch._dynamo", "hvdtrain.torch", "hvdtrain.torch.attached", "hvdtrain.resnet"]}
FORKS["forks-trainers"] = [*FORKS["forks"], "transformers", "peft", "accelerate", "lightning"]
"""What a parent of ranks has imported. PyTorch's optimizers import torch._dynamo, which takes longer than the rest"""


PARENTS: dict[str, subprocess.Popen[str]] = {}


def _parent(launcher: str) -> subprocess.Popen[str]:
    if launcher not in PARENTS:
        words, pipe = [sys.executable, str(ROOT / "tests" / "forks.py"), *FORKS[launcher]], subprocess.PIPE
        PARENTS[launcher] = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, text=True, env=environment({"HF_HUB_OFFLINE": "1"}), cwd=ROOT
        )
    return PARENTS[launcher]


def pytest_unconfigure() -> None:
    for parent in PARENTS.values():
        parent.communicate()


def _forks(
    ranks: int, arguments: list[str], launcher: str, extra: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Ranks that find each other through a store of PyTorch, as under torchrun."""
    store = pytest.importorskip("torch").distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "forks"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    parent: Any = _parent(launcher)
    with (
        tempfile.NamedTemporaryFile("r", errors="replace") as out,
        tempfile.NamedTemporaryFile("r", errors="replace") as err,
    ):
        job = {"ranks": ranks, "arguments": arguments, "variables": environment(extra) | variables}
        job |= {"folder": str(ROOT), "out": out.name, "err": err.name, "limit_s": limit_s}
        parent.stdin.write(json.dumps(job) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def forked(program: Callable[[], object], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `program` in a fork of this process, which saves seconds of imports."""
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
    """`python -m hvdtrain.MODULE WORDS` in a fork. Not for modules that import TensorFlow or compute with PyTorch."""

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
    """Runs `python -m hvdtrain.WORKLOAD --json FLAGS` in this process and returns its document."""

    from hvdtrain.comm import lifecycle  # imports NumPy, which reads the variables set above

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
    """mpirun's variables for rank 0 of a job on one host."""
    values = {"RANK": 0, "LOCAL_RANK": 0, "SIZE": ranks, "LOCAL_SIZE": ranks}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def refused(module: str, *words: str, code: int, said: str, extra: Mapping[str, str] | None = None) -> None:
    """Checks that a command fails with this code and one line that contains `said`."""
    done = alone(module, *words, extra=extra)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert said in done.stderr


def installed(folder: Path, entry: str, group: str = "hvdtrain.workloads") -> dict[str, str]:
    """Creates the metadata of an installed package in `folder`. Returns the variables with which Python finds it.

    `entry` is its entry point, `name = module`. A second call replaces it.
    """
    about = folder / "mine-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return {"PYTHONPATH": str(folder)}


@contextlib.contextmanager
def failing(code: int, words: str | None = None) -> Iterator[pytest.ExceptionInfo[Failure]]:
    """The block must raise a Failure with this code and a message that matches `words`, a regular expression."""
    with pytest.raises(Failure, match=words) as failure:
        yield failure
    assert failure.value.code == code, failure.value


def fails(action: Callable[[], object], code: int, *words: str) -> None:
    """The action must raise a Failure with this code and one line that contains all words."""
    with failing(code) as failure:
        action()
    assert all(word in str(failure.value) for word in words), failure.value
    assert "\n" not in str(failure.value)


def document(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON document on stdout, without the tags that launchers add, to each part of a line that is long."""
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-6000:]
    output = re.sub(r"\[\d+,\d+\]<stdout>:", "", done.stdout)
    lines = [line[line.index("{") :] for line in output.splitlines() if "{" in line]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def resnet(ranks: int, *flags: str, launcher: str = "mpirun") -> subprocess.CompletedProcess[str]:
    return launch(ranks, ["-m", "hvdtrain.resnet", *flags], launcher)


def trainings(
    ranks: int, runs: list[dict[str, Any]], framework: str = "torch", workload: str = "resnet"
) -> tuple[list[int], str]:
    """Exit codes and stderr of several trainings in one job, in which each rank acts as a host (strategy_runs.py).

    The ranks of PyTorch are forks if each training names a strategy, and none needs Horovod.
    """
    horovod = any("--strategy" not in run["flags"] or "allreduce" in run["flags"] for run in runs)
    launcher = "forks" if framework == "torch" and not horovod else "mpirun"
    arguments = [str(PROGRAMS / "strategy_runs.py"), framework, "1", json.dumps(runs), workload]
    done = launch(ranks, arguments, launcher, limit_s=600)
    return document(done)["codes"], done.stderr
