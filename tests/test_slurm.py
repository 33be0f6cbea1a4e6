"""Jobs on a real Slurm with two virtual hosts: sbatch, signals, requeuing, srun, and errors of the batch script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import LIMIT_S, PROGRAMS, ROOT, SMALL, unique, until
from slurm_cluster import SYSTEM_PATH, SlurmCluster, missing, pmix_missing, slurm, tail

from hvdtrain.lab import lifecycle

SCRIPT = ROOT / "launch" / "slurm.sbatch"
PYTHON = str(ROOT / ".venv" / "bin" / "python")
TRAIN = ["python", "-m", "hvdtrain.resnet", *SMALL]
TWO_BY_TWO = ["--nodes=2", "--ntasks-per-node=2"]
TWO_BY_ONE = ["--nodes=2", "--ntasks-per-node=1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(f"Slurm: {reason}")
    # The path is short, because it contains munged's socket and unix(7) allows 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(Path(folder), name=unique()) as running:
        yield running


@pytest.fixture
def nodes(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The idle cluster. Jobs of a failed test are cancelled."""
    yield cluster
    cluster.clear()


def records(folder: Path) -> list[dict[str, Any]]:
    """Rank 0's records without an incomplete last line."""
    file = folder / "metrics" / "rank0000.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def hosts(folder: Path) -> list[str]:
    return [rank["host"] for rank in json.loads((folder / "manifest.json").read_text())["ranks"]]


# --- sbatch ----------------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.slow
def test_usr1_saves_a_checkpoint_and_the_requeued_job_resumes_with_its_four_ranks(
    nodes: SlurmCluster, tmp_path: Path
) -> None:
    """The job has two stages with two replicas, each stage on one host."""
    run, output = tmp_path / "run", tmp_path / "out"
    flags = ["--epochs", "4", "--stages", "2", "--strategy", "hierarchical", "--run-dir", str(run)]
    job = nodes.submit(*TWO_BY_TWO, SCRIPT, *TRAIN, *flags, cwd=ROOT, output=output)
    until(lambda: any(one["type"] == "step" for one in records(run)), what=lambda: f"a first step\n{nodes.logs()}")
    assert nodes.run(["scancel", "--signal=USR1", "--batch", str(job)]).returncode == 0
    ended = nodes.ended(job, output)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), tail(output)
    entries = records(run)
    resumed = [one["step"] for one in entries if one["type"] == "resumed"]
    steps = [one["step"] for one in entries if one["type"] == "step"]
    summary = entries[-1]
    assert len(resumed) == 1 and 0 < resumed[0] < summary["steps"]
    assert steps == list(range(summary["steps"])), "every step exactly once"
    assert (summary["ranks"], summary["hosts"]) == (4, 2) and (run / "COMPLETE").exists()
    assert hosts(run) == ["a", "a", "b", "b"]


def start(nodes: SlurmCluster, folder: Path, *options: str) -> int:
    """Starts tests/programs/slurm_job.py and waits until its four ranks run."""
    program = PROGRAMS / "slurm_job.py"
    output = folder / "out"
    job = nodes.submit(*TWO_BY_TWO, *options, SCRIPT, "python", program, folder, cwd=ROOT, output=output)
    until(
        lambda: seen(folder) and all(seen(folder).values()) and len(seen(folder)) == 4,
        what=lambda: f"4 ranks {tail(output)}",
    )
    return job


def seen(folder: Path) -> dict[str, list[str]]:
    return {file.name: file.read_text().splitlines() for file in sorted(folder.glob("rank*"))}


@pytest.mark.root
@pytest.mark.slow
def test_usr1_to_the_job_steps_requeues(nodes: SlurmCluster, tmp_path: Path) -> None:
    """Without --batch Slurm signals only the other node, whose ranks end the job with 75."""
    job = start(nodes, tmp_path)
    assert nodes.run(["scancel", "--signal=USR1", str(job)]).returncode == 0
    ended = nodes.ended(job, tmp_path / "out")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), tail(tmp_path / "out")
    begin = f"start results/slurm-{job} true"
    assert {rank: lines.count(begin) for rank, lines in seen(tmp_path).items()} == {f"rank{n}": 2 for n in range(4)}
    assert seen(tmp_path)["rank2"] == seen(tmp_path)["rank3"] == [begin, "SIGUSR1", begin]


