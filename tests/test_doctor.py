"""The doctor, with real failures between virtual hosts and on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_S, ROOT, Cluster, environment, finished, until
from test_doctor_rules import OPEN_MPI_5

from hvdtrain.doctor import checks, link_checks

DOCTOR = ("-m", "hvdtrain.doctor", "--json")


def wheel() -> dict[str, str]:
    """The variables that activate sets for Open MPI's wheel, if this environment uses it."""
    daemon = Path(sys.prefix, "bin", "orted")
    return {"OPAL_PREFIX": sys.prefix, checks.LAUNCH_AGENT: str(daemon)} if daemon.exists() else {}


class Findings:
    """One run of the doctor."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.stdout.count("\n") == 1, done.stdout + done.stderr
        self.code, self.document = done.returncode, json.loads(done.stdout)
        assert self.document["schema"] == "hvdtrain/doctor/1"
        assert "Traceback" not in done.stderr
        assert self.code == (0 if self.document["counts"]["fail"] == 0 else 1)

    def all(self, status: str) -> list[tuple[str, str]]:
        return [(check["name"], check["where"]) for check in self.document["checks"] if check["status"] == status]

    def one(self, name: str, where: str | None = None) -> dict[str, Any]:
        checks = [c for c in self.document["checks"] if c["name"] == name and where in (None, c["where"])]
        assert len(checks) == 1, (name, where, self.document["checks"])
        return checks[0]


def alone(*flags: str, extra: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Findings:
    """The doctor on this machine, without hosts."""
    variables = environment({**wheel(), "PYTHONPATH": str(ROOT), **(extra or {})})
    done = subprocess.run(
        [sys.executable, *DOCTOR, *flags], env=variables, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S
    )
    return Findings(done)


def between(cluster: Cluster, *flags: str) -> Findings:
    """The doctor on host a, by default for hosts a and b."""
    hosts = () if "-H" in flags else ("-H", "a:1,b:1")
    settings = [f"{name}={value}" for name, value in wheel().items()]
    return Findings(cluster.on("a", "env", *settings, "python", *DOCTOR, *hosts, *flags))


def must(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- between hosts ---------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.slow
def test_a_healthy_cluster_with_one_link_that_is_slow_one_way(cluster: Cluster) -> None:
    slow = ["rate", "10mbit", "burst", "16kb", "latency", "200ms"]
    must(cluster.on("a", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow))
    try:
        findings = between(cluster)
    finally:
        must(cluster.on("a", "tc", "qdisc", "del", "dev", "eth0", "root"))
    assert (findings.code, findings.all("fail")) == (0, [])
    assert {name for name, _ in findings.all("ok")} >= {
        *("packages", "horovod", "mpi", "ssh", "versions", "code", "clock", "own-name", "nic", "disk", "slots", "ports")
    }
    assert findings.one("nic", "b")["facts"]["used"] == "eth0"
    assert findings.one("ssh")["facts"]["login_s"] > 0
    speed = findings.one("speed")
    there, back, *trips_ms = (
        speed["facts"][name] for name in ("there_mbit", "back_mbit", "round_trip_ms", "slow_round_trip_ms")
    )
    assert speed == dataclasses.asdict(link_checks.judge_speed("a", "b", there, back, (trips_ms[0], trips_ms[1]), 2))
    assert speed["facts"]["allreduce_s"] == pytest.approx(85.13 * 8 / there)
    assert "85 MB" in speed["what"]


@pytest.mark.root
def test_no_process_of_the_doctor_remains_on_the_hosts_even_if_it_is_killed(cluster: Cluster) -> None:
    def processes() -> list[int]:
        listing = cluster.run("status", "--json")
        must(listing)
        return [host["processes"] for host in json.loads(listing.stdout)["hosts"]]

    between(cluster, "--quick")
    until(lambda: processes() == [1, 1])  # the hosts' own sshd, which needs a moment to notice that its client is gone
    words = cluster.command("exec", "a", "--", "python", "-m", "hvdtrain.doctor", "-H", "a:1,b:1", "--quick")
    with subprocess.Popen(words, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout and killed.stdout.readline()  # now it is connected
        killed.kill()
    until(lambda: processes() == [1, 1])


@pytest.mark.root
def test_open_mpis_wheel_without_its_settings(cluster: Cluster) -> None:
    forget = [word for name in wheel() for word in ("-u", name)]
    done = cluster.on("a", "env", *forget, "python", *DOCTOR, "-H", "a:1,b:1", "--quick")
    failed = Findings(done).all("fail")
    # mpirun would look for its daemon in ssh's PATH, which does not contain the wheel
    assert failed == ([("mpi-wheel", "a"), ("programs", "b")] if wheel() else [])


@pytest.mark.root
def test_unknown_names_and_addresses(cluster: Cluster) -> None:
    findings = between(cluster, "--quick", "-H", "a:1,nowhere:1,10.77.0.99:1")
    assert findings.all("fail") == [("ssh", "nowhere"), ("ssh", "10.77.0.99")]
    assert "name is unknown" in findings.one("ssh", "nowhere")["what"]
    assert "no route" in findings.one("ssh", "10.77.0.99")["what"]


@contextlib.contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """Change a file's content inside the block."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def state(cluster: Cluster) -> Path:
    return Path("/run/hvdtrain", cluster.name)


