"""Virtual clusters of normal users on a shared machine, with real accounts, sudo and sshd."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT, environment, unique

pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which("sudo") is None, reason="needs sudo")]
PYTHON = "/usr/bin/python3"  # this environment may be in root's home


class User:
    """An account. Its home contains the checkout's code."""

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.home = name, home

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command as this user, in a login's environment plus `variables`. Other users cannot read its files."""
        plain = {"HOME": str(self.home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **variables}
        return subprocess.run(
            ["setpriv", f"--reuid={self.name}", f"--regid={self.name}", "--init-groups", "--", *words],
            cwd=cwd or self.home / "hvdtrain", env=plain, umask=0o077, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip

    def cluster(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`hvdtrain cluster WORDS`."""
        return self.run(PYTHON, "-m", "hvdtrain.cli", "cluster", *words, **variables)


def account(folder: Path) -> User:
    """A new account that may call sudo without a password."""
    name = f"hvd{secrets.token_hex(4)}"
    home = folder / name
    subprocess.run(["useradd", "--home-dir", home, "--shell", "/bin/sh", name], check=True)
    for part in ("hvdtrain", "tools"):
        shutil.copytree(ROOT / part, home / "hvdtrain" / part, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chown", "-R", f"{name}:", home], check=True)
    allowed = Path("/etc/sudoers.d", name)
    allowed.write_text(f"{name} ALL=(ALL) NOPASSWD: ALL\n")
    allowed.chmod(0o440)
    return User(name, home)


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[User, User]]:
    """Alice and Bob. Their accounts and files are removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-users-"))
    folder.chmod(0o755)
    made: list[User] = []
    try:
        made += [account(folder), account(folder)]
        yield made[0], made[1]
    finally:
        for user in made:
            Path("/etc/sudoers.d", user.name).unlink(missing_ok=True)
            subprocess.run(["userdel", user.name], check=True, capture_output=True)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def lab(users: tuple[User, User]) -> Iterator[str]:
    """The name of Alice's cluster with hosts a and b."""
    alice, _ = users
    name = unique()
    done = alice.run("sudo", "-n", "tools/cluster.sh", "up", "--name", name, "--hosts", "a,b")
    assert done.returncode == 0, done.stderr
    try:
        yield name
    finally:
        assert alice.run("sudo", "-n", "tools/cluster.sh", "down", "--name", name).returncode == 0


def test_cluster_exec_runs_as_the_user(users: tuple[User, User], lab: str) -> None:
    """The command goes through sudo and back to the user. It keeps the variables that --env names."""
    alice, _ = users
    script = "hostname; id -un; id -G; pwd; echo $HOME $MINE $OTHER $LD_LIBRARY_PATH $TMPDIR; ssh b id -un"
    mine = {"MINE": "1", "OTHER": "2", "LD_LIBRARY_PATH": "/my/lib", "TMPDIR": "/my/tmp"}
    done = alice.cluster("exec", "--env", "MINE", "a", "--", "sh", "-c", script, **mine)
    groups = alice.run("id", "-G").stdout.strip()
    kept = f"{alice.home} 1 /my/lib /my/tmp"
    assert done.stdout.splitlines() == ["a", alice.name, groups, str(alice.home / "hvdtrain"), kept, alice.name], done


@pytest.mark.parametrize("account", ["root", "bob"])
def test_a_clusters_sshd_admits_only_its_user(users: tuple[User, User], lab: str, account: str) -> None:
    alice, bob = users
    name = {"root": "root", "bob": bob.name}[account]
    done = alice.cluster("exec", "a", "--", "ssh", "-o", "BatchMode=yes", f"{name}@b", "id")
    assert (done.returncode, done.stdout) == (255, "")
    assert "Permission denied" in done.stderr
    key = f"/run/hvdtrain/{lab}/ssh/key"
    assert alice.run("cat", key).stdout.startswith("-----BEGIN OPENSSH PRIVATE KEY")
    assert bob.run("cat", key).returncode == 1


def test_commands_do_not_change_another_users_cluster(users: tuple[User, User], lab: str) -> None:
    alice, bob = users
    for words in (["exec", "a", "--", "true"], ["down"], ["hostfile"], ["status"]):
        for how, code, message in (([], 2, f"{lab} is {alice.name}'s"), (["--name", lab], 77, f"is {alice.name}'s")):
            done = bob.run("sudo", "-n", "tools/cluster.sh", words[0], *how, *words[1:])
            assert (done.returncode, done.stdout) == (code, ""), (words, how, done.stderr)
            assert message in done.stderr and done.stderr.count("\n") == 1
    done = bob.run("sudo", "-n", "tools/throttle.sh", "10mbit")
    assert (done.returncode, f"{lab} is {alice.name}'s" in done.stderr) == (2, True), done.stderr
    assert "nothing was throttled" in bob.run("sudo", "-n", "tools/throttle.sh", "clear").stderr
    done = alice.run("tools/throttle.sh", "10mbit")  # calls sudo itself
    assert done.returncode == 0 and "to undo it: throttle.sh clear\n" in done.stderr, done.stderr
    assert "nothing was throttled" in bob.run("sudo", "-n", "tools/throttle.sh", "clear").stderr
    assert "restored" in alice.run("tools/throttle.sh", "clear").stderr


def test_down_checks_the_owner_again_after_waiting(users: tuple[User, User], lab: str) -> None:
    alice, bob = users
    down = f"from hvdtrain.lab import lifecycle; lifecycle.down({lab!r})"
    done = bob.run("sudo", "-n", PYTHON, "-c", down)
    assert f"cluster {lab} is {alice.name}'s" in done.stderr
    assert alice.cluster("exec", "a", "--", "true").returncode == 0


def test_sudo_does_not_read_files_that_the_user_cannot_read(users: tuple[User, User]) -> None:
    for words in (["throttle.sh", "clear", "--dev", "lo", "--hostfile"], ["cluster.sh", "up", "--topology"]):
        done = users[0].run("sudo", "-n", f"tools/{words[0]}", *words[1:], "/etc/shadow")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (77, "", 1), done.stderr
        assert "Permission denied" in done.stderr


def test_the_throttle_uses_the_callers_ssh(users: tuple[User, User], lab: str) -> None:
    """The hosts admit only Alice, although the throttle runs as root."""
    alice, _ = users
    calls = ("100mbit --force", "verify --peer b --seconds 1 --tolerance 100 --json", "clear")
    script = " && ".join(f"sudo -n tools/throttle.sh {call} --dev eth0" for call in calls)
    done = alice.cluster("exec", "a", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert [link["link"] for link in json.loads(done.stdout)["links"]] == ["here -> b", "b -> here"]
    remote = ["--hosts", "b", "--dev", "eth0", "--force", "--dry-run"]
    done = alice.cluster("exec", "a", "--", "sudo", "-n", "tools/throttle.sh", "100mbit", *remote)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_nothing_is_imported_from_the_callers_folder_or_path(users: tuple[User, User], lab: str) -> None:
    """Modules in the current folder or in PYTHONPATH, with names that the tools import, are never run."""
    alice, _ = users
    trap, sprung = alice.home / "trap", alice.home / "sprung"
    trap.mkdir()
    for module in ("argparse", "json", "socket", "typing", "sitecustomize", "runpy"):
        (trap / f"{module}.py").write_text(f"import os\nos.open({str(sprung)!r}, os.O_CREAT)\n")
    scripts = [[str(alice.home / "hvdtrain" / "tools" / f"{name}.sh")] for name in ("cluster", "throttle")]
    commands = [["status"], ["exec", "a", "--", "true"], ["10mbit"], ["verify", "--seconds", "1"], ["clear"]]
    for words in commands:
        script = scripts[words[0] not in ("status", "exec")]
        done = alice.run("sudo", "-n", f"PYTHONPATH={trap}", *script, *words, cwd=trap)
        assert not sprung.exists() and "sudo:" not in done.stderr, (words, done.stderr)
    alice.run(*scripts[0], "exec", "a", "--", "true", cwd=trap, PYTHONPATH=str(trap))  # calls sudo itself
    assert not sprung.exists()
    shutil.rmtree(trap)


def test_launchers_import_nothing_from_the_callers_folder_or_path(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    for module in ("argparse", "json", "socket", "typing", "sitecustomize", "runpy"):
        (tmp_path / f"{module}.py").write_text(f"import os\nos.open({str(sprung)!r}, os.O_CREAT)\n")
    for launcher in ("mpirun", "horovodrun"):
        done = subprocess.run(
            [ROOT / f"launch/{launcher}.sh", "--dry-run", "-H", "localhost:2", "true"],
            cwd=tmp_path, env=environment({"PYTHONPATH": str(tmp_path)}), capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not sprung.exists()


def test_root_runs_no_programs_from_the_users_path(users: tuple[User, User], lab: str) -> None:
    """The user's PATH and library path take effect after root's rights are dropped."""
    alice, _ = users
    trap, seen = alice.home / "bin", alice.home / "seen"
    trap.mkdir()
    for program in ("sh", "nsenter", "setpriv", "env"):
        (trap / program).write_text(f"#!/bin/dash\n/usr/bin/id -u >>{seen}\n")
        (trap / program).chmod(0o755)
    (trap / "python").touch(mode=0o755)  # makes the folder look like an environment
    alice.run("sudo", "-n", f"VIRTUAL_ENV={alice.home}", "tools/cluster.sh", "exec", "a", "--", "sh", "-c", "true")
    assert seen.read_text() == alice.run("id", "-u").stdout
    shutil.rmtree(trap)


SCAN = """
import pathlib, sys
found = False
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        found |= "".join(sys.argv[1:]).encode() in path.read_bytes()
    except OSError:
        pass
print(found)
"""


@pytest.mark.parametrize(("launcher", "shown"), [("horovodrun -np 1", True), ("launch/horovodrun.sh", False)])
def test_secrets_of_the_environment_on_command_lines(launcher: str, shown: bool) -> None:
    """On Gloo, horovodrun writes the whole environment on command lines. launch/horovodrun.sh omits secrets."""
    done = subprocess.run(
        [*launcher.split(), "--gloo", "-H", "localhost:1", "python", "-c", SCAN, "hush", "money"],
        cwd=ROOT, env=environment({"HVDTRAIN_PASS": "hushmoney"}), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert f"{shown}\n" in done.stdout, done.stderr
