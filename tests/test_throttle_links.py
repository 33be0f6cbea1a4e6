"""The throttle on real links, in network namespaces of the tests. All tests need root."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Cluster, environment, finished, unique, until

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle import qdisc

pytestmark = pytest.mark.root
THROTTLE = str(ROOT / "tools" / "throttle.sh")
# Each machine has its own /run (the folder $0), so it sees no virtual cluster. A mount on /run/hvdtrain would not last:
# `cluster.sh down` in another test removes that folder, which detaches mounts on it.
OWN_STATE = 'mount --bind "$0" /run && exec "$@"'


def sh(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


class Machine:
    """A namespace that stands for a physical machine. Its interface v0 leads to a peer."""

    def __init__(self, folder: Path) -> None:
        self.netns, self.run, self.state = unique(), folder, folder / "hvdtrain" / "self"
        self.peer = f"{self.netns}p"

    def make(self) -> None:
        for netns in (self.netns, self.peer):
            sh("ip", "netns", "add", netns)
        sh("ip", "link", "add", "v0", "netns", self.netns, "type", "veth", "peer", "name", "v0", "netns", self.peer)
        for number, netns in enumerate((self.netns, self.peer), 1):
            sh("ip", "-n", netns, "address", "add", f"10.78.0.{number}/24", "dev", "v0")
            sh("ip", "-n", netns, "link", "set", "v0", "up")
        until(lambda: "NO-CARRIER" not in sh("ip", "-n", self.netns, "link", "show", "v0"))

    def remove(self) -> None:
        for netns in (self.netns, self.peer):
            sh("ip", "netns", "del", netns, check=False)

    def command(self, *words: str) -> list[str]:
        enter = ["ip", "netns", "exec", self.netns, "unshare", "--mount", "sh", "-c", OWN_STATE, str(self.run)]
        return [*enter, *words]

    def throttle(self, *arguments: str, extra: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return finished(self.command(THROTTLE, *arguments), extra=extra)

    def tc(self, *words: str) -> str:
        return sh("tc", "-n", self.netns, *words)

    def rates(self) -> tuple[int | None, int | None]:
        """Rates set for sending and for receiving on v0, in bit/s."""
        ifbs = [
            entry["ifname"]
            for entry in json.loads(sh("ip", "-n", self.netns, "-json", "link", "show"))
            if entry["ifname"].startswith("hvdifb")
        ]
        down = qdisc.rate_of(qdisc.read(self.netns, ifbs[0])) if ifbs else None
        return qdisc.rate_of(qdisc.read(self.netns, "v0")), down

    def queues(self) -> str:
        """`tc -j` without HTB's counter."""
        return re.sub(r'"direct_packets_stat":\d+,', "", self.tc("-json", "qdisc", "show", "dev", "v0"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    created = Machine(tmp_path)
    try:
        created.make()
        yield created
    finally:
        created.remove()


# --- set and restore -------------------------------------------------------------------------------------------------


def test_clear_restores_the_kernels_own_queue_byte_for_byte(machine: Machine) -> None:
    original, links = machine.queues(), sh("ip", "-n", machine.netns, "link", "show")
    for arguments in (["10mbit"], ["--up", "5mbit", "--down", "20mbit"], ["7mbit", "--down", "none"], ["9mbit"]):
        done = machine.throttle(*arguments, "--dev", "v0")
        assert done.returncode == 0, done.stderr
    assert machine.rates() == (9_000_000, 9_000_000)
    about = json.loads((machine.state / "throttle.json").read_text())
    assert (about["dev"], about["up_mbit"], about["down_mbit"]) == ("v0", 9.0, 9.0)
    assert (machine.state / "throttle.json").stat().st_mode & 0o777 == 0o644
    assert machine.throttle("clear", "--dev", "v0").returncode == 0
    assert machine.queues() == original
    assert sh("ip", "-n", machine.netns, "link", "show") == links
    assert not list(machine.state.glob("*"))
    again = machine.throttle("clear")
    assert (again.returncode, again.stderr) == (0, "throttle: nothing was throttled\n")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            ["qdisc add dev v0 root handle 5: htb default 1", "class add dev v0 parent 5: classid 5:1 htb rate 10mbit"],
            "its own queue (htb 5:",
        ),
        (["qdisc add dev v0 root handle 5: pfifo limit 77"], "sudo tc qdisc del dev v0 root"),
        (["qdisc add dev v0 ingress"], "sudo tc qdisc del dev v0 ingress"),
    ],
)
def test_an_interface_with_a_configured_queue_is_refused(machine: Machine, before: list[str], reason: str) -> None:
    for words in before:
        machine.tc(*words.split())
    original = machine.queues()
    done = machine.throttle("10mbit", "--dev", "v0")
    assert done.returncode == 1 and reason in done.stderr and done.stderr.count("\n") == 1
    assert machine.queues() == original and machine.rates() == (None, None)
    assert not list(machine.state.glob("*"))


