"""The rules of the sentinel, with a simulated clock, and its view of processes, interfaces and links."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import WITHOUT_RIGHTS, until

from hvdtrain.launch.stalls import ENDS_AFTER, PROGRESS, WAIT
from hvdtrain.sentinel import auth, goodput, interfaces
from hvdtrain.sentinel.auth import Party
from hvdtrain.sentinel.processes import launchers
from hvdtrain.sentinel.watch import ASLEEP_S, PURPOSE, REFUSED_S, SILENCE_S, STOPPED_S, RankReport, Watch
from hvdtrain.system import link_probe

KEY = b"s" * 32


class Sentinels:
    """The sentinels of some hosts in this process, each with one sleeping rank, and a simulated clock."""

    def __init__(self, hosts: int, stall_limit_s: float = 0.0) -> None:
        self.now = 1000.0
        self.sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(hosts)]
        self.ranks = [udp() for _ in range(hosts)]
        self.words = [udp() for _ in range(hosts)]
        self.doors = [udp() for _ in range(hosts)]
        for door in self.words + self.doors:
            door.setblocking(False)
            door.setsockopt(socket.IPPROTO_IP, 11, 1)  # IP_RECVERR
        about = [
            {"name": f"host{i}", "ranks": [i], "address": "127.0.0.1", "udp": self.doors[i].getsockname()[1]}
            for i in range(hosts)
        ]
        self.watches = [
            Watch(
                {
                    "job_key": KEY.hex(),
                    "stall_limit_s": stall_limit_s,
                    "host": i,
                    "hosts": about,
                    "ranks": [{"rank": i, "pid": sleeper.pid, "port": self.ranks[i].getsockname()[1]}],
                },
                self.words[i],
                self.doors[i],
                self.now,
            )
            for i, sleeper in enumerate(self.sleepers)
        ]
        for rank, words in zip(self.ranks, self.words, strict=True):
            rank.connect(words.getsockname())

    def turn(self, seconds: float, *, without: tuple[int, ...] = (), step_s: float = 1.0) -> None:
        """Let time pass in steps. The sentinels in `without` do not run."""
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            for i, watch in enumerate(self.watches):
                if i not in without:
                    watch.round(self.now)

    def stop(self, *which: int) -> None:
        """Stop ranks, and wait until they have stopped."""
        for sleeper in (self.sleepers[i] for i in which):
            os.kill(sleeper.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)

    def left(self, *alive: bool) -> bool:
        """Whether exactly these ranks still run once the others have ended."""
        time.sleep(0.05)  # in case one was killed by mistake
        until(
            lambda: all(left or sleeper.poll() is not None for left, sleeper in zip(alive, self.sleepers, strict=True))
        )
        return [sleeper.poll() is None for sleeper in self.sleepers] == [*alive]


def udp() -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 0))
    return bound


@pytest.fixture
def sentinels() -> Iterator[Callable[..., Sentinels]]:
    created: list[Sentinels] = []

    def make(hosts: int, stall_limit_s: float = 0.0) -> Sentinels:
        created.append(Sentinels(hosts, stall_limit_s))
        return created[-1]

    yield make
    for each in created:
        for sleeper in each.sleepers:
            sleeper.kill()
            sleeper.wait()
        for door in each.ranks + each.words + each.doors:
            door.close()


def test_a_silent_host_ends_the_ranks_of_the_other_hosts(
    sentinels: Callable[[int], Sentinels], capfd: pytest.CaptureFixture[str]
) -> None:
    job = sentinels(3)
    job.turn(5)
    job.turn(SILENCE_S - 3, without=(1,))
    job.turn(5)
    assert job.left(True, True, True), "a short interruption is not a fault"
    job.turn(SILENCE_S + 8, without=(1,))
    assert job.left(False, True, False)
    message = capfd.readouterr().err
    assert message.count("hvdtrain: ") == 1, "printed once per job"
    assert f"host host1 (rank 1): silent for {SILENCE_S:g} s" in message
    assert "no checkpoint was written yet" in message


def test_a_host_that_was_never_heard_is_a_warning(
    sentinels: Callable[[int], Sentinels], capfd: pytest.CaptureFixture[str]
) -> None:
    job = sentinels(2)
    job.turn(3 * SILENCE_S, without=(1,))
    assert job.left(True, True)
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    assert "a failure of host1 or its link will not be noticed" in message


def test_a_dead_sentinel_on_a_living_host_is_a_warning(
    sentinels: Callable[[int], Sentinels], capfd: pytest.CaptureFixture[str]
) -> None:
    job = sentinels(2)
    job.turn(3)
    job.doors[1].close()
    job.turn(SILENCE_S + REFUSED_S + 10, without=(1,))
    assert job.left(True, True)
    assert "its sentinel is gone" in capfd.readouterr().err


def test_a_machine_that_slept_does_not_blame_the_others(sentinels: Callable[[int], Sentinels]) -> None:
    job = sentinels(2)
    job.turn(3)
    job.turn(1, without=(1,), step_s=SILENCE_S + ASLEEP_S)
    job.turn(SILENCE_S - 2, without=(1,))
    assert job.left(True, True)


def test_a_stopped_rank_is_a_fault_unless_the_whole_job_is_stopped(
    sentinels: Callable[[int], Sentinels], capfd: pytest.CaptureFixture[str]
) -> None:
    job = sentinels(2)
    job.stop(0, 1)
    job.turn(2 * STOPPED_S)
    assert job.left(True, True), "the user suspended the job"
    for sleeper in job.sleepers:  # resumed host by host
        os.kill(sleeper.pid, signal.SIGCONT)
        os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
        job.turn(3)
    assert job.left(True, True)
    job.stop(1)
    job.turn(STOPPED_S - 2)
    assert job.left(True, True)
    job.turn(8)
    assert job.left(False, False)
    assert "hvdtrain: rank 1 on host1: stopped (SIGSTOP)" in capfd.readouterr().err


@pytest.mark.parametrize("moves", [False, True])
def test_a_stall_ends_the_job_unless_bytes_move(
    moves: bool, sentinels: Callable[..., Sentinels], capfd: pytest.CaptureFixture[str]
) -> None:
    limit_s = 60.0
    job = sentinels(3, limit_s)
    for waited in range(10, int(ENDS_AFTER * limit_s) + 40, 10):
        job.turn(10)
        for rank in (0, 2):
            job.ranks[rank].send(WAIT + str(waited).encode())
        if moves:
            job.ranks[1].send(PROGRESS)
        if waited < ENDS_AFTER * limit_s - 10:
            assert all(sleeper.poll() is None for sleeper in job.sleepers)
    assert job.left(moves, moves, moves)
    message = capfd.readouterr().err.splitlines()
    assert [line[:24] for line in message] == ([] if moves else ["hvdtrain: rank 1 on host"] * 2), message
    if not moves:
        assert "host1: other ranks have waited 60 s for it; its stack cannot be shown" in message[0]
        assert "no rank has made progress (HVDTRAIN_STALL_LIMIT=60 x 5; 0: no limit); ending the job" in message[1]


@pytest.mark.parametrize("seconds", [700, 0])
def test_a_suspended_job_has_not_stalled(seconds: int, sentinels: Callable[..., Sentinels]) -> None:
    """Its ranks report that they waited all that time. With 0, the machine was suspended instead of the ranks."""
    job = sentinels(2, 60.0)
    job.turn(5)
    if seconds:
        job.stop(0, 1)
        job.turn(seconds)
        for sleeper in job.sleepers:
            os.kill(sleeper.pid, signal.SIGCONT)
            os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED)
    else:
        job.now += 700
    job.ranks[0].send(WAIT + b"700")
    job.turn(20)
    assert job.left(True, True)


@pytest.mark.parametrize(
    ("word", "fault", "message"),
    [
        (None, True, "rank 1 on host1 died unexpectedly"),
        (RankReport.FAILED, True, ""),
        (RankReport.FINISHED, False, ""),
        (signal.SIGTERM, False, ""),
        (signal.SIGCHLD, True, "rank 1 on host1 died unexpectedly"),
    ],
)
def test_a_rank_that_ends_without_a_report_or_signal_is_a_fault(
    word: int | None,
    fault: bool,
    message: str,
    sentinels: Callable[[int], Sentinels],
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = sentinels(2)
    job.turn(2)
    if word is not None:
        job.ranks[1].send(bytes([word]))
    job.sleepers[1].kill()
    job.sleepers[1].wait()
    job.turn(6)
    assert job.left(not fault, False)
    output = capfd.readouterr().err
    assert message in output
    assert output.count("hvdtrain: ") == bool(message)


def test_messages_of_strangers_are_ignored(sentinels: Callable[[int], Sentinels]) -> None:
    job = sentinels(2)
    fault = {"kind": "lost", "text": "made up"}
    message = {"number": 10**9, "host": 1, "idle": False, "finished": False, "fault": fault}
    stranger = udp()
    for secret in (b"other", b""):
        stranger.sendto(auth.sign(secret, PURPOSE, json.dumps(message).encode()), job.doors[0].getsockname())
    forged = auth.sign(KEY, b"another purpose", json.dumps(message).encode())
    for text in (forged, json.dumps(message).encode(), b"\xff{", b"[" * 4096, b"", b"\0" * 65000):
        stranger.sendto(text, job.doors[0].getsockname())
        stranger.sendto(text, job.words[0].getsockname())
    stranger.close()
    job.turn(8)
    assert job.left(True, True)


def test_replayed_heartbeats_are_ignored(sentinels: Callable[[int], Sentinels]) -> None:
    """Replayed heartbeats must not hide that a host is gone."""
    job = sentinels(2)
    heard: list[bytes] = []
    real = job.doors[0]

    class Tap:
        def recvfrom(self, size: int) -> tuple[bytes, tuple[str, int]]:
            data, sender = real.recvfrom(size)
            heard.append(data)
            return data, sender

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    job.watches[0]._heartbeats = Tap()
    job.turn(3)
    again = udp()
    for _ in range(int(SILENCE_S) + 8):
        again.sendto(heard[0], real.getsockname())
        again.sendto(heard[-1], real.getsockname())
        job.turn(1, without=(1,))
    again.close()
    assert job.left(False, True)


def test_launchers_do_not_include_the_users_shell(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\nsh -c "sleep 60 & echo \\$!; wait"\n')
    fake.chmod(0o755)
    user = subprocess.Popen(
        ["bash", "-c", f'sh -c "{fake} -np 1; true"; true'], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert user.stdout is not None
        chain = launchers(int(user.stdout.readline()))
        user.stdout.close()
        names = [process.name for process in chain]
        assert user.pid not in [process.pid for process in chain]
        assert names[0] == "sh"
        assert len(names) in (2, 3), names  # the shell in between, mpirun, and the shell that only wraps it
        assert not any(process.gone() for process in chain)
    finally:
        os.killpg(user.pid, signal.SIGKILL)
        user.wait()
    until(lambda: all(process.gone() for process in chain))


@pytest.mark.root
def test_a_launcher_that_proc_hides_is_not_watched() -> None:
    """With hidepid, for example, root's slurmstepd is invisible to the rank that it started."""
    program = "import os; from hvdtrain.sentinel.processes import launchers; print(launchers(os.getpid()))"
    as_nobody = " ".join(WITHOUT_RIGHTS)
    script = f'mount -t proc -o hidepid=2 proc /proc && {as_nobody} "$0" -c "$1"; exit $?'  # the shell stays its parent
    words = ["unshare", "-m", "sh", "-c", script, sys.executable, program]
    done = subprocess.run(words, capture_output=True, text=True)
    if "Permission denied" in done.stderr or "No module" in done.stderr:
        pytest.skip("the checkout is not readable for everybody")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(
    ("local", "remote", "preferred", "expected"),
    [
        ({"eth0": "10.0.0.1/24"}, {"eth0": "10.0.0.2/24"}, [], ("eth0", "10.0.0.1", "10.0.0.2")),
        (
            {"docker0": "172.17.0.1/16", "eth1": "10.0.0.1/24"},
            {"docker0": "172.17.0.1/16", "eth1": "10.0.0.2/24"},
            [],
            ("eth1", "10.0.0.1", "10.0.0.2"),
        ),
        (
            {"eth0": "192.168.1.1/24", "ib0": "10.0.0.1/24"},
            {"eth0": "192.168.1.2/24", "ib0": "10.0.0.2/24"},
            ["ib0"],
            ("ib0", "10.0.0.1", "10.0.0.2"),
        ),
        (
            {"eth0": "192.168.1.1/24", "ib0": "10.0.0.1/24"},
            {"eth0": "192.168.1.2/24", "ib0": "10.0.0.2/24"},
            ["10.0.0.0/24"],
            ("ib0", "10.0.0.1", "10.0.0.2"),
        ),
        ({"eth0": "10.0.0.1/24"}, {}, [], None),
    ],
)
def test_routes_use_a_common_network(
    local: dict[str, str], remote: dict[str, str], preferred: list[str], expected: tuple[str, str, str] | None
) -> None:
    assert interfaces.route(local, remote, "no-such-host.invalid", preferred) == expected


def test_goodput_receivers_reject_strangers() -> None:
    receiver = goodput.Receiver("127.0.0.1")
    receiver.open(Party(KEY, goodput.PURPOSE, 1), 0)
    silent = [socket.create_connection(("127.0.0.1", receiver.port)) for _ in range(5)]
    for secret, number, to in ((b"public", 0, 1), (KEY, 2, 1), (KEY, 0, 2)):
        with pytest.raises(OSError):
            goodput.measure("127.0.0.1", receiver.port, Party(secret, goodput.PURPOSE, number), to, "127.0.0.1")
    for _ in range(2):  # a run may measure again
        assert goodput.measure("127.0.0.1", receiver.port, Party(KEY, goodput.PURPOSE, 0), 1, "127.0.0.1") > 0
    for stranger in silent:
        stranger.close()
    points = [(0.1 * i, 1000 * i) for i in range(10)]
    points[4:6] = [(0.4, 3000), (0.5, 3000)]  # a packet is lost, sent again, and all behind it arrives at once
    assert link_probe.slope(points) == pytest.approx(10_000)
