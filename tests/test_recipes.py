"""The recipes of CONTRIBUTING.md, followed: their files are taken out of the page, installed, and run on real ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
from conftest import LIMIT_S, ROOT, command, document, environment

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ON_HOSTS = str(ROOT / "tests" / "programs" / "on_hosts.py")


def files() -> list[tuple[str, str, str]]:
    """(path, the line it goes below or nothing, text) of each block of code in the page."""
    blocks = re.findall(r"^```\w+\n# ([\w./-]+)(?:, below: ([^\n]+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.count("```") // 2, "each block begins with a comment that names its file"
    return blocks


def typed(start: str) -> list[str]:
    """The words of the one command of the page's recipes that begins so."""
    (line,) = re.findall(rf"^ {{4}}({re.escape(start)}.*)$", PAGE, re.MULTILINE)
    return shlex.split(line, comments=True)


def as_hosts(words: list[str]) -> list[str]:
    """`launch/mpirun.sh -H a:1,b:1 python -m MODULE FLAGS...`, with two ranks here in place of two hosts."""
    start, _, hosts, *python, module = words[:6]
    assert (start, hosts, python) == ("launch/mpirun.sh", "a:1,b:1", ["python", "-m"])
    return command(2, [ON_HOSTS, module, *words[6:]])


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the package of the page is installed."""
    source, site = tmp_path_factory.mktemp("mine"), tmp_path_factory.mktemp("site")
    for path, _, text in files():
        if "/" not in path:
            (source / path).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "--target", site, source], check=True)
    return environment({"PYTHONPATH": str(site)})


def run(words: list[str], folder: Path, variables: dict[str, str], *flags: str) -> Any:
    """Trains; the document that is printed."""
    told = [*words, "--json", "--seed", "1", "--run-dir", str(folder), *flags]
    done = subprocess.run(told, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    return document(done)


def test_a_strategy(mine: dict[str, str], tmp_path: Path) -> None:
    ended = run(as_hosts(typed("launch/mpirun.sh -H a:1,b:1 python -m hvdtrain.resnet")), tmp_path / "run", mine)
    assert ended["strategy"] == "shortened:scale=1024"
    assert ended["bytes_sent"] / ended["steps"] == pytest.approx(2 * ended["parameters"], rel=0.001)
    assert ended["test_scores"]["accuracy"] > 0.2
    told = subprocess.run(typed("python -m hvdtrain.resnet --strategy help"), env=mine, capture_output=True, text=True)
    assert "scale" in told.stdout, told.stderr


def test_a_workload_with_its_measure(mine: dict[str, str], tmp_path: Path) -> None:
    words = typed("mpirun -np 2 python -m waves")
    ended = run(command(2, words[4:]), tmp_path / "run", mine)
    assert ended["workload"] == "waves"
    assert ended["test_scores"]["mae"] < 0.2
    told = subprocess.run(typed("hvdtrain train waves"), env=mine, capture_output=True, text=True, check=True)
    assert "512 training, 64 validation, 64 test points" in told.stdout
    again = ["python", "-m", "hvdtrain.resnet", "--resume", str(tmp_path / "run")]
    told = subprocess.run(again, env=mine, capture_output=True, text=True)
    assert f"is a run of waves; hint: python -m waves --resume {tmp_path / 'run'}" in told.stderr
    (tmp_path / "waves.toml").write_text('[[grid]]\nworkload = "waves"\nranks_per_host = 2\nhidden = 4\n')
    sweep = ["hvdtrain", "sweep", str(tmp_path / "waves.toml"), "--dry-run"]
    told = subprocess.run(sweep, env=mine, capture_output=True, text=True, check=True)
    assert "-H localhost:2 python -m waves --hidden 4" in told.stdout


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory, mine: dict[str, str]) -> dict[str, str]:
    """The environment of a copy of the package in which the page's changes are made."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "hvdtrain", folder / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for path, below, text in files():
        if "/" not in path:
            continue
        file = folder / path
        before, found, after = file.read_text().partition(f"{below}\n") if below else ("", "", "")
        assert not below or found, f"{path} has no line {below}"
        file.write_text(before + found + text + after)
    return mine | {"PYTHONPATH": os.pathsep.join([str(folder), mine["PYTHONPATH"]]), "PYTHONSAFEPATH": "1"}


def test_a_backend(changed: dict[str, str], tmp_path: Path) -> None:
    words = typed("mpirun -np 2 python -m hvdtrain.resnet")
    ended = run(command(2, words[4:]), tmp_path / "run", changed)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["backend"] == "mpi sums"
    assert ended["test_scores"]["accuracy"] > 0.2


def test_a_column(changed: dict[str, str], tmp_path: Path) -> None:
    runs.make(tmp_path / "runs" / "one")
    words = [*typed("hvdtrain results table"), "--format", "csv"]
    words[words.index("results/")] = str(tmp_path / "runs")
    told = subprocess.run(words, env=changed, capture_output=True, text=True, check=True)
    assert "python" in told.stdout
