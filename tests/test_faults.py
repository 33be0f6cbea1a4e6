"""After the loss of a rank, launcher, ssh session or link, the job ends with a reason and leaves no processes behind.

These tests use real ranks, hosts and links; test_sentinel.py tests the rules of the watch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, SMALL, Cluster, command, document, environment, finished, until

from hvdtrain import records
from hvdtrain.launch.__main__ import SLEEPER
from hvdtrain.plan.advice import WAITING_THRESHOLD
from hvdtrain.sentinel.processes import Process, launchers
from hvdtrain.sentinel.watch import SILENCE_S

WAITING = str(PROGRAMS / "waiting.py")
STALLING = str(PROGRAMS / "stalling.py")


class Job:
    """Ranks of waiting.py in the background. They sleep while they wait."""

    def __init__(self, start: list[str], folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            start,
            cwd=ROOT,
            env=environment({"LD_PRELOAD": str(SLEEPER)}),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def ranks(self, count: int) -> list[int]:
        """The process numbers of the ranks, once all are waiting for each other."""
        files = [self.folder / f"rank{rank}" for rank in range(count)]
        until(lambda: all(file.exists() for file in files) or self.process.poll() is not None)
        assert self.process.poll() is None, self.output()
        return [int(file.read_text()) for file in files]

    def launcher(self, rank: int) -> int:
        """The topmost launcher, which a user would kill."""
        return launchers(rank)[-1].pid

    def end(self) -> int:
        """Wait until the command, its ranks, sentinels and daemons have ended. Returns the exit code."""
        until(lambda: self.process.poll() is not None and not self.left(), what=self.output)
        return self.process.returncode

    def left(self) -> list[str]:
        """The processes of this job: its folder is on their command line or in their environment."""
        result = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                if str(self.folder).encode() in text:
                    result.append(f"{path.name} {(path / 'cmdline').read_bytes().decode()}")
        return result

    def output(self) -> str:
        self._output.flush()
        return (self.folder / "output").read_text(errors="replace")

    def close(self) -> None:
        for line in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        self.process.wait()
        self._output.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(launcher: str, on: Cluster | None = None, *many: str, megabytes: int = 0) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        if on is None:
            words = command(2, [WAITING], launcher)
        else:
            where = [*(many or ("-np", "3", "-H", "a:1,b:2"))]
            if launcher == "mpirun":
                where += ["-x", "PATH", "-x", "OPAL_PREFIX", "-x", "LD_PRELOAD", "--bind-to", "none"]
                where += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
            words = on.command("exec", "a", "--", *launcher.split(), *where, sys.executable, WAITING)
        jobs.append(Job([*words, str(folder), str(megabytes)], folder))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


@pytest.mark.parametrize(
    ("launcher", "what", "reported", "ends"),
    [
        ("torchrun", "sleep", [1], "rank 1 on "),
        ("mpirun", "call", [1], "rank 1 on "),
        ("mpirun", "differ", [0, 1], "all ranks: "),
        ("mpirun", "compute", [1], ""),
        ("mpirun", "write", [1], ""),
    ],
)
@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_reported_with_its_stack_and_ends_the_job_unless_it_is_busy(
    launcher: str, what: str, reported: list[int], ends: str
) -> None:
    words = command(2, [STALLING, what, "1"], launcher)
    if launcher == "mpirun":
        words = ["launch/mpirun.sh", "-np", "2", sys.executable, STALLING, what, "1"]
    done = finished(words, extra={"HVDTRAIN_STALL_LIMIT": "1", "HVDTRAIN_STRATEGY": "hierarchical"})
    assert done.returncode == (1 if ends else 0), done.stderr
    assert ("done" in done.stdout) == (not ends)
    ranks = re.findall(r"hvdtrain: rank (\d) on .* have waited 1 s for .*; its stack:\n.*most recent call", done.stderr)
    assert sorted(map(int, ranks)) == reported, done.stderr
    assert f'"{STALLING}", line' in done.stderr, "where it is"
    reasons = set(fault_messages(done.stderr))  # the launcher repeats the reason at the end
    assert len(reasons) == bool(ends) and all(line.startswith(f"hvdtrain: {ends}") for line in reasons), done.stderr


@pytest.mark.root
@pytest.mark.slow
def test_a_long_transfer_is_not_a_stall(cluster: Cluster) -> None:
    """Rank 2 waits for the first rank of its host during the whole transfer, for more than five limits of a second."""
    throttle(cluster, "20mbit")
    try:
        done = cluster.on("a", "launch/mpirun.sh", "-H", "a:1,b:2", sys.executable, STALLING, "send", "1")
    finally:
        throttle(cluster, "clear")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "hvdtrain: " not in done.stderr


def fault_messages(output: str) -> list[str]:
    return re.findall(r"hvdtrain: .*; ending the job; .*", output)


@pytest.mark.slow
def test_stopped_ranks_and_killed_launchers_end_the_job(start: Callable[..., Job]) -> None:
    """The jobs with a killed launcher run while the deadline of the stopped ranks passes."""
    stopped = [start("mpirun"), start("horovodrun --gloo")]
    for job in stopped:
        os.kill(job.ranks(2)[1], signal.SIGSTOP)
    for launcher in ("mpirun", "horovodrun", "horovodrun --gloo"):
        job = start(launcher)
        os.kill(job.launcher(job.ranks(2)[0]), signal.SIGKILL)
        assert job.end() != 0, launcher
    for job, code in zip(stopped, (137, 1), strict=True):  # mpirun ends with its killed rank's code
        assert job.end() == code
        (message,) = fault_messages(job.output())
        assert f"rank 1 on {socket.gethostname()}: stopped" in message


@pytest.mark.root
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_a_killed_rank_ends_the_job_on_all_hosts(launcher: str, cluster: Cluster, start: Callable[..., Job]) -> None:
    job = start(launcher, cluster)
    os.kill(job.ranks(3)[2], signal.SIGKILL)
    # The launch scripts turn Open MPI's 128 + 9 into 1.
    assert job.end() == (1 if "gloo" in launcher else 137)
    (message,) = fault_messages(job.output())
    assert "rank 2 on b died unexpectedly" in message


@pytest.mark.root
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
@pytest.mark.slow
def test_a_killed_ssh_session_ends_the_job_on_all_hosts(
    launcher: str, cluster: Cluster, start: Callable[..., Job]
) -> None:
    job = start(launcher, cluster)
    above = job.ranks(3)[2]
    while not Process(above).name.startswith("sshd"):
        above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
        assert above > 1
    os.kill(above, signal.SIGKILL)
    assert job.end() in (1, 255)


@pytest.mark.root
@pytest.mark.slow
def test_a_cut_link_ends_jobs_but_an_interruption_and_a_slow_transfer_do_not(
    cluster: Cluster, start: Callable[..., Job]
) -> None:
    """The link is saturated for longer than a silent host may be silent, and interrupted for a while."""
    throttle(cluster, "10mbit")
    megabytes = 22
    assert megabytes * 8 / 10 > SILENCE_S
    try:
        gloo = "horovodrun --gloo --gloo-timeout-seconds 600"
        slow = start(gloo, cluster, "-np", "2", "-H", "a:1,b:1", megabytes=megabytes)
        slow.ranks(2)
        link(cluster, "down")
        sent = datagrams(cluster, "OutDatagrams")
        until(lambda: all(now - then >= 2 for now, then in zip(datagrams(cluster, "OutDatagrams"), sent, strict=True)))
        link(cluster, "up")
        fast = start("mpirun", cluster)
        until(lambda: (slow.folder / "summed").exists() or slow.process.poll() is not None, what=slow.output)
    finally:
        throttle(cluster, "clear")
    assert (slow.folder / "summed").read_text() == "right", slow.output()
    assert "hvdtrain: " not in slow.output()
    fast.ranks(3)
    before = datagrams(cluster, "InDatagrams")
    # Each host receives one heartbeat per second and job. After ten, each sentinel has heard its peer.
    until(lambda: all(now - then >= 10 for now, then in zip(datagrams(cluster, "InDatagrams"), before, strict=True)))
    try:
        link(cluster, "down")
        for job, ranks in ((slow, "rank 1"), (fast, "ranks 1, 2")):
            assert job.end() == 1
            (message,) = fault_messages(job.output())
            assert f"host b ({ranks}): silent for {SILENCE_S:g} s" in message
    finally:
        link(cluster, "up")


def datagrams(cluster: Cluster, way: str) -> list[int]:
    """The number of UDP datagrams that each host has sent or received. Only sentinels send any."""
    result = []
    for host in "ab":
        words = ["ip", "netns", "exec", f"hvd-{cluster.name}-{host}", "cat", "/proc/net/snmp"]
        names, values = (
            line.split()
            for line in subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
            if line.startswith("Udp:")
        )
        result.append(int(values[names.index(way)]))
    return result


@pytest.mark.root
@pytest.mark.slow
def test_records_have_the_throttle_goodput_and_bytes_of_each_host(cluster: Cluster, tmp_path: Path) -> None:
    throttle(cluster, "100mbit")
    folder = tmp_path / "run"
    train = [*SMALL, "--epochs", "1", "--json", "--run-dir", str(folder)]
    try:
        many = ["launch/mpirun.sh", "-H", "a:1,b:1"]
        done = cluster.on("a", *many, sys.executable, "-m", "hvdtrain.resnet", *train)
    finally:
        throttle(cluster, "clear")
    summary = document(done)
    manifest = records.from_json(json.loads((folder / "manifest.json").read_text()), "manifest.json")
    assert [(entry["host"], entry["nic"], entry["goodput_to"]) for entry in manifest.links] == [
        ("a", "eth0", "b"),
        ("b", "eth0", "a"),
    ]
    for entry in manifest.links:
        assert (entry["throttle"]["up_mbit"], entry["throttle"]["down_mbit"]) == (100, 100)
        assert 0 < entry["goodput_mbit"] < 100
        assert entry["reason"] is None
    shares = summary["step_shares"]
    assert shares["data"] + shares["compute"] + shares["exchange"] == pytest.approx(1)
    assert 0 < shares["exchange_least"] <= shares["exchange"]
    assert "waiting for other hosts: try --" not in done.stderr or shares["exchange"] > WAITING_THRESHOLD
    assert [(entry["host"], entry["nic"]) for entry in summary["nic_bytes"]] == [("a", "eth0"), ("b", "eth0")]
    for entry in summary["nic_bytes"]:
        assert summary["bytes_sent"] < entry["sent_bytes"] < 1.5 * summary["bytes_sent"]
        assert summary["bytes_sent"] < entry["received_bytes"] < 1.5 * summary["bytes_sent"]


def is_rank(path: Path, folder: Path) -> bool:
    try:
        words = (path / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return words[1:3] == ["-m", "hvdtrain.resnet"] and str(folder) in words


def link(cluster: Cluster, state: str) -> None:
    """Set the link of host b up or down."""
    switch = f"hvd-{cluster.name}"
    subprocess.run(["ip", "-n", switch, "link", "set", "p2", state], check=True)


def throttle(cluster: Cluster, what: str) -> None:
    words = [str(ROOT / "tools" / "throttle.sh"), what, "--name", cluster.name]
    subprocess.run(words, check=True, env=environment(), capture_output=True)
