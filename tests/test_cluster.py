"""Host lists, and the virtual cluster: its commands without root, and real hosts in namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import (
    LIMIT_S,
    ROOT,
    SMALL,
    WITHOUT_RIGHTS,
    Cluster,
    document,
    environment,
    failing,
    finished,
    unique,
    until,
)
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.lab import enter, lifecycle, topology, virtual
from hvdtrain.system import commands, hosts
from hvdtrain.system import environment as environment_variables
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots

# --- host lists ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [("a:2,b:2", [Slots("a", 2), Slots("b", 2)]), ("a,b.lan", [Slots("a"), Slots("b.lan")])]
)
def test_hosts_on_a_command_line(text: str, expected: list[Slots]) -> None:
    assert hosts.parse_hosts(text) == expected


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a,,b", "-oProxyCommand=x:1", "a b", "a:1,a:2", "a;b"])
def test_invalid_hosts_are_rejected(text: str) -> None:
    with failing(2):
        hosts.parse_hosts(text)


def test_both_notations_of_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbf# the lab\r\na slots=2\r\n\r\nb:4 # fast\nc\nd  slots = 3 max_slots=8\n")
    assert hosts.read_hostfile(file) == [Slots("a", 2), Slots("b", 4), Slots("c"), Slots("d", 3)]


def test_hostfiles_are_counted_as_mpirun_does(tmp_path: Path) -> None:
    """A line per slot, as PBS and LSF write them, users, and both orders of slots and max_slots."""
    file, own = tmp_path / "hosts", commands.calling_user()
    for text, slots in {
        "HOST\nHOST\nHOST\n": 3,
        "HOST slots=2\nHOST\n": 3,
        "HOST max-slots=4\n": 4,
        "HOST max_slots=4 slots=2\n": 2,
        f"{own}@HOST\n{own}@HOST\n": 2,
    }.items():
        file.write_text(text.replace("HOST", "localhost"))
        assert hosts.read_hostfile(file) == [Slots("localhost", slots)], text
        done = finished(["mpirun", "--hostfile", file, "hostname"])
        assert done.returncode == 0 and len(done.stdout.split()) == slots, text
    file.write_text("b\na\nb\n")
    assert hosts.read_hostfile(file) == [Slots("b", 2), Slots("a")]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a\nb slots=two\n", ":2:"),
        ("$(reboot)\n", ":1:"),
        ("a slots=1\na slots=1\n", "twice"),
        ("a slots=1 slots=1\n", ":1:"),
        (f"a slots={'9' * 5000}\n", ":1:"),
        ("\x1b]0;x\x07\n", r"\x1b]0;x\x07"),
        *((f"a{end}b\n", ":1:") for end in ("\r", "\v", "\f", "\x85", "\u2028")),
    ],
)
def test_errors_in_hostfiles_name_the_line(tmp_path: Path, text: str, where: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text, newline="")
    with failing(65, re.escape(str(file))) as failure:
        hosts.read_hostfile(file)
    assert where in str(failure.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n[1-3,7],login", ["n1", "n2", "n3", "n7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]c[0-1].lan", ["r1c0.lan", "r1c1.lan", "r2c0.lan", "r2c1.lan"]),
        ("a,b", ["a", "b"]),
    ],
)
def test_slurm_node_lists(text: str, expected: list[str]) -> None:
    assert hosts.expand_nodelist(text) == expected


@given(st.lists(st.integers(0, 120), min_size=1, max_size=20, unique=True))
def test_node_lists_expand(numbers: list[int]) -> None:
    assert hosts.expand_nodelist(f"n[{','.join(map(str, numbers))}]") == [f"n{n}" for n in numbers]


ENDLESS = ["n[0-99999999999]", "n[1-300]m[1-300]", "n[1-65537]", f"n[{'9' * 5000}]", "n[0-999999999999999999]"]


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n]", "n[1]]", "$(x)", *ENDLESS])
def test_invalid_node_lists_are_rejected(text: str) -> None:
    with pytest.raises(Failure):
        hosts.expand_nodelist(text)


def test_hosts_of_a_slurm_allocation() -> None:
    allocation = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert hosts.from_slurm(allocation) == [Slots("n1", 2), Slots("n2", 2), Slots("n3", 1)]
    assert hosts.from_slurm({}) is None
    with pytest.raises(Failure, match="3 hosts"):
        hosts.from_slurm({**allocation, "SLURM_TASKS_PER_NODE": "2"})
    with failing(78, "SLURM_HET_SIZE='2'"):
        hosts.from_slurm({**allocation, "SLURM_HET_SIZE": "2"})


# --- topology and commands, without root -----------------------------------------------------------------------------


def test_topology_files(tmp_path: Path) -> None:
    file = tmp_path / "adsl.toml"
    file.write_text('slots = 1\nrate = "100mbit"\n[hosts.a]\n[hosts.b]\nslots = 3\nup = "5mbit"\ncpu_share = 1\n')
    cluster = topology.from_toml(file, cluster="x", user="root")
    assert cluster.hosts == (
        topology.Host(name="a", slots=1, up="100mbit", down="100mbit"),
        topology.Host(name="b", slots=3, up="5mbit", down="100mbit", cpu_share=1),
    )
    assert topology.from_json(json.loads(json.dumps(dataclasses.asdict(cluster)))) == cluster


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hosts = 3",
        "[hosts.a]\nslots = '2'",
        "slots = true\n[hosts.a]",
        f"[hosts.a]\ncpus = '0-{'9' * 5000}'",
        "[hosts.a]\ncpus = '٣'",
    ],
)
def test_errors_in_topology_files_name_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with failing(78, re.escape(str(file))):
        topology.from_toml(file, cluster=None, user="root")


def test_up_without_root_changes_nothing() -> None:
    done = finished(
        [*WITHOUT_RIGHTS, sys.executable, "-B", "-m", "hvdtrain.lab", "up", "--name", "tnoroot", "--hosts", "a"]
    )
    assert done.returncode == 77
    assert done.stderr == "hvdtrain: making a virtual cluster needs root; hint: run it with sudo\n"
    assert not virtual.folder("tnoroot").exists()


VARIABLES = """CONDA_PREFIX GLOO_SOCKET_IFNAME KERAS_BACKEND NVIDIA_VISIBLE_DEVICES OPAL_PREFIX OPENBLAS_NUM_THREADS
PYTHONFAULTHANDLER TF_CPP_MIN_LOG_LEVEL XDG_CACHE_HOME XLA_FLAGS"""
"""Some of the variables that launchers and `cluster exec` pass on"""


def test_the_environment_on_a_host_is_an_allow_list(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.geteuid())
    asked = {
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HVDTRAIN_EPOCHS": "2",
        "LC_ALL": "C",
        "OMPI_COMM_WORLD_RANK": "1",
    }
    passed = dict.fromkeys(VARIABLES.split(), "x")
    secret = dict.fromkeys(("TF_API_KEY", "HVDTRAIN_TOKEN", "TORCH_HUB_TOKEN", "OMPI_MCA_PASS"), "x")
    kept = enter.environment({**asked, **passed, **secret, "VIRTUAL_ENV": str(tmp_path)}, user)
    assert kept["HVDTRAIN_EPOCHS"] == "2" and kept["LC_ALL"] == "C" and kept["HOME"] == user.pw_dir
    assert not {"AWS_SECRET_ACCESS_KEY", "OMPI_COMM_WORLD_RANK", *secret} & kept.keys()
    assert passed.items() <= kept.items()
    for patterns in (environment_variables.FOR_RANKS, environment_variables.FOR_LAUNCHERS):
        assert {name for name in (*passed, *secret) if environment_variables.passes(name, patterns)} == passed.keys()
    assert "AWS_SECRET_ACCESS_KEY" in enter.environment(asked, user, ["AWS_SECRET_ACCESS_KEY"])


def cgroup_v2(top: Path, patch: pytest.MonkeyPatch, **files: str) -> None:
    """Stands in for the kernel's files in a machine's top control group, or in a container's (with `type`)."""
    for name, text in {"controllers": "cpu memory", "subtree_control": "memory", "procs": "", **files}.items():
        (top / f"cgroup.{name}").write_text(text)
    patch.setattr(virtual, "CGROUPS", top)
    patch.setattr(virtual, "CONTROL", top / "cgroup.subtree_control")


