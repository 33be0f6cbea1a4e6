"""deploy/ and the CI workflow, checked offline: syntax, required fields, and that files, options and ports agree."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, alone, finished

DEPLOY = ROOT / "deploy"
NEEDED = {"g++", "make", "python3-dev", "python3-venv", "iproute2"}
"""Debian packages that tools/setup.sh and the launchers need"""
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "CMD"}


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


def check_shell(script: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, f"{script}: {done.stderr}"


def installed(script: str) -> set[str]:
    """The packages that `apt-get install` commands name."""
    calls = re.findall(r"apt-get install ([^&|;\n]*)", script.replace("\\\n", " "))
    return {word for call in calls for word in call.split() if not word.startswith("-")}


def test_every_file_is_in_the_readme() -> None:
    text = (DEPLOY / "README.md").read_text()
    names = {path.name for path in DEPLOY.iterdir()} - {"README.md", "Dockerfile.dockerignore"}
    assert all(f"`{name}`" in text for name in names), names


def test_the_dockerfile_is_well_formed() -> None:
    stages: list[str] = []
    given: set[str] = set()
    for word, rest in instructions():
        assert word in INSTRUCTIONS, word
        match word:
            case "ARG":
                given.add(rest.partition("=")[0])
            case "FROM":
                assert set(re.findall(r"\$\{(\w+)\}", rest)) <= given
                stages.append(rest.partition(" AS ")[2])
            case "COPY":
                source = rest.split()[-2]
                if rest.startswith("--from="):
                    assert rest.split()[0].removeprefix("--from=") in stages
                else:
                    assert (ROOT / source).exists(), source
            case "RUN":
                check_shell(rest)
    packages = installed((DEPLOY / "Dockerfile").read_text())
    assert packages >= NEEDED | {"openssh-server", "openssh-client", "python3"}
    last = [word for word, _ in instructions()]
    assert last.index("USER") > len(last) - 1 - last[::-1].index("RUN"), "no command of the image runs as root later"
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {".venv", ".git"} <= set(ignored), "they belong to this machine"


def test_apptainer_has_known_sections_and_existing_files() -> None:
    head, *parts = re.split(r"^%(\w+)\n", (DEPLOY / "hvdtrain.def").read_text(), flags=re.MULTILINE)
    assert dict(line.split(": ") for line in head.split("\n") if line) == {
        "Bootstrap": "docker",
        "From": "debian:12-slim",
    }
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(sections) == {"files", "post", "environment", "runscript", "help"}
    copied = [line.split() for line in sections["files"].strip().splitlines()]
    assert all((ROOT / source).exists() and target.startswith("/opt/hvdtrain/") for source, target in copied)
    for name in ("post", "environment", "runscript"):
        check_shell(sections[name])
    assert installed(sections["post"]) >= NEEDED | {"openssh-client"}


def test_the_mpijob_has_the_fields_of_v2beta1() -> None:
    job = document("mpijob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert re.fullmatch("[a-z]([a-z0-9-]{0,40}[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    known = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(spec) <= known | {"launcherCreationPolicy", "mpiImplementation"}
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    policy = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "suspend"}
    assert set(spec["runPolicy"]) <= policy and spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    replicas = spec["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"} and replicas["Launcher"]["replicas"] == 1
    for name, replica in replicas.items():
        assert set(replica) <= {"replicas", "template", "restartPolicy"}, name
        assert replica.get("restartPolicy", "Never") in ("Never", "OnFailure"), "the launcher is a Job"
        pod = replica["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert container["name"] and container["image"] == "IMAGE"
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            words = [*container["command"], *container.get("args", [])]
            assert all(isinstance(word, str) for word in words), "Kubernetes takes only strings"


def test_the_mpijob_fits_the_image() -> None:
    spec, image = document("mpijob.yaml")["spec"], dict(instructions())
    text = (DEPLOY / "Dockerfile").read_text()
    uid, user = re.search(r"useradd .*--uid (\d+) .* (\w+) ", text).groups()  # type: ignore[union-attr]
    assert image["USER"] == user
    sshd, ssh, worker = settings("sshd_config"), settings("ssh_config"), spec["mpiReplicaSpecs"]["Worker"]
    assert Path(sshd["HostKey"]).parent == Path(spec["sshAuthMountPath"]) == Path(f"/home/{user}/.ssh")
    (container,) = worker["template"]["spec"]["containers"]
    ports = {
        int(image["EXPOSE"]),
        int(sshd["Port"]),
        int(ssh["Port"]),
        container["readinessProbe"]["tcpSocket"]["port"],
    }
    assert ports == {container["ports"][0]["containerPort"]}
    assert f"COPY deploy/sshd_config {container['command'][-1]}" in text
    for replica in spec["mpiReplicaSpecs"].values():
        assert replica["template"]["spec"]["containers"][0]["securityContext"]["runAsUser"] == int(uid)
        assert replica["template"]["spec"]["containers"][0]["workingDir"] == image["WORKDIR"]


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


def test_sshd_accepts_its_settings(tmp_path: Path) -> None:
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if sshd is None or not Path("/run/sshd").exists():
        pytest.skip("no sshd (Debian: apt-get install openssh-server)")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", key], check=True)
    done = finished([sshd, "-t", "-f", DEPLOY / "sshd_config", "-h", key])
    assert done.returncode == 0 and "unsupported" not in done.stderr.lower(), done.stderr
    done = finished(["ssh", "-G", "-F", DEPLOY / "ssh_config", "worker-0"])
    assert "port 2222" in done.stdout and done.returncode == 0, done.stderr


def test_skypilot_starts_the_launcher_on_the_first_node_with_all_hosts(tmp_path: Path) -> None:
    task = document("skypilot.yaml")
    assert set(task) <= {"name", "num_nodes", "workdir", "resources", "setup", "run", "envs", "file_mounts"}
    check_shell(task["setup"])
    assert installed(task["setup"]) >= NEEDED
    stand_in = tmp_path / "launch" / "mpirun.sh"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    for rank, expected in (("0", "-H 10.0.0.1,10.0.0.2 python -m hvdtrain.resnet --epochs 2\n"), ("1", "")):
        variables = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        done = finished(["bash", "-c", task["run"]], extra=variables, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_cloud_init_has_known_keys_and_types() -> None:
    assert (DEPLOY / "cloud-init.yaml").read_text().startswith("#cloud-config\n")
    data = document("cloud-init.yaml")
    assert set(data) <= {"package_update", "packages", "users", "runcmd", "write_files", "ssh_authorized_keys"}
    assert data["package_update"] is True and set(data["packages"]) >= NEEDED | {"git", "openssh-server"}
    (user,) = data["users"]
    assert user["lock_passwd"] is True and user["ssh_authorized_keys"] == ["PUBLIC_KEY"]
    for command in data["runcmd"]:
        assert command[:4] == ["sudo", "-u", user["name"], "-H"], "nothing runs as root"
        assert all(isinstance(word, str) for word in command)
    check_shell(data["runcmd"][-1][-1])


def test_the_workflow_runs_lint_and_tests() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert set(workflow[True]) == {"push", "pull_request"}, "YAML 1.1 reads `on` as true"
    job = workflow["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert len(commands) + len(actions) == len(job["steps"])
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions)
    for command in commands:
        check_shell(command)
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert targets == ["setup", "lint", "test"]
    assert set(targets) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(job["strategy"]["matrix"]["python"]) <= {"3.11", "3.12", "3.13"}
