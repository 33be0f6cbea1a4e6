"""Laws of real ranks: they train and evaluate like a single process, and a failure of one rank ends the job."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, document, failing, first_of, launch, refused
from test_strategies import Simulated, simulated_sync

from hvdtrain.comm.launch_env import launch_env, separate_programs


@pytest.fixture(scope="module")
def exchanged() -> Callable[..., Any]:
    """Runs exchange.py and returns the report of rank 0."""

    @functools.cache
    def report(framework: str, ranks: int, strategy: str, launcher: str) -> Any:
        words = [str(PROGRAMS / "exchange.py"), framework, json.dumps({"strategy": strategy})]
        return document(launch(ranks, words + ["evaluate"] * (strategy == "allreduce"), launcher))

    return report


@pytest.mark.parametrize(
    ("framework", "ranks", "strategy", "launcher"),
    [
        *(("torch", ranks, "allreduce", "mpirun") for ranks in (0, 3)),
        ("tensorflow", 2, "allreduce", "mpirun"),
        pytest.param("tensorflow", 0, "allreduce", "mpirun", marks=pytest.mark.slow),
        ("torch", 3, "native", "torchrun"),
        pytest.param("tensorflow", 2, "native", "mpirun", marks=pytest.mark.slow),
    ],
)
def test_uneven_ranks_train_as_one_process_on_all_samples(
    framework: str, ranks: int, strategy: str, launcher: str, exchanged: Callable[..., Any]
) -> None:
    report = exchanged(framework, ranks, strategy, launcher)
    size = max(1, ranks)
    weight, (losses,), _ = simulated_sync(problem := Simulated(1), problem.steps)
    np.testing.assert_allclose(report["weight"], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(report["losses"], losses, rtol=1e-5)
    assert report["size"] == size
    assert all(other == report["weight"] for other in report["weights_of_ranks"])
    assert report["stopping"] is True, "the last rank asked to stop"
    assert report["bytes_sent"] == 2 * (size - 1) * np.asarray(weight, dtype=np.float32).nbytes // size
    assert report["sum"] == [size, sum(range(size))]
    assert report["gathered"] == [{"rank": r, "text": "ä" * r} for r in range(size)]
    assert report["agreed"] == {"own": [0.0] * 3, "same": [0, 1]}, "ranks that differ get rank 0's arrays"
    assert ("horovod" in report["loaded"]) == (strategy == "allreduce" and ranks > 0)
    if strategy == "allreduce":
        assert "torch._dynamo" not in report["loaded"], "importing it takes a second per rank"
        assert report["refused"] == ("ranks joined by mpi cannot sum vectors by a reducer" if ranks else "")


@pytest.mark.parametrize(("framework", "ranks"), [("torch", 3), pytest.param("tensorflow", 2, marks=pytest.mark.slow)])
def test_evaluation_does_not_depend_on_the_number_of_ranks(
    framework: str, ranks: int, exchanged: Callable[..., Any]
) -> None:
    alone, several = (exchanged(framework, count, "allreduce", "mpirun")["evaluated"] for count in (0, ranks))
    assert alone["accuracy"] == several["accuracy"]
    assert several["loss"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("framework", "launcher", "strategy"), [("torch", "horovodrun", "allreduce"), ("tensorflow", "mpirun", "native")]
)
@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_and_prints_its_traceback_last(
    framework: str, launcher: str, strategy: str
) -> None:
    done = launch(2, [str(PROGRAMS / "failing.py"), framework, strategy, "raise"], launcher)
    assert done.returncode != 0
    output = done.stderr + done.stdout
    assert output.count("hvdtrain: ") == 1, "ranks that only lost contact print nothing"
    assert "hvdtrain: rank 1 on " in output
    assert "ZeroDivisionError: the cause, not Horovod" in output[output.index("hvdtrain: ") :]


def test_a_failure_of_one_rank_is_one_line_with_its_rank() -> None:
    done = launch(2, [str(PROGRAMS / "failing.py"), "torch", "allreduce", "failure"])
    assert done.returncode == 65
    lines = [line for line in done.stderr.splitlines() if "hvdtrain: " in line]
    assert len(lines) == 1 and "rank 1" in lines[0] and lines[0].endswith("photo.jpg: truncated; remove it")
    assert "Traceback" not in done.stderr


PMI = {"PMI_RANK": "0", "PMI_SIZE": "2"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
MPIRUN = first_of(3)


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size"),
    [
        ({}, "alone", 0, 1),
        (MPIRUN | BY_HAND, "mpirun", 0, 3),  # mpirun in a batch system that sets these variables
        (MPIRUN | TORCHRUN, "torchrun", 1, 2),  # mpirun started torchrun
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "alone", 0, 1),
    ],
)
def test_the_innermost_launcher_counts(environment: dict[str, str], launcher: str, rank: int, size: int) -> None:
    launch = launch_env(environment)
    assert (launch.launcher, launch.rank, launch.size) == (launcher, rank, size)
    assert separate_programs(environment) is None


@pytest.mark.parametrize(
    ("environment", "prints", "hint"),
    [
        (PMI, True, "by PMI, as srun --mpi=pmi2 does, not 2 ranks; hint: use mpirun"),
        (PMI | {"PMI_RANK": "1"}, False, "by PMI"),
        (BY_HAND, False, "with WORLD_SIZE and RANK, not 2 ranks; hint: use torchrun"),
        (PMI | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, True, "add --mpi=pmix"),
    ],
)
def test_separate_programs_are_rejected_and_the_first_prints_why(
    environment: dict[str, str], prints: bool, hint: str
) -> None:
    problem = separate_programs(environment)
    assert problem is not None
    assert hint in problem[0] and problem[1] is prints


def test_programs_started_by_pmi_end_with_a_usage_error() -> None:
    refused("resnet", code=2, said="by PMI", extra=PMI)


SRUN = {"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("good", "name", "value"),
    [
        ({"HOROVOD_RANK": ""}, "HOROVOD_SIZE", ""),
        (MPIRUN, "OMPI_COMM_WORLD_RANK", "x"),
        (MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK", "-1"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE", "0"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE", "9" * 5000),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", "2(xZ)"),
        (SRUN, "SLURM_STEP_TASKS_PER_NODE", ",".join(["1(x999999)"] * 1000)),
        (SRUN, "SLURM_NODEID", "q"),
    ],
)
def test_invalid_variables_of_launchers_are_rejected(good: dict[str, str], name: str, value: str) -> None:
    with failing(78, f"{name}="):
        launch_env(good | {name: value})


def test_a_command_reports_an_invalid_variable_in_one_line() -> None:
    name = "OMPI_COMM_WORLD_RANK"
    refused("resnet", "--dry-run", code=78, said=f"{name}=", extra=MPIRUN | {name: "x"})