@pytest.mark.root
def test_term_saves_a_checkpoint_and_ends_the_job(nodes: SlurmCluster, tmp_path: Path) -> None:
    job = start(nodes, tmp_path)
    assert nodes.run(["scancel", "--signal=TERM", "--batch", str(job)]).returncode == 0
    ended = nodes.ended(job, tmp_path / "out")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0"), tail(tmp_path / "out")
    assert len(seen(tmp_path)) == 4 and all(len(lines) == 2 for lines in seen(tmp_path).values())


@pytest.mark.root
def test_a_cancelled_job_ends_and_leaves_no_process(nodes: SlurmCluster, tmp_path: Path) -> None:
    before = nodes.processes()
    job = start(nodes, tmp_path)
    of_job = nodes.processes() - before
    assert len(of_job) >= 4
    assert nodes.run(["scancel", str(job)]).returncode == 0
    ended = nodes.ended(job, tmp_path / "out")
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    until(lambda: not nodes.processes() & of_job, what=lambda: f"left: {nodes.processes() & of_job}")


@pytest.mark.root
def test_a_job_without_requeuing_ends_with_75(nodes: SlurmCluster, tmp_path: Path) -> None:
    job = start(nodes, tmp_path, "--no-requeue")
    assert nodes.run(["scancel", "--signal=USR1", "--batch", str(job)]).returncode == 0
    ended = nodes.ended(job, tmp_path / "out")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0"), tail(tmp_path / "out")
    assert (
        "requeuing failed; to resume: sbatch [the same options] launch/slurm.sbatch" in (tmp_path / "out").read_text()
    )


@pytest.mark.root
def test_a_job_has_the_exit_code_of_its_command(nodes: SlurmCluster, tmp_path: Path) -> None:
    program = ["python", "-c", "raise SystemExit(65)"]
    job = nodes.submit(*TWO_BY_ONE, SCRIPT, *program, cwd=ROOT, output=tmp_path / "out")
    ended = nodes.ended(job, tmp_path / "out")
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "65:0", "0"), tail(tmp_path / "out")


@pytest.mark.root
def test_a_job_must_be_submitted_from_the_checkout(nodes: SlurmCluster, tmp_path: Path) -> None:
    job = nodes.submit("--nodes=1", SCRIPT, *TRAIN, cwd=tmp_path, output=tmp_path / "out")
    assert nodes.ended(job, tmp_path / "out")["ExitCode"] == "78:0"
    (line,) = (tmp_path / "out").read_text().splitlines()
    assert line.startswith(f"slurm.sbatch: no launch/mpirun.sh in {tmp_path} on a; hint: submit from the checkout")


@pytest.mark.root
@pytest.mark.slow
def test_an_elastic_job_needs_no_ssh_and_takes_a_node_back(nodes: SlurmCluster, tmp_path: Path) -> None:
    run, output, ssh = tmp_path / "run", tmp_path / "out", tmp_path / "bin" / "ssh"
    program(ssh, f"#!/bin/sh\ntouch {tmp_path}/called\n")
    flags = ["--strategy", "powersgd", "--epochs", "400", "--run-dir", str(run)]
    path = f"--export=ALL,PATH={ssh.parent}:{SYSTEM_PATH}"
    before = nodes.processes()
    job = nodes.submit(path, *TWO_BY_ONE, SCRIPT, "--elastic", *TRAIN, *flags, cwd=ROOT, output=output)

    def views() -> list[list[str]]:
        return [one["members"] for one in records(run) if one["type"] == "view"]

    until(lambda: any(one["type"] == "step" for one in records(run)), what=lambda: f"{tail(output)} {nodes.logs()}")
    on_b = lifecycle.processes(nodes.cluster.netns("b"))
    (rank,) = [pid for pid in on_b if b"\0hvdtrain.resnet\0" in Path("/proc", str(pid), "cmdline").read_bytes()]
    os.kill(rank, signal.SIGKILL)
    until(lambda: views() == [["a"], ["a", "b"]], what=lambda: tail(output))
    assert nodes.run(["scancel", "--signal=TERM", "--batch", str(job)]).returncode == 0
    ended = nodes.ended(job, output)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "75:0"), tail(output)
    assert not (tmp_path / "called").exists()
    until(lambda: not nodes.processes() - before, what=lambda: f"left: {nodes.processes() - before}")


