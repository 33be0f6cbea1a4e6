"""Training on this machine's GPUs. `make gpu-check` runs these tests without a network or Horovod.

HVDTRAIN_GPU_TESTS=cpu runs them on the CPU, to test the tests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, SMALL, document, finished
from runs import read_run

from hvdtrain import records, strategies

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("HVDTRAIN_GPU_TESTS") == "cpu" else "gpu"
TRAIN = ["-m", "hvdtrain.resnet", "--json", "--device", DEVICE, *SMALL]


def gpus() -> list[str]:
    """The names of this machine's NVIDIA GPUs."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return listed.stdout.splitlines() if listed.returncode == 0 else []


@pytest.fixture(autouse=True)
def gpu() -> None:
    if DEVICE == "gpu" and not gpus():
        pytest.skip("no NVIDIA GPU here")


def train(*flags: str, ranks: int = 1, framework: str = "torch") -> Any:
    """Train ResNet-34 under torchrun, which needs no MPI. Returns the summary."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    launcher = [*torchrun, sys.executable] if ranks > 1 else []
    return document(finished([sys.executable, *launcher, *TRAIN, "--framework", framework, *flags]))


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.005), ("bf16", 0.05), ("fp16", 0.05)])
def test_losses_equal_those_of_the_cpu(framework: str, precision: str, tolerance: float, tmp_path: Path) -> None:
    """GPUs round fp32 convolutions to TF32, which needs the tolerance of 0.005."""
    losses = []
    for device, at in (("cpu", "fp32"), (DEVICE, precision)):
        folder = tmp_path / f"{len(losses)}"
        flags = ["--device", device, "--precision", at, "--epochs", "1", "--epoch-samples", "240", "--lr", "0.01"]
        train(*flags, "--run-dir", str(folder), framework=framework)
        losses.append([step.loss for step in read_run(folder)["step"][:4]])
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)


@pytest.mark.parametrize("strategy", sorted({*strategies.ALGORITHMS, *strategies.REDUCERS} - {"allreduce", "native"}))
def test_two_ranks_share_a_gpu_with_every_strategy(strategy: str, tmp_path: Path) -> None:
    """The TCP backend sends the gradients, so two ranks can use one GPU."""
    folder = tmp_path / "run"
    train("--strategy", strategy, "--epochs", "1", "--run-dir", str(folder), ranks=2)
    assert np.isfinite([step.loss for step in read_run(folder)["step"]]).all()


def test_ranks_that_share_a_gpu_sum_in_its_memory() -> None:
    """The program compares with NumPy, for vectors of several lengths, two of which are longer than the one before."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    device = "cpu" if DEVICE == "cpu" else "cuda"
    done = finished([sys.executable, *torchrun, str(PROGRAMS / "gpu_sums.py"), device])
    assert done.stdout.count("equal") == 3


def test_native_trains_with_one_rank_per_gpu(tmp_path: Path) -> None:
    ranks = 2 if DEVICE == "cpu" else len(gpus())
    if ranks < 2:
        pytest.skip("NCCL needs a GPU for each rank, and there is one")
    folder = tmp_path / "run"
    train("--strategy", "native", "--epochs", "1", "--run-dir", str(folder), ranks=ranks)
    assert np.isfinite([step.loss for step in read_run(folder)["step"]]).all()


def test_energy_of_the_gpu_is_recorded(tmp_path: Path) -> None:
    if DEVICE == "cpu":
        pytest.skip("no NVML sensor without a GPU")
    folder = tmp_path / "run"
    train("--monitor", "power", "--epochs", "2", "--run-dir", str(folder))
    (path,) = folder.glob("monitors/*.jsonl")
    samples = [record for record in records.read(path) if record.type == "sample"]
    assert sum(joules for sample in samples for device, joules in sample.energy_j.items() if "gpu" in device) > 0
