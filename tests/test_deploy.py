"""deploy/ and the CI workflow, as far as they run offline; and that their files, options and ports agree."""

from __future__ import annotations

import getpass
import shlex
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, alone, finished, until

DEPLOY = ROOT / "deploy"


def document(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def test_the_mpijob_runs_commands_that_exist(tmp_path: Path) -> None:
    (launcher,) = document("mpijob.yaml")["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    script, option, _ = launcher["command"]
    (tmp_path / "hostfile").write_text("localhost slots=1\n")  # the operator's format
    words = [option, tmp_path / "hostfile", "--dry-run", *launcher["args"]]
    done = finished([ROOT / "launch" / script, *words])
    assert done.returncode == 0 and shlex.join(launcher["args"]) in done.stdout, done.stderr
    assert launcher["args"][:3] == ["python", "-m", "hvdtrain.resnet"]
    done = alone("resnet", *launcher["args"][3:], "--dry-run")
    assert done.returncode == 0, done.stderr


def test_a_worker_admits_its_user_only_and_has_a_host_key_of_its_own(tmp_path: Path) -> None:
    """Runs the command of a worker, in another home folder."""
    if shutil.which("sshd", path="/usr/sbin:/usr/local/sbin") is None or not Path("/run/sshd").exists():
        pytest.skip("no sshd (Debian: apt-get install openssh-server)")
    user, keys = getpass.getuser(), tmp_path / ".ssh"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    def here(text: str) -> str:
        return text.replace("/home/mpiuser", str(tmp_path)).replace("mpiuser", user).replace("2222", port)

    keys.mkdir()
    for name in ("id_rsa", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", keys / name], check=True)
    (tmp_path / "ssh_config").write_text(here((DEPLOY / "ssh_config").read_text()))
    (tmp_path / ".sshd_config").write_text(
        f"{here((DEPLOY / 'sshd_config').read_text())}AuthorizedKeysFile {keys}/id_rsa.pub\n"
    )
    (worker,) = document("mpijob.yaml")["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    sshd = subprocess.Popen([here(word) for word in (*worker["command"], *worker["args"])], stderr=subprocess.DEVNULL)

    def login(key: str, name: str = user) -> int:
        words = ["ssh", "-F", tmp_path / "ssh_config", "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
        return finished([*words, "-i", keys / key, "-l", name, "127.0.0.1", "true"]).returncode

    try:
        until(lambda: login("id_rsa") == 0)
        assert login("stranger") == login("id_rsa", "nobody") == 255
        host_key = finished(["ssh-keyscan", "-p", port, "127.0.0.1"]).stdout
        assert "ssh-ed25519" in host_key and "ecdsa" not in host_key
    finally:
        sshd.terminate()
        sshd.wait()