@pytest.mark.parametrize(
    ("files", "refused"),
    [
        ({"procs": "1\n"}, False),  # only the kernel's own top group may hold processes and share
        ({"procs": "", "type": "domain"}, False),
        ({"procs": "1\n", "type": "domain"}, True),
        ({"procs": "1\n", "type": "domain", "subtree_control": "cpu"}, False),
        ({"controllers": "memory", "type": "domain"}, True),
    ],
)
def test_cpu_shares_that_a_container_cannot_give_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], refused: bool
) -> None:
    cgroup_v2(tmp_path, monkeypatch, **files)
    if refused:
        with failing(69, "hint: omit --cpu-share"):
            lifecycle._check_cgroup()
    else:
        lifecycle._check_cgroup()


@pytest.mark.parametrize("ours", [True, False])
def test_the_top_control_group_is_changed_back_if_a_cluster_changed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    cgroup_v2(tmp_path, monkeypatch)
    monkeypatch.setattr(virtual, "SHARED", tmp_path / "shared")
    if ours:
        virtual.SHARED.touch()
    lifecycle._stop_sharing()
    assert (virtual.CONTROL.read_text(), virtual.SHARED.exists()) == ("-cpu" if ours else "memory", False)


def test_commands_wait_for_a_down_that_removes_the_lock_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    monkeypatch.setattr(lifecycle, "STATE", state)
    monkeypatch.setattr(lifecycle, "SELF", state / "self")

    def downs() -> None:
        for _ in range(500):
            with lifecycle._alone():
                (state / "inside").touch(exist_ok=False)  # raises if another command is inside
                (state / "inside").unlink()
                (state / ".lock").unlink()
                with contextlib.suppress(OSError):  # a waiting command has made its lock by now
                    state.rmdir()

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(downs) for _ in range(4)]:
            done.result()