def test_a_queue_that_another_program_has_set_since_is_reported_and_stays(machine: Machine) -> None:
    machine.throttle("10mbit", "--dev", "v0")
    machine.tc("qdisc", "replace", "dev", "v0", "root", "handle", "9:", "pfifo", "limit", "9")
    done = machine.throttle("clear")
    assert done.returncode == 1 and "another program" in done.stderr
    assert '"kind":"pfifo","handle":"9:"' in machine.queues()


def test_a_dry_run_prints_the_commands_of_a_run_and_changes_nothing(machine: Machine) -> None:
    original = machine.queues()
    dry = machine.throttle("10mbit", "--dev", "v0", "--dry-run")
    assert dry.returncode == 0 and machine.queues() == original and not list(machine.state.glob("*"))
    for line in dry.stdout.splitlines():
        if not line.startswith("#"):
            sh("ip", "netns", "exec", machine.netns, *line.split())
    assert machine.rates() == (10_000_000, 10_000_000)


def test_mistakes_change_nothing(machine: Machine) -> None:
    original = machine.queues()
    for arguments, code, reason in [
        (["10mbit", "--dev", "v7"], 2, "choose one of: lo, v0"),
        (["clear", "--dev", "v7"], 2, "choose one of: lo, v0"),
        (["0mbit", "--dev", "v0"], 2, "give 8kbit to 1tbit"),
        (["verify", "--dev", "v0"], 2, "--peer HOST"),
    ]:
        done = machine.throttle(*arguments)
        assert done.returncode == code and reason in done.stderr and done.stderr.count("\n") == 1, done.stderr
    weak = machine.command("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", THROTTLE)
    done = finished([*weak, "10mbit", "--dev", "v0"])
    assert done.returncode == 77 and done.stderr.count("\n") == 1, done.stderr
    assert machine.queues() == original and not list(machine.state.glob("*"))


# --- protection of the user's own connection -------------------------------------------------------------------------


@pytest.mark.parametrize(("carries", "bridged"), [("the default route", True), ("the ssh session", False)])
def test_an_interface_that_the_user_needs_is_throttled_only_with_force_and_for_a_time(
    machine: Machine, carries: str, bridged: bool
) -> None:
    """Also if it is a port of the bridge that has the address, and if the route has several hops."""
    extra = {"SSH_CONNECTION": "10.78.0.2 50000 10.78.0.1 22"} if "ssh" in carries else {}
    ip, ways = ["ip", "-n", machine.netns], ["via", "10.78.0.2"]
    if bridged:
        sh(*ip, "link", "add", "br0", "type", "bridge")
        sh(*ip, "link", "set", "v0", "master", "br0")
        sh(*ip, "link", "set", "br0", "up")
        sh(*ip, "address", "del", "10.78.0.1/24", "dev", "v0")
        sh(*ip, "address", "add", "10.78.0.1/24", "dev", "br0")
        ways = ["nexthop", *ways, "nexthop", "via", "10.78.0.3"]
    if not extra:
        sh(*ip, "route", "add", "default", *ways)
    original = machine.queues()
    refused = machine.throttle("10mbit", "--dev", "v0", extra=extra)
    assert refused.returncode == 1 and carries in refused.stderr and "--force" in refused.stderr
    assert machine.queues() == original
    forced = machine.throttle("10mbit", "--dev", "v0", "--force", extra=extra)
    assert forced.returncode == 0 and "ends in 600 s" in forced.stderr
    assert machine.throttle("10mbit", "--dev", "v0", "--force", "--for", "2s", extra=extra).returncode == 0
    until(lambda: machine.queues() == original)
    until(lambda: not list(machine.state.glob("*")))