# --- srun ------------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_srun_with_pmix_trains(nodes: SlurmCluster, tmp_path: Path) -> None:
    if reason := pmix_missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    words = [PYTHON, *TRAIN[1:], "--epochs", "1", "--run-dir", str(run)]
    done = nodes.run(["srun", "--nodes=2", "--ntasks=2", "--mpi=pmix", *words], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert hosts(run) == ["a", "b"] and (run / "COMPLETE").exists()
    assert "2 (srun)" in done.stderr and records(run)[-1]["hosts"] == 2


@pytest.mark.root
def test_srun_with_different_numbers_of_ranks_per_node(nodes: SlurmCluster) -> None:
    if reason := pmix_missing():
        pytest.skip(reason)
    show = (
        "from hvdtrain.comm.launch_env import launch_env; p = launch_env()\n"
        "print(p.launcher, p.rank, p.size, p.local_rank, p.local_size)"
    )
    done = nodes.run(["srun", "--nodes=2", "--ntasks=3", "--mpi=pmix", PYTHON, "-c", show], cwd=ROOT)
    assert sorted(done.stdout.splitlines()) == ["srun 0 3 0 2", "srun 1 3 1 2", "srun 2 3 0 1"], done.stderr


@pytest.mark.root
def test_srun_without_pmix_is_rejected(nodes: SlurmCluster, tmp_path: Path) -> None:
    """Each rank would train on its own."""
    words = [PYTHON, *TRAIN[1:], "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    done = nodes.run(["srun", "--nodes=2", "--ntasks=2", "--mpi=none", *words], cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.count("hvdtrain:") == 1 and "--mpi=pmix" in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


# --- without Slurm ---------------------------------------------------------------------------------------------------

LAUNCHER = """#!/usr/bin/env bash
printf '%s\\n' "${HVDTRAIN_RUN_DIR:-own-folder} ${HVDTRAIN_RESUME:-anew}" "$@" >started.part
stop() {
    echo "$1" >>signal
    if [[ $1 == "$LAST" ]]; then exit "$CODE"; fi
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM
if [[ ${SAVES:-} ]]; then mkdir -p "$HVDTRAIN_RUN_DIR/checkpoints/step-00000020"; fi
mv started.part started
while [[ $LAST ]]; do sleep 0.05; done
exit "$CODE"
"""
SCONTROL = """#!/usr/bin/env bash
printf '%s\\n' "$*" >scontrol.called
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def has_lines(file: Path, count: int) -> bool:
    return file.exists() and file.read_text().count("\n") == count


def script(*words: str, cwd: Path = ROOT, signals: Sequence[str] = (), **variables: str) -> tuple[int, list[str]]:
    """Runs the batch script without Slurm, sends signals once its launcher runs, and returns (exit code, stderr)."""
    environment = {"PATH": f"{cwd / 'bin'}:{SYSTEM_PATH}", "SLURM_JOB_ID": "7", **variables}
    with subprocess.Popen(
        [str(SCRIPT), *words], env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        if signals:
            until((cwd / "started").exists, what=lambda: "its launcher")
        passed = cwd / "signal"
        for count, name in enumerate(signals, 1):
            running.send_signal(signal.Signals[f"SIG{name}"])
            until(partial(has_lines, passed, count), what=lambda: "the signal in the launcher")
        try:
            errors = running.communicate(timeout=LIMIT_S)[1]
        finally:
            running.kill()
    return running.returncode, errors.splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a checkout. Its launcher exits with CODE, after the signal LAST if that is set."""
    program(tmp_path / "launch" / "mpirun.sh", LAUNCHER)
    program(tmp_path / "bin" / "scontrol", SCONTROL)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("code", "signals", "restarts", "checkpoints", "requeued"),
    [
        (0, [], 0, "new", False),
        (1, [], 0, "", False),
        (1, [], 0, "new", True),  # a fault after a checkpoint
        (1, [], 1, "old", False),  # no progress since the last start
        (1, [], 5, "new", False),  # too many restarts
        (1, ["TERM"], 0, "new", False),
        (75, [], 0, "", True),  # only the ranks got the signal
        (75, [], 5, "", False),
        (75, ["USR1"], 9, "", True),  # the time limit, with any number of restarts
        (75, ["USR1", "TERM"], 9, "", True),  # the time limit passes before the checkpoint is saved
        (75, ["TERM"], 0, "", False),
        (75, ["TERM", "USR1"], 0, "", False),
        (75, ["INT"], 0, "", False),
        (138, ["USR1"], 0, "", False),  # before the first step: nothing to resume
        (138, ["USR1"], 9, "old", True),
    ],
)
def test_requeuing(
    checkout: Path, code: int, signals: list[str], restarts: int, checkpoints: str, requeued: bool
) -> None:
    """`checkpoints`: "old" if an earlier start saved one, "new" if this start does."""
    if checkpoints == "old":
        (checkout / "results" / "slurm-7" / "checkpoints" / "step-00000010").mkdir(parents=True)
    passed = ["TERM" if name == "INT" else name for name in signals]
    about = {"CODE": str(code), "LAST": passed[-1] if passed else "", "SLURM_RESTART_COUNT": str(restarts)}
    saves = "yes" if checkpoints == "new" else ""
    ended, lines = script("train", cwd=checkout, signals=signals, SAVES=saves, **about)
    assert ended == code, lines
    if (code, signals) == (75, ["TERM"]):
        assert lines[-1].endswith("sbatch [the same options] launch/slurm.sbatch train --resume results/slurm-7")
    called = checkout / "scontrol.called"
    assert (called.read_text() if called.exists() else None) == ("requeue 7\n" if requeued else None), lines
    if passed:
        assert (checkout / "signal").read_text().split() == passed


@pytest.mark.parametrize(
    ("words", "restarts", "folder"),
    [
        (["train", "--epochs", "two words"], 0, "results/slurm-7 true"),
        (["train", "--run-dir", "mine"], 0, "own-folder anew"),
        (["train", "--run-dir=mine"], 1, "own-folder true"),
        (["train", "--resume", "mine"], 0, "own-folder anew"),
        (["train", "--resume=mine"], 0, "own-folder anew"),
        (["train", "--resume"], 0, "results/slurm-7 true"),
        (["train", "--resume", "--epochs", "2"], 0, "results/slurm-7 true"),
    ],
)
def test_the_commands_run_folder_takes_precedence(checkout: Path, words: list[str], restarts: int, folder: str) -> None:
    code, _ = script(*words, cwd=checkout, CODE="0", LAST="", SLURM_RESTART_COUNT=str(restarts))
    assert code == 0
    assert (checkout / "started").read_text().splitlines() == [folder, *words]


def test_the_script_must_run_in_a_job() -> None:
    code, (line,) = script("python", "-m", "hvdtrain.resnet", SLURM_JOB_ID="")
    assert code == 78 and "not in a Slurm job; hint: submit it from the checkout: sbatch -N 2" in line


def test_a_job_without_a_command_is_a_usage_error() -> None:
    code, (line,) = script()
    assert code == 2 and "no command given" in line


def test_an_active_environment_takes_precedence_over_the_one_of_a_checkout(checkout: Path) -> None:
    program(checkout / "bin" / "hvdtrain", '#!/bin/sh\necho "$*" >active\n')
    assert script("train", cwd=checkout)[0] == 0
    assert (checkout / "active").read_text() == "launch mpirun train\n" and not (checkout / "started").exists()


def test_a_checkout_without_setup(checkout: Path) -> None:
    (checkout / ".venv" / "bin" / "activate").unlink()
    code, (line,) = script("true", cwd=checkout)
    assert code == 69 and f"no .venv in {checkout} on " in line and "hint: run `make setup` there" in line