# --- real hosts ------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_hosts_have_names_addresses_and_ssh_without_a_prompt(cluster: Cluster) -> None:
    done = cluster.on("a", "ssh", "b", "hostname; getent hosts a b; ls /sys/class/net; cat /run/hvdtrain/self/sshd.pid")
    assert done.returncode == 0, done.stderr
    name, a, b, *devices, pid = done.stdout.splitlines()
    assert name == "b"
    assert (a.split(), b.split()) == (["10.77.0.1", "a"], ["10.77.0.2", "b"])
    assert devices == ["eth0", "lo"]
    assert Path(f"/proc/{pid}/comm").read_text() == "sshd\n"


@pytest.mark.root
def test_exec_keeps_streams_exit_code_folder_and_signals(cluster: Cluster) -> None:
    echo = subprocess.run(
        cluster.command("exec", "b", "--", "sh", "-c", "cat; echo err >&2; pwd; exit 7"),
        cwd=ROOT / "tests",
        env=environment(),
        input="typed\n",
        capture_output=True,
        text=True,
    )
    assert (echo.returncode, echo.stdout, echo.stderr) == (7, f"typed\n{ROOT / 'tests'}\n", "err\n")
    sleeper = subprocess.Popen(cluster.command("exec", "b", "--", "sleep", "60"), env=environment())
    until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n")
    sleeper.terminate()  # exec replaces the started process by the command
    assert sleeper.wait(LIMIT_S) == -signal.SIGTERM


@pytest.mark.root
@pytest.mark.slow
def test_horovodrun_trains_on_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    if shutil.which("horovodrun", path=environment()["PATH"]) is None:
        pytest.skip("no horovodrun in this environment: run `make setup`")
    train = ["python", "-m", "hvdtrain.resnet", *SMALL, "--epochs", "1", "--json", "--run-dir", str(tmp_path / "run")]
    summary = document(cluster.on("a", "horovodrun", "-np", "3", "-H", "a:1,b:2", *train))
    assert (summary["ranks"], summary["hosts"]) == (3, 2)
    ranks = json.loads((tmp_path / "run" / "manifest.json").read_text())["ranks"]
    assert [(rank["host"], rank["local_rank"]) for rank in ranks] == [("a", 0), ("b", 0), ("b", 1)]
    assert cluster_processes(cluster.name) == {"sshd"}