def test_an_interface_below_a_vpn_is_throttled_only_with_force(machine: Machine) -> None:
    """The default route is a tunnel's, and v0 has the route to the tunnel's other end."""
    ip = ["ip", "-n", machine.netns]
    sh(*ip, "tuntap", "add", "dev", "tun0", "mode", "tun")
    sh(*ip, "link", "set", "tun0", "up")
    sh(*ip, "route", "add", "default", "dev", "tun0")
    assert machine.throttle("10mbit", "--dev", "v0", "--dry-run").returncode == 0, "an interface of the lab"
    sh(*ip, "route", "add", "192.0.2.1", "via", "10.78.0.2")
    refused = machine.throttle("10mbit", "--dev", "v0", "--dry-run")
    assert refused.returncode == 1 and "--force" in refused.stderr


def test_an_ssh_session_that_sudo_hides_is_found(machine: Machine) -> None:
    """sudo removes the variable for its child. The shell that called sudo still has it."""
    words = ["sh", "-c", 'env -u SSH_CONNECTION "$@"; exit $?', "sh", THROTTLE, "10mbit", "--dev", "v0"]
    done = finished(machine.command(*words), extra={"SSH_CONNECTION": "10.78.0.2 50000 10.78.0.1 22"})
    assert done.returncode == 1 and "the ssh session" in done.stderr


# --- atomic changes --------------------------------------------------------------------------------------------------


