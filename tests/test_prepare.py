"""`hvdtrain hosts prepare` and `launch torchrun --sync`: what reaches another host, and what stays as it was."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Cluster, fails, unique

from hvdtrain import cli

pytestmark = [pytest.mark.root, pytest.mark.slow]
PYTHON = str(Path(sys.executable).resolve())
SCRIPT = "import json, socket, helper\nprint(json.dumps({'host': socket.gethostname(), 'value': helper.VALUE}))\n"
FILES = {
    "train.py": SCRIPT,
    "helper.py": "VALUE = 1\n",
    "-odd name\n.txt": "x",
    ".gitignore": "data/\n",
    "data/big.npy": "ignored",
    "results/run/COMPLETE": "",
}


def write(cluster: Cluster, host: str, path: Path, text: str) -> None:
    code = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.parent.mkdir(parents=True, exist_ok=True); "
    assert cluster.on(host, "python3", "-c", f"{code}p.write_text(sys.argv[2])", str(path), text).returncode == 0


def tree(cluster: Cluster, host: str, folder: Path) -> dict[str, str]:
    """The text of each file below a folder on a host, by name."""
    code = "import json, pathlib, sys; top = pathlib.Path(sys.argv[1]); "
    code += "print(json.dumps({str(p.relative_to(top)): p.read_text() for p in top.rglob('*') if p.is_file()}))"
    return dict(json.loads(cluster.on(host, "python3", "-c", code, str(folder)).stdout))


def prepare(cluster: Cluster, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return cluster.on("a", "env", f"--chdir={folder}", "hvdtrain", "hosts", "prepare", "-H", "a:1,b:1", *options)


@pytest.fixture
def project(apart: Cluster) -> Iterator[Path]:
    """A folder with a script, on host a only."""
    folder = Path.home() / unique()
    for name, text in FILES.items():
        write(apart, "a", folder / name, text)
    assert apart.on("a", "git", "init", "-q", str(folder)).returncode == 0
    yield folder
    assert not folder.exists(), "hosts have files of their own"


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_a_host_gets_what_it_lacks_and_keeps_what_it_has(apart: Cluster, project: Path, tool: str) -> None:
    """Whichever program sends it."""
    lost = Path(sys.prefix, "bin", "hvdtrain")
    assert apart.on("b", "rm", str(lost)).returncode == 0
    own = {"mine.txt": "b's own", "data/other": "b's data"}
    for name, text in own.items():
        write(apart, "b", project / name, text)
    if tool == "tar":
        assert apart.on("b", "mount", "--bind", "/dev/null", "/usr/bin/rsync").returncode == 0
    try:
        dry = prepare(apart, project, "--dry-run")
        assert dry.returncode == 0 and "would copy" in dry.stdout, dry.stderr
        assert tree(apart, "b", project) == own and apart.on("b", "ls", str(lost)).returncode
        done = prepare(apart, project)
        again = prepare(apart, project)
    finally:
        if tool == "tar":
            apart.on("b", "umount", "/usr/bin/rsync")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{re.escape(sys.prefix)}: copied .* in 1 file$", done.stdout, re.MULTILINE), done.stdout
    assert "what git ignores, results/" in done.stderr
    # the third is the package, to which the environment refers
    sent = {name: text for name, text in FILES.items() if not name.startswith(("data", "results"))}
    assert tree(apart, "b", project) == sent | own
    assert again.stdout.count("is the same as here") == len(again.stdout.splitlines()) == 3, again.stdout


def test_where_a_copy_would_not_run_the_environment_is_made_or_the_way_to_it_is_said(
    apart: Cluster, project: Path
) -> None:
    hidden = [
        python for name in ("python3", "python3.11", "python3.12", "python3.13") if (python := shutil.which(name))
    ]
    hidden = sorted({PYTHON, *(str(Path(each).resolve()) for each in hidden), "/usr/bin/python3"} - {sys.executable})
    setup = Path(__file__).parents[1] / "tools" / "setup.sh"
    assert apart.on("b", "rm", str(setup)).returncode == 0
    for each in hidden:
        assert apart.on("b", "mount", "--bind", "/dev/null", each).returncode == 0
    try:
        done = prepare(apart, project)
        nothing = apart.on("b", "ls", str(project)).returncode and apart.on("b", "ls", str(setup)).returncode
        installing = prepare(apart, project, "--install")
        there = apart.on("b", "ls", str(setup), str(project / "train.py"))
    finally:
        for each in hidden:
            apart.on("b", "umount", each)
    assert done.returncode == 1 and re.search(r"b: .*python.* is missing, not Python .*hint: .*--install", done.stdout)
    assert nothing
    # as far as it comes without any Python
    assert installing.returncode == 1 and there.returncode == 0, installing.stderr
    assert "setup: python3" in installing.stderr and "tools/setup.sh ended with 2" in installing.stderr


def test_what_the_doctor_says_to_a_host_that_lacks_the_folder_is_a_line_to_paste(apart: Cluster, project: Path) -> None:
    data = Path.home() / unique() / "own data"
    write(apart, "a", data / "big.npy", "ignored")

    def doctor(status: str) -> dict[str, str]:
        words = ["-H", "a:1,b:1", "--quick", "--json", "train.py", str(data)]
        done = apart.on("a", "env", f"--chdir={project}", "hvdtrain", "doctor", *words)
        checks = json.loads(done.stdout)["checks"]
        found = [check for check in checks if check["status"] == status and check["name"] in ("code", "path")]
        return {check["facts"].get("path", check["name"]): check["fix"] for check in found}

    def paste(line: str) -> None:
        done = apart.on("a", "env", f"--chdir={project}", *shlex.split(line))
        assert done.returncode == 0, done.stderr

    lost = doctor("fail")
    assert lost.keys() == {"code", "train.py", str(data)}
    paste(lost["code"])
    assert doctor("fail").keys() == {str(data)}, "the first line has copied the script"
    paste(lost[str(data)])
    assert doctor("fail") == {} and doctor("ok").keys() >= {"train.py", str(data)}
    write(apart, "b", data / "big.npy", "another size")
    assert doctor("warn").keys() == {str(data)}


def test_a_job_with_sync_runs_what_the_launchers_host_has(apart: Cluster, project: Path) -> None:
    """Also after a change there. What the copies leave out stays as it is on each host."""
    launch = ["hvdtrain", "launch", "torchrun", "-H", "b:1,a:1", "--sync", "train.py"]
    write(apart, "b", project / "data/other", "b's data")
    for value in (1, 2):
        write(apart, "a", project / "helper.py", f"VALUE = {value}\n# {value}{value * ' '}\n")
        job = apart.on("a", "env", f"--chdir={project}", *launch)
        ranks = [json.loads(line) for line in re.findall(r"\{.*?\}", job.stdout)]
        assert {rank["host"]: rank["value"] for rank in ranks} == {"a": value, "b": value}, job.stderr
        assert "left out are what git ignores, results/" in job.stderr
    there = tree(apart, "b", project)
    assert there["data/other"] == "b's data" and not {"data/big.npy", "results/run/COMPLETE"} & there.keys()


def test_a_home_folder_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/", Path.home()):
        monkeypatch.chdir(folder)
        fails(lambda: cli.command(["hosts", "prepare", "-H", "localhost:1,192.0.2.1:1"]), 2, "separate folder")
