"""`--strategy native`: data parallelism of PyTorch and TensorFlow under hvdtrain's launchers, without Horovod."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_S, PROGRAMS, Cluster, alone, document, failing, finished, launch, trainings
from runs import read_run
from test_resnet_train import newest_arrays, started, wait_for_steps

from hvdtrain import strategies
from hvdtrain.comm.rendezvous import reserved_port
from hvdtrain.config.options import TrainConfig

# A small learning rate and blocks that start as the identity keep equal programs equal (see test_resnet_train.py).
CALM = ["--image-size", "16", "--width", "0.125", "--batch-size", "96", "--lr", "0.005", "--epochs", "1", "--json"]
WAYS = {"horovod": [], "native": ["--strategy", "native"], "half": ["--strategy", "native:hook=fp16"]}


def report(folder: Path) -> dict[str, Any]:
    """Return a run's records by type, its last summary and its manifest."""
    records = read_run(folder)
    return {
        **records,
        "summary": records["summary"][-1],
        "manifest": json.loads((folder / "manifest.json").read_text()),
    }


def losses(run: dict[str, Any]) -> list[float]:
    return [step.loss for step in run["step"]]


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with PyTorch on two ranks, several times in one launch."""
    folder, flags = tmp_path_factory.mktemp("torch"), [*CALM, "--framework", "torch", "--run-dir"]
    jobs: list[dict[str, Any]] = [{"flags": [*flags, str(folder / name), *way]} for name, way in WAYS.items()]
    codes, output = trainings(2, jobs)
    assert codes == [0] * 3, output
    return folder


def test_native_trains_as_allreduce(torch: Path) -> None:
    """TensorFlow's is compared with one process in test_ranks.py."""
    own, horovod = (report(torch / name) for name in ("native", "horovod"))
    np.testing.assert_allclose(losses(own), losses(horovod), rtol=1e-6)
    assert own["manifest"]["backend"] == "gloo"
    assert own["summary"].bytes_sent == horovod["summary"].bytes_sent > 0
    assert own["summary"].validation_scores == horovod["summary"].validation_scores
    assert own["summary"].test_loss == pytest.approx(horovod["summary"].test_loss, rel=1e-5)
    assert all(step.communication_s is not None for step in own["step"])


def test_the_fp16_hook_stays_close_and_sends_half(torch: Path) -> None:
    whole, half = report(torch / "native"), report(torch / "half")
    np.testing.assert_allclose(losses(half), losses(whole), rtol=1e-3)
    assert losses(half) != losses(whole)
    assert 2 * half["summary"].bytes_sent == whole["summary"].bytes_sent


def test_sigterm_still_makes_a_checkpoint_with_tensorflow(tmp_path: Path) -> None:
    """TensorFlow's coordination service installs its own signal handler, which hvdtrain replaces."""
    with started(0, tmp_path, *CALM, "--strategy", "native", "--framework", "tensorflow", "--epochs", "50") as process:
        wait_for_steps(process, tmp_path, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75
    assert newest_arrays(tmp_path)


@pytest.mark.parametrize(("framework", "launcher"), [("torch", "torchrun"), ("tensorflow", "mpirun")])
@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named_once(framework: str, launcher: str, tmp_path: Path) -> None:
    done = launch(2, [str(PROGRAMS / "failing.py"), framework, "native", str(tmp_path / "died")], launcher)
    assert done.returncode != 0
    output = done.stderr + done.stdout
    assert output.count("hvdtrain: ") == 1
    assert "rank 1 on " in output
    assert "died unexpectedly" in output


@pytest.mark.slow
def test_ranks_restarted_by_torchrun_ignore_the_old_entries_of_its_store() -> None:
    words = ["torchrun", "--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}"]
    done = finished([*words, str(PROGRAMS / "torchrun_restarted.py")])
    assert done.returncode == 0, done.stderr
    gathered = [json.loads(line)["told"] for line in done.stdout.splitlines()]
    assert gathered == [[[0, start], [1, start]] for start in ("0", "1")]


def free_port() -> int:
    with reserved_port(24_000) as one:
        return int(one.getsockname()[1])


def test_horovods_strategy_is_rejected_under_torchrun(tmp_path: Path) -> None:
    start = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    start |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    done = alone("resnet", "--run-dir", str(tmp_path / "run"), *CALM, extra=start)
    assert done.returncode == 78 and not (tmp_path / "run").exists()
    assert done.stderr.count("\n") == 1


def test_hooks_require_pytorch() -> None:
    with failing(78, "hook=fp16"):
        strategies.resolve(TrainConfig(strategy="native:hook=fp16", framework="tensorflow"))


def test_a_port_in_use_is_skipped() -> None:
    with reserved_port(23_000) as one:
        taken = one.getsockname()[1]
        with reserved_port(taken) as other:
            assert other.getsockname()[1] > taken >= 23_000
    with failing(69, "no free TCP port"):
        reserved_port(30_000)


@pytest.mark.root
@pytest.mark.parametrize(("framework", "ranks"), [("torch", 3), ("tensorflow", 2)])
@pytest.mark.slow
def test_between_hosts_the_links_interface_carries_the_data(
    framework: str, ranks: int, cluster: Cluster, tmp_path: Path
) -> None:
    words = [*f"launch/mpirun.sh -H a:1,b:{ranks - 1} python -m hvdtrain.resnet --strategy native".split(), *CALM]
    words += ["--framework", framework, "--run-dir", str(tmp_path / "run"), "--batch-size", "64"]
    summary = document(cluster.on("a", *words))
    assert (summary["hosts"], summary["ranks"]) == (2, ranks)
    made, waits = report(tmp_path / "run"), framework == "torch"
    assert made["manifest"]["backend"] == {"torch": "gloo", "tensorflow": "grpc"}[framework]
    waited = [step.communication_s is not None for step in made["step"]]
    assert waited == [waits] * len(waited), "TensorFlow waits inside one graph"
    # A ring over three ranks crosses the link between two hosts once each way with 2(p-1)/p of the payload.
    for host in summary["nic_bytes"]:
        assert host["nic"] == "eth0"
        assert summary["bytes_sent"] < host["sent_bytes"] < 3 * summary["bytes_sent"]
        assert summary["bytes_sent"] < host["received_bytes"] < 3 * summary["bytes_sent"]


@pytest.mark.root
@pytest.mark.slow
def test_ranks_that_compute_hardly_send(cluster: Cluster) -> None:
    """Only heartbeats of the sentinel and of TensorFlow's coordination service are sent."""
    words = ["launch/mpirun.sh", "-H", "a:1,b:1", "python", str(PROGRAMS / "native_idle.py"), "tensorflow"]
    counters = document(cluster.on("a", *words))
    assert counters["sent_bytes"] < 0.001 * 4 * 10e6 / 8, "0.1 % of 10 Mbit/s in four seconds"
