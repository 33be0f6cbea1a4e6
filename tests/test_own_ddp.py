"""`python -m hvdtrain.ddp` and `hvd.attach`: scripts with DistributedDataParallel exchange by a strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import PROGRAMS, Cluster, document, launch

SCRIPT = str(PROGRAMS / "own_ddp.py")


def ddp(strategy: str, *words: str) -> list[str]:
    return ["-W", "ignore", "-m", "hvdtrain.ddp", "--strategy", strategy, *words]


@pytest.mark.parametrize(
    ("strategy", "launcher"), [("hierarchical", "torchrun"), ("local-sgd:every=1", "forks"), ("auto", "forks")]
)
def test_exact_exchanges_equal_one_process(strategy: str, launcher: str, tmp_path: Path) -> None:
    """With accumulation, clipping, a scheduler and a GradScaler; SGD averaged after each step is exact too.

    The run is recorded, with whatever strategy.
    """
    extra = {"HVDTRAIN_RUN_DIR": str(tmp_path / "run"), "HVDTRAIN_RECORD": "1"}
    done = launch(2, ddp(strategy, SCRIPT, "10"), launcher, extra)
    assert (tmp_path / "run/COMPLETE").exists(), done.stderr
    steps = (tmp_path / "run/metrics/rank0000.jsonl").read_text().splitlines()
    assert sum('"type":"step"' in line for line in steps) == 10
    report = document(done)
    assert all(report["equal"])
    assert report["worst"] < 1e-6 < report["moved"]
    assert done.stderr.count("replaces the script's communication hook fp16_compress_hook") == 1


@pytest.mark.slow
def test_float64_is_summed_as_float64_or_a_line_says_that_it_is_not() -> None:
    done = launch(2, ddp("hierarchical", SCRIPT, "10", "--double"), "forks")
    assert document(done)["worst"] < 1e-15
    for strategy in ("powersgd:rank=4", "local-sgd:every=1"):
        done = launch(2, ddp(strategy, SCRIPT, "3", "--double"), "forks")
        report = document(done)
        assert report["worst"] < report["moved"]
        assert done.stderr.count(f"{strategy} exchanges float64 as float32") == 1


def test_evaluations_and_checkpoints_see_equal_weights_and_a_run_resumes(tmp_path: Path) -> None:
    """Also in the middle of a round, and if one rank evaluates or saves alone."""
    kept = str(tmp_path / "checkpoint.pt")
    for steps in ("7", "14"):
        report = document(launch(2, ddp("local-sgd:every=4,staleness=1,parts=2+int8", SCRIPT, steps, kept), "forks"))
        assert all(report["equal"])
        assert report["worst"] < report["moved"]


def test_a_line_of_the_script_does_the_same() -> None:
    done = launch(2, ["-W", "ignore", str(PROGRAMS / "own_attached.py")], "forks")
    for strategy, distance in document(done).items():
        assert distance < 1e-6, strategy


def test_what_has_no_distributed_data_parallel_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "dist.init_process_group('gloo')\n"
        "net = torch.nn.Linear(4, 4)\n"
        "fully_shard(net)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net(torch.randn(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = launch(2, ddp("local-sgd", str(script)), "forks")
    assert done.returncode
    assert "FSDP, DeepSpeed and tensor parallelism are not supported; hint: " in done.stderr
    done = launch(0, ["-m", "hvdtrain.ddp", str(tmp_path / "none.py")])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no such script; hint: " in done.stderr
    assert json.dumps(done.stdout) == '""'


@pytest.mark.root
@pytest.mark.slow
def test_torchrun_starts_on_two_hosts(cluster: Cluster) -> None:
    words = ["hvdtrain", "launch", "torchrun", "-H", "a:1,b:1", "--strategy"]
    done = cluster.on("a", *words, "auto:exact", SCRIPT, "30")  # after 12 steps DistributedDataParallel exchanges
    report = document(done)
    assert all(report["equal"])
    assert report["worst"] < 1e-6
    assert done.stderr.count("hvdtrain: strategy hierarchical: ") == 1