@pytest.mark.root
def test_a_host_key_that_changed_or_is_unknown(cluster: Cluster, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    other = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    with changed(state(cluster) / "ssh" / "known_hosts", f"a,b {other}\n"):
        findings = between(cluster, "--quick")
    assert findings.all("fail") == [("ssh", "b")]
    assert "key has changed" in findings.one("ssh")["what"] and "ssh-keygen -R b" in findings.one("ssh")["fix"]
    with changed(state(cluster) / "ssh" / "known_hosts", ""):
        assert "key is unknown" in between(cluster, "--quick").one("ssh")["what"]


@pytest.mark.root
def test_a_host_that_requires_a_password(cluster: Cluster) -> None:
    with changed(state(cluster) / "ssh" / "authorized_keys", ""):
        findings = between(cluster, "--quick")
    assert findings.all("fail") == [("ssh", "b")]
    assert "requires a password" in findings.one("ssh")["what"] and "ssh-copy-id b" in findings.one("ssh")["fix"]


@pytest.mark.root
def test_an_sshd_that_hangs_and_one_that_is_gone(cluster: Cluster) -> None:
    here = state(cluster) / "hosts" / "b"
    process = int((here / "sshd.pid").read_text())
    os.kill(process, signal.SIGSTOP)
    try:
        findings = between(cluster, "--quick")
    finally:
        os.kill(process, signal.SIGCONT)
    assert findings.all("fail") == [("ssh", "b")]
    assert "5 s" in findings.one("ssh")["what"]
    os.kill(process, signal.SIGTERM)
    try:
        findings = between(cluster, "--quick")
    finally:
        sshd = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin") or "sshd"
        must(cluster.on("b", sshd, "-f", str(here / "sshd_config")))
    assert findings.all("fail") == [("ssh", "b")]
    assert "ssh port" in findings.one("ssh")["what"] and "start sshd" in findings.one("ssh")["fix"]


@contextlib.contextmanager
def mounted(cluster: Cluster, host: str, over: Path, text: str, at: Path) -> Iterator[None]:
    """Give a file other content on one host inside the block."""
    at.write_text(text)
    must(cluster.on(host, "mount", "--bind", str(at), str(over)))
    try:
        yield
    finally:
        must(cluster.on(host, "umount", str(over)))


@pytest.mark.root
def test_a_name_that_resolves_to_loopback(cluster: Cluster, tmp_path: Path) -> None:
    trap = "127.0.0.1 localhost\n127.0.1.1 b\n10.77.0.1 a\n"
    with mounted(cluster, "b", Path("/etc/hosts"), trap, tmp_path / "hosts"):
        findings = between(cluster, "--quick")
    assert findings.all("fail") == [("own-name", "b")]
    assert "10.77.0.2 b" in findings.one("own-name", "b")["fix"]
    with mounted(cluster, "a", Path("/etc/hosts"), "127.0.0.1 localhost b\n10.77.0.1 a\n", tmp_path / "hosts"):
        findings = between(cluster, "--quick")
    assert ("ssh", "b") in findings.all("fail")
    assert "started on this machine" in findings.one("ssh", "b")["what"]


@pytest.mark.root
def test_hosts_with_names_and_interfaces_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    """What torchrun by hand hangs on, and hvdtrain's launchers do not."""
    assert not {"names", "nic-names"} & {name for name, _ in between(cluster, "--quick").all("warn")}
    namespace = ["ip", "-n", f"hvd-{cluster.name}-b", "link", "set"]

    def rename(old: str, new: str) -> None:
        for words in ([old, "down"], [old, "name", new], [new, "up"]):
            subprocess.run([*namespace, *words], check=True)

    table = "127.0.0.1 localhost\n10.77.0.2 vm2 b\n10.77.0.1 a\n"
    rename("eth0", "ens9")
    try:
        with mounted(cluster, "b", Path("/etc/hosts"), table, tmp_path / "hosts"):
            must(cluster.on("b", "hostname", "vm2"))
            findings = between(cluster, "--quick")
    finally:
        rename("ens9", "eth0")
        must(cluster.on("b", "hostname", "b"))
    assert findings.all("fail") == [] and findings.all("warn") == [("nic-names", "a, b"), ("names", "b")]
    assert findings.one("names")["facts"]["unknown"] == {"b": "vm2"}
    assert findings.one("nic-names")["facts"]["names"] == {"a": "eth0", "b": "ens9"}


@pytest.mark.root
def test_different_packages_and_different_code(cluster: Cluster, tmp_path: Path) -> None:
    metadata = next(Path(sys.prefix).glob("lib/python3*/site-packages/numpy-*.dist-info/METADATA"))
    module = ROOT / "hvdtrain" / "system" / "exits.py"
    with (
        mounted(cluster, "b", metadata, "Metadata-Version: 2.1\nName: numpy\nVersion: 1.9.9\n", tmp_path / "metadata"),
        mounted(cluster, "b", module, module.read_text() + "# changed\n", tmp_path / "module"),
    ):
        findings = between(cluster, "--quick")
    assert findings.all("fail") == [("versions", "b"), ("code", "b")]
    assert findings.one("versions")["facts"]["numpy"]["there"] == "1.9.9"
    assert "numpy 1.9.9 there" in findings.one("versions")["what"]


@pytest.mark.root
def test_a_clock_that_is_ahead_and_a_shell_that_prints(cluster: Cluster, tmp_path: Path) -> None:
    """Commands that ssh starts on b run under a login shell that prints, and with a clock that is 90 s ahead."""
    keys = state(cluster) / "ssh" / "authorized_keys"
    shifted = "import sys, time; now = time.time; time.time = lambda: now() + 90; import sys,"
    shell = tmp_path / "shell.py"
    shell.write_text(
        "import os\n"
        "print('Welcome to b', flush=True)\n"
        f"command = os.environ['SSH_ORIGINAL_COMMAND'].replace('import sys,', {shifted!r})\n"
        "os.execv('/bin/sh', ['sh', '-c', command])\n"
    )
    with changed(keys, f'command="{sys.executable} {shell}" {keys.read_text()}'):
        findings = between(cluster, "--quick")
    assert findings.code == 0
    assert findings.all("warn") == [("shell", "b"), ("clock", "b")]
    clock = findings.one("clock")["facts"]
    assert abs(clock["offset_s"] - 90) < clock["error_s"] + 0.001
    assert findings.one("shell")["facts"]["lines"] == ["Welcome to b"]


@pytest.mark.root
def test_a_firewall_between_the_hosts(cluster: Cluster) -> None:
    """b drops its answers from high ports, so a's connections time out."""
    rule = ["from", "all", "ipproto", "tcp", "sport", "1024-65534", "blackhole"]
    must(cluster.on("b", "ip", "rule", "add", *rule))
    try:
        findings = between(cluster, "--quick")
    finally:
        must(cluster.on("b", "ip", "rule", "del", *rule))
    assert ("ports", "a -> b") in findings.all("fail")
    blocked = findings.one("ports", "a -> b")
    assert "no answer" in blocked["what"] and "1024-65535" in blocked["fix"]


@pytest.mark.root
def test_two_networks_are_distinguished(cluster: Cluster) -> None:
    for host in "ab":
        must(cluster.on(host, "ip", "link", "add", "docker0", "type", "veth", "peer", "name", "other0"))
        must(cluster.on(host, "ip", "address", "add", "172.17.0.1/16", "dev", "docker0"))
        must(cluster.on(host, "ip", "link", "set", "docker0", "up"))
        must(cluster.on(host, "ip", "link", "set", "other0", "up"))
    mtu = int(cluster.on("b", "cat", "/sys/class/net/eth0/mtu").stdout)
    try:
        findings = between(cluster, "--quick")
        must(cluster.on("b", "ip", "link", "set", "eth0", "mtu", str(mtu - 100)))
        try:
            smaller = between(cluster, "--quick", "--nic", "eth0")
        finally:
            must(cluster.on("b", "ip", "link", "set", "eth0", "mtu", str(mtu)))
        pinned = between(cluster, "--quick", "--nic", "eth0")
        absent = between(cluster, "--quick", "--nic", "ib0")
    finally:
        for host in "ab":
            must(cluster.on(host, "ip", "link", "del", "docker0"))
    assert findings.all("warn") == [("nic", "a"), ("nic", "b"), ("same-address", "a, b")]
    assert findings.one("nic", "b")["facts"]["used"] == "eth0"
    assert (
        "docker0" in findings.one("nic", "b")["what"] and "btl_tcp_if_include eth0" in findings.one("nic", "b")["fix"]
    )
    assert (pinned.all("warn"), pinned.all("fail")) == ([], [])
    assert smaller.all("warn") == [("mtu", "a, b")]
    assert smaller.one("mtu")["facts"]["mtu_bytes"] == {"a": mtu, "b": mtu - 100}
    assert absent.all("fail") == [("nic", "a"), ("nic", "b")]


@pytest.mark.root
def test_more_slots_than_cores(cluster: Cluster) -> None:
    findings = between(cluster, "--quick", "-H", f"a:1,b:{(os.cpu_count() or 1) + 1}")
    assert (findings.code, findings.all("warn")) == (0, [("slots", "b")])


@pytest.mark.root
def test_slots_are_compared_with_a_cpu_quota(half_core: tuple[Path, list[str]]) -> None:
    """A virtual host with a share of the CPU, a container, a Slurm job"""
    done = finished([*half_core[1], sys.executable, "-m", "hvdtrain.doctor", "--quick", "--json", "-H", "localhost:2"])
    slots = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "slots")
    assert (slots["status"], slots["facts"]["cores"]) == ("warn", 0.5) and "use 1 " in slots["fix"]


