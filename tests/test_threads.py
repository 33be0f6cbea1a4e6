"""Threads per rank follow the CPU quota, the affinity, the ranks per host and the work, unless the user sets them."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest
from conftest import LIMIT_S, ROOT, command, environment, failing

from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.models import resnet
from hvdtrain.system import cgroup
from hvdtrain.training import threads

BOUND = {"OMPI_MCA_orte_bound_at_launch": "1"}


@pytest.mark.parametrize(
    ("host_cores", "cores", "ranks", "variables", "expected"),
    [
        (16, 16, 1, {}, 16),
        (16, 16, 4, {}, 4),
        (1.5, 1.5, 1, {}, 1),
        (16, 4, 2, {}, 2),  # taskset, a cpuset
        (16, 1, 2, BOUND, 1),  # bound to cores
        (16, 8, 2, BOUND, 8),  # bound to sockets
        (16, 8, 8, BOUND, 2),  # four ranks per socket
        (0.5, 0.5, 2, BOUND, 1),
        (16, 4, 2, {"SLURM_CPU_BIND_LIST": "0xF,0xF0"}, 4),  # srun --cpus-per-task=4
        (16, 4, 2, {"SLURM_CPU_BIND_LIST": "0xF"}, 2),  # both ranks have all of the job's cores
        (16, 4, 2, {"SLURM_CPU_BIND_LIST": ""}, 2),
        (2, 2, 1000, {}, 1),
        (16, 16, 4, {"OMP_NUM_THREADS": "5"}, 5),
        (16, 16, 4, {"OMP_NUM_THREADS": "5,2"}, 5),  # the second number is for nested regions
        (16, 16, 4, {"OMP_NUM_THREADS": ""}, 4),
        (0.5, 0.5, 1, {"OMP_NUM_THREADS": "2"}, 2),
        (0.5, 0.5, 1, {"OMP_NUM_THREADS": "2", cgroup.LAUNCHERS_OWN: "1"}, 1),
    ],
)
def test_ranks_share_the_cores_of_the_host(
    host_cores: float,
    cores: float,
    ranks: int,
    variables: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "host_cores", lambda: host_cores)
    monkeypatch.setattr(cgroup, "process_cores", lambda: cores)
    env = LaunchEnv(launcher="mpirun", size=ranks, local_size=ranks)
    assert threads.per_rank(0, env, math.inf, variables).count == expected
    assert threads.per_rank(3, env, math.inf, variables).count == 3


@pytest.mark.parametrize("threads_variable", ["0", "x", "²", "9" * 5000])
def test_invalid_numbers_of_threads_are_rejected(threads_variable: str) -> None:
    with failing(78, "OMP_NUM_THREADS="):
        threads.per_rank(0, LaunchEnv(launcher="alone"), math.inf, {"OMP_NUM_THREADS": threads_variable})


def test_small_layers_get_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "process_cores", lambda: 16.0)
    spec = resnet.ResNetSpec(channels=3, classes=1000)
    assert 36 * resnet.multiply_adds(spec, 224, 224) == pytest.approx(3.66e9, rel=0.01), "as published for ResNet-34"
    work = [n * threads.LEAST_WORK for n in (0, 0.9, 2, 99)]
    assert [threads.per_rank(0, LaunchEnv(launcher="alone"), each, {}).count for each in work] == [1, 1, 2, 16]


def test_the_users_wait_policy_is_kept() -> None:
    variables = {"OMP_WAIT_POLICY": "active"}
    threads.Threads(2, "").use(variables)
    assert variables == {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "2"}


def ranks_line(*before: str, ranks: int = 0) -> str:
    """Return a dry run's line about ranks, for a model with work for all cores."""
    variables = environment()
    del variables["OMP_NUM_THREADS"]
    wide = ["-m", "hvdtrain.resnet", "--dry-run", "--framework", "torch", "--image-size", "128"]
    done = subprocess.run(
        [*before, *command(ranks, wide)], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("ranks  "))


@pytest.mark.root
def test_a_quota_of_half_a_core_is_one_thread(half_core: tuple[Path, list[str]]) -> None:
    assert ranks_line(*half_core[1]).endswith("torch, 1 thread each (0.5 cores here)")
    assert ranks_line(*half_core[1], ranks=2).endswith("torch, 1 thread each (0.5 cores here for 2 ranks)")


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 thread each (1 core here)" in ranks_line("taskset", "-c", str(min(os.sched_getaffinity(0))))