def wait_for_lock(folder: Path) -> None:
    """Wait until the watchdog has released the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)


def rates_of(cluster: Cluster) -> set[int | None]:
    links = virtual.links(virtual.load(cluster.name))
    return {qdisc.rate_of(qdisc.read(link.netns, link.dev)) for link in links}


def requested_of(cluster: Cluster) -> set[float | None]:
    files = [virtual.folder(cluster.name) / "hosts" / host / "throttle.json" for host in ("a", "b")]
    return {json.loads(file.read_text())["up_mbit"] if file.exists() else None for file in files}


def on_cluster(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finished([THROTTLE, *arguments, "--name", cluster.name], cwd="/")


def test_a_killed_command_changes_all_links_or_none(cluster: Cluster) -> None:
    """Killed at random moments of setting, changing and clearing: all links and files are old, or all are new."""
    folder, chance = virtual.folder(cluster.name), random.Random(1)
    start = time.monotonic()
    assert on_cluster(cluster, "30mbit").returncode == 0
    whole_s = time.monotonic() - start
    for number in range(12):
        (before,) = rates_of(cluster)
        target = None if number % 3 == 2 else (10 + number) * 10**6
        words = ["clear"] if target is None else [f"{10 + number}mbit"]
        process = subprocess.Popen(
            [THROTTLE, *words, "--name", cluster.name], env=environment(), stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.3, 1.1) * whole_s)
        process.kill()
        process.wait()
        wait_for_lock(folder)
        (after,) = rates_of(cluster)
        assert after in {before, target}
        assert requested_of(cluster) == {after / 1e6 if after else None}
    assert on_cluster(cluster, "clear").returncode == 0
    assert rates_of(cluster) == {None} and requested_of(cluster) == {None}


def test_a_killed_command_changes_both_directions_of_an_interface_or_none(machine: Machine) -> None:
    """Also for received packets: the ifb device, its queue and its filter exist together or not at all."""
    original, links, chance = machine.queues(), sh("ip", "-n", machine.netns, "link", "show"), random.Random(2)
    start = time.monotonic()
    assert machine.throttle("30mbit", "--dev", "v0").returncode == 0
    whole_s = time.monotonic() - start
    for number in range(6):
        before = machine.rates()
        target = (None, None) if number % 2 else ((10 + number) * 10**6,) * 2
        words = ["clear"] if number % 2 else [f"{10 + number}mbit"]
        process = subprocess.Popen(
            machine.command(THROTTLE, *words, "--dev", "v0"), env=environment(), stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.4, 1.1) * whole_s)
        process.kill()
        process.wait()
        wait_for_lock(machine.state)
        assert machine.rates() in {before, target}
        if machine.rates() == (None, None):
            assert machine.queues() == original and sh("ip", "-n", machine.netns, "link", "show") == links
    assert machine.throttle("clear").returncode == 0
    assert machine.queues() == original and not list(machine.state.glob("*"))


@pytest.fixture
def slow_tc(tmp_path: Path) -> dict[str, str]:
    """A tc that waits a second before its third change, and makes it long after its caller was killed."""
    real = sh("sh", "-c", "PATH=$PATH:/usr/sbin:/sbin command -v tc").strip()
    shim = tmp_path / "tc"
    shim.write_text(
        f'#!/bin/sh\ncase "$*" in *replace*) echo >>{tmp_path}/calls\n'
        f'[ $(wc -l <{tmp_path}/calls) = 3 ] && touch {tmp_path}/waiting && sleep 1;; esac\nexec {real} "$@"\n'
    )
    shim.chmod(0o755)
    return environment({"PATH": f"{tmp_path}:{environment()['PATH']}"})


@pytest.mark.parametrize("also", ["", "watchdog"])
def test_killed_in_the_middle_of_a_change(cluster: Cluster, slow_tc: dict[str, str], tmp_path: Path, also: str) -> None:
    """Two of four links are changed. The watchdog restores them; if it is killed too, the next command does."""
    assert on_cluster(cluster, "30mbit").returncode == 0
    command = [THROTTLE, "10mbit", "--name", cluster.name]
    process = subprocess.Popen(command, env=slow_tc, stderr=subprocess.DEVNULL)
    until((tmp_path / "waiting").exists)
    assert rates_of(cluster) == {10_000_000, 30_000_000}
    if also:
        for pid in [path.name for path in Path("/proc").glob("[0-9]*")]:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if cluster.name.encode() in words and b"10mbit" in words and int(pid) != process.pid:
                    os.kill(int(pid), signal.SIGKILL)
    process.kill()
    process.wait()
    until(lambda: not tmp_path.joinpath("waiting").exists() or sh("pgrep", "-f", f"{tmp_path}/tc", check=False) == "")
    wait_for_lock(virtual.folder(cluster.name))
    if also:
        assert len(rates_of(cluster)) == 2
    else:
        assert rates_of(cluster) == {30_000_000} and requested_of(cluster) == {30.0}
    assert on_cluster(cluster, "clear").returncode == 0
    assert rates_of(cluster) == {None} and requested_of(cluster) == {None}


def test_a_failure_in_the_middle_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    assert on_cluster(cluster, "30mbit").returncode == 0
    shim = tmp_path / "tc"
    real = sh("sh", "-c", "PATH=$PATH:/usr/sbin:/sbin command -v tc").strip()
    shim.write_text(
        f'#!/bin/sh\ncase "$*" in *replace*p2*10000000bit*) echo Boom >&2; exit 2;; esac\nexec {real} "$@"\n'
    )
    shim.chmod(0o755)
    done = finished([THROTTLE, "10mbit", "--name", cluster.name], extra={"PATH": f"{tmp_path}:{environment()['PATH']}"})
    assert done.returncode == 1 and "Boom" in done.stderr and done.stderr.count("\n") == 1
    assert rates_of(cluster) == {30_000_000} and requested_of(cluster) == {30.0}
    assert on_cluster(cluster, "clear").returncode == 0


@pytest.mark.slow
def test_nothing_passes_unlimited_while_a_rate_changes(cluster: Cluster) -> None:
    """The rate changes repeatedly during an ssh stream, and no more data arrives than the rates allow."""
    assert on_cluster(cluster, "10mbit").returncode == 0
    count = ["cat", "/sys/class/net/eth0/statistics/rx_bytes"]
    words = cluster.command("exec", "a", "--", "ssh", "b", "cat >/dev/null")
    with Path("/dev/zero").open() as zeros:
        sender = subprocess.Popen(words, env=environment(), stdin=zeros)
    before = int(cluster.on("b", *count).stdout)
    until(lambda: int(cluster.on("b", *count).stdout) > before + 500_000)  # the stream fills the link
    start, bytes_before = time.monotonic(), int(cluster.on("b", *count).stdout)
    for number in range(6):
        assert on_cluster(cluster, f"{10 + number % 2}mbit").returncode == 0
    bytes_after, took_s = int(cluster.on("b", *count).stdout), time.monotonic() - start
    sender.kill()
    sender.wait()
    most = 11e6 / 8 * took_s + 6 * 2 * 3028
    assert 0 < bytes_after - bytes_before <= most * 1.02
    assert on_cluster(cluster, "clear").returncode == 0