# --- on this machine -------------------------------------------------------------------------------------------------


def first_in_path(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}{os.pathsep}{environment()['PATH']}"}


def test_horovodrun_cannot_start_open_mpi_5(tmp_path: Path) -> None:
    script(tmp_path / "mpirun", f"cat <<'END'\n{OPEN_MPI_5}\nEND")
    findings = alone("--quick", extra=first_in_path(tmp_path))
    assert findings.one("mpi")["status"] == "warn" and "launch/mpirun.sh" in findings.one("mpi")["fix"]
    assert "-bind-to none" in findings.one("mpi")["what"]


def test_an_mpirun_that_does_not_run(tmp_path: Path) -> None:
    script(tmp_path / "mpirun", "echo 'error while loading shared libraries: libopen-rte.so.40' >&2; exit 127")
    mpi = alone("--quick", extra=first_in_path(tmp_path)).one("mpi")
    assert mpi["status"] == "fail" and "libopen-rte.so.40" in mpi["what"]


def test_without_mpirun_and_ssh(tmp_path: Path) -> None:
    script(tmp_path / "python", f'exec {sys.executable} "$@"')
    findings = alone("--quick", extra={"PATH": str(tmp_path), "DB_PASS": "hush", "my_credentials": "hush"})
    assert findings.one("mpi")["status"] == "fail" and "no mpirun" in findings.one("mpi")["what"]
    assert findings.one("secrets")["facts"]["variables"] == ["DB_PASS", "my_credentials"]
    assert "hush" not in json.dumps(findings.document)
    assert findings.one("packages")["status"] == "ok"
    ssh = alone("--quick", "-H", "elsewhere:1", extra={"PATH": str(tmp_path)}).one("ssh")
    assert ssh["status"] == "fail" and "no ssh program" in ssh["what"]


def test_an_environment_without_horovod(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    findings = alone("--quick", extra=first_in_path(tmp_path / "bin"))
    assert findings.one("packages")["status"] == "fail" and "no Horovod" in findings.one("packages")["what"]


def test_a_horovod_that_does_not_load(tmp_path: Path) -> None:
    """As after an upgrade of the framework that Horovod was built against."""
    for name in ("torch", "tensorflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libc10.so: undefined symbol: _ZN3c10')\n")
    findings = alone(extra={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    failed = [check for check in findings.document["checks"] if check["status"] == "fail"]
    assert failed and {check["name"] for check in failed} == {"horovod"}
    assert all("undefined symbol" in check["what"] and "build it" in check["fix"] for check in failed)


@pytest.mark.root
@pytest.mark.parametrize(("size", "status"), [("100m", "fail"), ("1g", "warn")])
def test_a_disk_that_is_nearly_full(tmp_path: Path, size: str, status: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", tmp_path], check=True)
    try:
        disk = alone("--quick", "--run-dir", str(tmp_path / "results" / "new")).one("disk")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert (disk["status"], disk["facts"]["folder"]) == (status, str(tmp_path))
    assert disk["fix"]
