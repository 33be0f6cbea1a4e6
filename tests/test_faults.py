"""A rank dies or is stopped, a launcher or ssh session dies, a link is cut: the job ends, says why, leaves nothing.

Real ranks, hosts and links; the rules of the watch are in test_sentinel.py.
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
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, SMALL, Cluster, command, document, environment, until

from hvdtrain import records
from hvdtrain.sentinel.processes import Process, launchers
from hvdtrain.sentinel.watch import SILENCE_S
from hvdtrain.strategies.advice import WORTH

WAITING = str(PROGRAMS / "waiting.py")
KILLED_S = 5.0
CUT_S = 30.0
SLACK_S = 5.0
"""For a busy machine: the deadlines are the issue's, of an idle one"""


class Job:
    """Ranks of waiting.py in the background, and what is left of them."""

    def __init__(self, start: list[str], folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [*start, str(folder)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def ranks(self, count: int) -> list[int]:
        """The process numbers of the ranks, once all are waiting for each other."""
        files = [self.folder / f"rank{rank}" for rank in range(count)]
        until(lambda: all(file.exists() for file in files) or self.process.poll() is not None, 90)
        assert self.process.poll() is None, self.output()
        return [int(file.read_text()) for file in files]

    def launcher(self, rank: int) -> int:
        """The process that a user would kill: the topmost that starts ranks."""
        return launchers(rank)[-1].pid

    def end(self, deadline_s: float) -> int:
        """Waits until the command has ended and none of the ranks, sentinels and daemons is left; its exit code."""
        until = time.monotonic() + deadline_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline_s)
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        assert self.process.poll() is not None, f"still running after {deadline_s} s: {self.output()}"
        assert not self.left()
        return self.process.returncode

    def left(self) -> list[str]:
        """Processes that belong to this job: all have its folder on the command line or in the environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                if str(self.folder).encode() in text:
                    found.append(f"{path.name} {(path / 'cmdline').read_bytes().decode()}")
        return found

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

    def begin(launcher: str, on: Cluster | None = None) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        if on is None:
            words = command(2, [WAITING], launcher)
        else:
            many = ["-np", "4", "-H", "a:2,b:2"]
            if launcher == "mpirun":
                many += ["-x", "PATH", "-x", "OPAL_PREFIX", "--bind-to", "none", "--mca", "btl_tcp_if_include", "eth0"]
                many += ["--mca", "oob_tcp_if_include", "eth0"]
            words = on.command("exec", "a", "--", *launcher.split(), *many, sys.executable, WAITING)
        jobs.append(Job(words, folder))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def sent_by_the_sentinel(output: str) -> list[str]:
    return re.findall(r"hvdtrain: .*; ending the job, .*", output)


def test_a_stopped_rank_ends_the_job_under_every_launcher(start: Callable[..., Job]) -> None:
    jobs = [start("mpirun"), start("horovodrun --gloo")]
    for job in jobs:
        os.kill(job.ranks(2)[1], signal.SIGSTOP)
    for job, code in zip(jobs, (137, 1), strict=True):  # mpirun ends with its killed rank's code
        assert job.end(CUT_S + SLACK_S) == code
        (said,) = sent_by_the_sentinel(job.output())
        assert f"rank 1 on {socket.gethostname()}: stopped" in said


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun --gloo"])
def test_ranks_whose_launcher_was_killed_end_too(launcher: str, start: Callable[..., Job]) -> None:
    job = start(launcher)
    os.kill(job.launcher(job.ranks(2)[0]), signal.SIGKILL)
    assert job.end(KILLED_S + SLACK_S) != 0


@pytest.mark.root
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "horovodrun --gloo"])
def test_a_killed_rank_ends_the_job_on_all_hosts(launcher: str, cluster: Cluster, start: Callable[..., Job]) -> None:
    job = start(launcher, cluster)
    os.kill(job.ranks(4)[3], signal.SIGKILL)
    # Our own launch scripts make 1 of Open MPI's 128 + 9.
    assert job.end(KILLED_S + SLACK_S) == (1 if "gloo" in launcher else 137)
    (said,) = sent_by_the_sentinel(job.output())
    assert "rank 3 on b died without a word" in said


@pytest.mark.root
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_a_killed_ssh_session_ends_the_job_on_all_hosts(
    launcher: str, cluster: Cluster, start: Callable[..., Job]
) -> None:
    job = start(launcher, cluster)
    above = job.ranks(4)[3]
    while not Process(above).name.startswith("sshd"):
        above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
        assert above > 1
    os.kill(above, signal.SIGKILL)
    assert job.end(KILLED_S + SLACK_S) in (1, 255)


@pytest.mark.root
def test_a_cut_link_ends_the_job_on_both_sides(cluster: Cluster, start: Callable[..., Job]) -> None:
    jobs = [start("mpirun", cluster), start("horovodrun --gloo", cluster)]
    for job in jobs:
        job.ranks(4)
    time.sleep(2)  # two heartbeats: a host is watched once it has been heard
    try:
        link(cluster, "down")
        began = time.monotonic()
        for job in jobs:
            assert job.end(CUT_S + SLACK_S - (time.monotonic() - began)) == 1
            (said,) = sent_by_the_sentinel(job.output())
            assert f"host b (ranks 2, 3): nothing heard for {SILENCE_S:g} s" in said
    finally:
        link(cluster, "up")


@pytest.mark.root
def test_a_flap_and_a_long_slow_transfer_raise_no_alarm(cluster: Cluster, tmp_path: Path) -> None:
    """While the wire is full for longer than the silence that would be a fault."""
    throttle(cluster, "10mbit")

    def flap() -> None:
        until(lambda: (tmp_path / "rank1").exists(), 60)
        time.sleep(1)
        link(cluster, "down")
        time.sleep(5)
        link(cluster, "up")

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        words = ["horovodrun", "--gloo", "--gloo-timeout-seconds", "120", "-np", "2", "-H", "a:1,b:1"]
        done = cluster.on("a", *words, sys.executable, WAITING, str(tmp_path), "22")
        report = document(done)
        assert report["right"]
        assert report["seconds"] > SILENCE_S + 5
        assert "hvdtrain: " not in done.stderr
    finally:
        flapping.join()
        throttle(cluster, "clear")


@pytest.mark.root
@pytest.mark.alone
def test_the_records_tell_throttle_goodput_and_bytes_of_each_host(cluster: Cluster, tmp_path: Path) -> None:
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
        assert 70 < entry["goodput_mbit"] < 100
        assert entry["reason"] is None
    shares = summary["step_shares"]
    assert shares["data"] + shares["compute"] + shares["exchange"] == pytest.approx(1)
    assert 0 < shares["exchange_least"] <= shares["exchange"]
    assert ("of a step was waiting for other hosts: try --strategy" in done.stderr) == (shares["exchange"] > WORTH)
    assert [(entry["host"], entry["nic"]) for entry in summary["nic_bytes"]] == [("a", "eth0"), ("b", "eth0")]
    for entry in summary["nic_bytes"]:
        assert summary["bytes_sent"] < entry["sent_bytes"] < 1.5 * summary["bytes_sent"]
        assert summary["bytes_sent"] < entry["received_bytes"] < 1.5 * summary["bytes_sent"]


@pytest.mark.root
def test_the_last_checkpoint_outlives_a_killed_rank_and_the_advice_names_it(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*SMALL, "--epochs", "40", "--checkpoint-steps", "3", "--run-dir", str(folder)]
    many = ["launch/mpirun.sh", "-H", "a:1,b:1"]
    words = cluster.command("exec", "a", "--", *many, sys.executable, "-m", "hvdtrain.resnet", *flags)
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=-1, stderr=-2, text=True
    ) as run:
        until(lambda: len(list((folder / "checkpoints").glob("step-*"))) > 1 or run.poll() is not None, 60)
        marked = [p for p in Path("/proc").glob("[0-9]*") if is_rank(p, folder)]
        os.kill(int(marked[-1].name), signal.SIGKILL)
        output, _ = run.communicate(timeout=30)
    assert run.returncode == 1, output
    assert f"--resume {folder}" in output
    newest = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))
    short = [*flags, "--resume", "--json"]
    short[short.index("--epochs") + 1] = str(newest // 15 + 1)
    summary = document(cluster.on("a", *many, sys.executable, "-m", "hvdtrain.resnet", *short))
    steps = [r.step for r in records.read(folder / "metrics" / "rank0000.jsonl") if r.type == "resumed"]
    assert steps == [newest]
    assert summary["steps"] > newest


def is_rank(path: Path, folder: Path) -> bool:
    try:
        words = (path / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return words[1:3] == ["-m", "hvdtrain.resnet"] and str(folder) in words


def link(cluster: Cluster, state: str) -> None:
    """Pulls the cable of host b out of the switch, or puts it back."""
    switch = f"hvd-{cluster.name}"
    subprocess.run(["ip", "-n", switch, "link", "set", "p2", state], check=True)


def throttle(cluster: Cluster, what: str) -> None:
    words = [str(ROOT / "tools" / "throttle.sh"), what, "--name", cluster.name]
    subprocess.run(words, check=True, env=environment(), capture_output=True)