@pytest.mark.root
def test_hosts_are_limited_to_their_share_and_cores() -> None:
    """The control groups also limit processes that ssh starts."""
    lab = Cluster(unique())
    program = "import os; from hvdtrain.system import cgroup; print(cgroup.limit().cores, *os.sched_getaffinity(0))"
    python = shlex.join([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"])
    try:
        done = lab.run("up", "--hosts", "a", "--cpu-share", "0.25", "--cpus", "0")
        assert done.returncode == 0, done.stderr
        for words in (["sh", "-c", python], ["ssh", "a", python]):
            assert lab.on("a", *words).stdout.split() == ["0.25", "0"]
    finally:
        assert lab.run("down").returncode == 0
    assert not virtual.cgroup(lab.name).exists()


@pytest.mark.root
def test_the_kernel_has_the_rates_of_a_topology_file() -> None:
    lab = Cluster(unique())
    try:
        done = lab.run("up", "--topology", "hostfiles/adsl.toml")
        assert done.returncode == 0, done.stderr
        listed = json.loads(lab.run("status", "--json").stdout)["hosts"]
        rates = {host["host"]: (host["rates_set"]["up_mbit"], host["rates_set"]["down_mbit"]) for host in listed}
        assert rates == {"desk1": (1000, 1000), "desk2": (1000, 1000), "laptop": (1, 16)}
        assert [host["rates_asked"] for host in listed] == [host["rates_set"] for host in listed]
        assert [(host["slots"], host["cpu_share"]) for host in listed] == [(2, None), (2, None), (1, 0.5)]
    finally:
        assert lab.run("down").returncode == 0


@pytest.mark.root
def test_two_clusters_coexist_and_leave_nothing() -> None:
    first, second = Cluster(unique()), Cluster(unique())
    try:
        for lab in (first, second):
            assert lab.run("up", "--hosts", "a,b").returncode == 0
        unnamed = finished([ROOT / "tools" / "cluster.sh", "exec", "a", "--", "true"])
        assert (unnamed.returncode, "choose one with --name" in unnamed.stderr) == (2, True)
        assert first.run("down").returncode == 0
        assert second.on("a", "ssh", "b", "hostname").stdout == "b\n"
        assert footprint(first.name) == set()
    finally:
        for lab in (first, second):
            assert lab.run("down").returncode == 0
            assert lab.run("down").returncode == 0  # down is idempotent
    assert footprint(first.name) | footprint(second.name) == set()


@pytest.mark.root
def test_down_cleans_up_after_a_killed_command() -> None:
    """`up` or `down` is killed at a random moment, with or without its children. The next `down` leaves nothing."""
    draw = random.Random(1)
    for attempt in range(9):
        lab = Cluster(unique())
        words = lab.command("up", "--hosts", "a,b", "--cpu-share", "0.5")
        if attempt % 3 == 2:
            assert subprocess.run(words, env=environment(), stderr=subprocess.DEVNULL).returncode == 0
            words = lab.command("down")
        process = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(draw.uniform(0.05, 0.8))
        os.killpg(process.pid, signal.SIGKILL) if attempt % 3 else process.kill()
        process.wait()
        done = lab.run("down")
        assert done.returncode == 0, done.stderr
        assert footprint(lab.name) == set()


@pytest.mark.root
def test_down_ends_stopped_processes_and_those_that_ignore_signals() -> None:
    lab = Cluster(unique())
    assert lab.run("up", "--hosts", "a", "--cpu-share", "0.5").returncode == 0
    deaf = "trap '' TERM; echo ready; sleep 60; sleep 60"
    commands = [["sh", "-c", deaf], ["sh", "-c", "echo ready; sleep 60"], ["unshare", "--net", "sh", "-c", deaf]]
    sleepers = [
        subprocess.Popen(lab.command("exec", "a", "--", *words), env=environment(), stdout=subprocess.PIPE)
        for words in commands
    ]
    try:
        for sleeper in sleepers:
            assert sleeper.stdout and sleeper.stdout.readline() == b"ready\n"
        sleepers[1].send_signal(signal.SIGSTOP)
    finally:
        assert lab.run("down").returncode == 0
    for sleeper in sleepers:
        assert sleeper.wait(LIMIT_S) < 0
        sleeper.stdout.close()  # type: ignore[union-attr]
    assert footprint(lab.name) == set()


@pytest.mark.root
def test_down_names_a_process_that_it_cannot_end() -> None:
    freezer = virtual.CGROUPS / "freezer"
    if not freezer.is_dir():
        pytest.skip("no cgroup v1 freezer here: nothing else keeps a process from SIGKILL")
    lab, frozen = Cluster(unique()), freezer / f"hvdtrain-test-{unique()}"
    assert lab.run("up", "--hosts", "a").returncode == 0
    sleeper = subprocess.Popen(lab.command("exec", "a", "--", "sleep", "60"), env=environment())
    frozen.mkdir()
    try:
        until(lambda: Path(f"/proc/{sleeper.pid}/comm").read_text() == "sleep\n")
        (frozen / "cgroup.procs").write_text(str(sleeper.pid))
        (frozen / "freezer.state").write_text("FROZEN")
        until(lambda: (frozen / "freezer.state").read_text() == "FROZEN\n")
        done = lab.run("down")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert f"{sleeper.pid} (sleep)" in done.stderr
    finally:
        (frozen / "freezer.state").write_text("THAWED")
        assert lab.run("down").returncode == 0
        assert sleeper.wait(LIMIT_S) < 0
        frozen.rmdir()
    assert footprint(lab.name) == set()


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """No test may change the user's files."""
    watched = [Path("/etc/hosts"), Path("/etc/ssh/ssh_config"), Path.home() / ".ssh"]
    before = [path.stat().st_mtime_ns if path.exists() else None for path in watched]
    yield
    assert [path.stat().st_mtime_ns if path.exists() else None for path in watched] == before


def cluster_processes(name: str) -> set[str]:
    pids = [pid for netns in lifecycle.namespaces(name) for pid in lifecycle.processes(netns)]
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}


def footprint(name: str) -> set[str]:
    """Mounts, namespaces, control groups and files with the cluster's name."""
    spaces = Path("/run/netns").glob("hvd-*") if Path("/run/netns").is_dir() else ()
    paths = [*spaces, *virtual.cgroup("").glob("*"), *virtual.STATE.rglob("*")]
    listed = {*lifecycle.mounts(), *map(str, paths)}
    return {path for path in listed if re.search(rf"\b{name}\b", path)}
