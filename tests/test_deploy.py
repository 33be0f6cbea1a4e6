"""deploy/ and the CI workflow, as far as they run offline; and that their files, options and ports agree."""

from __future__ import annotations

import getpass
import re
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


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def settings(name: str) -> dict[str, str]:
    """The settings of an ssh_config(5) or sshd_config(5) file."""
    lines = (line.split(maxsplit=1) for line in (DEPLOY / name).read_text().splitlines())
    return {words[0]: words[1] for words in lines if words and words[0] != "#"}


def test_images_copy_files_that_exist_and_run_nothing_as_root_later() -> None:
    (files,) = re.findall(r"^%files\n(.*?)^%", (DEPLOY / "hvdtrain.def").read_text(), flags=re.MULTILINE | re.DOTALL)
    copied = [line.split()[0] for line in files.strip().splitlines()]
    copied += [rest.split()[-2] for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    assert not [source for source in copied if not (ROOT / source).exists()]
    words = [word for word, _ in instructions()]
    assert "RUN" not in words[words.index("USER") :]


def test_the_mpijob_fits_the_image() -> None:
    spec, image = document("mpijob.yaml")["spec"], dict(instructions())
    uid = re.search(r"useradd .*--uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    (container,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    ports = [image["EXPOSE"], settings("sshd_config")["Port"], settings("ssh_config")["Port"]]
    ports += [container["readinessProbe"]["tcpSocket"]["port"], container["ports"][0]["containerPort"]]
    assert len({*map(int, ports)}) == 1
    assert uid and container["securityContext"]["runAsUser"] == int(uid[1])


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


def test_skypilot_starts_the_launcher_on_the_first_node_with_all_hosts(tmp_path: Path) -> None:
    task = document("skypilot.yaml")
    stand_in = tmp_path / "launch" / "mpirun.sh"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    for rank, expected in (("0", "-H 10.0.0.1,10.0.0.2 python -m hvdtrain.resnet --epochs 2\n"), ("1", "")):
        variables = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        done = finished(["bash", "-c", task["run"]], extra=variables, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_the_workflow_runs_lint_and_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert targets == ["setup", "lint", "test-all"]
