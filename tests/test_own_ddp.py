"""`python -m hvdtrain.ddp` and `hvd.attach`: scripts with DistributedDataParallel exchange by a strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import PROGRAMS, document, launch

SCRIPT = str(PROGRAMS / "own_ddp.py")


def ddp(strategy: str, *words: str) -> list[str]:
    return ["-W", "ignore", "-m", "hvdtrain.ddp", "--strategy", strategy, *words]


@pytest.mark.parametrize("strategy", ["hierarchical", "local-sgd:every=1", "auto"])
def test_exact_exchanges_equal_one_process(strategy: str) -> None:
    """With accumulation, clipping, a scheduler and a GradScaler; SGD averaged after each step is exact too."""
    report = document(launch(2, ddp(strategy, SCRIPT, "10"), "torchrun"))
    assert all(report["equal"])
    assert report["worst"] < 1e-6 < report["moved"]


def test_evaluations_and_checkpoints_see_equal_weights_and_a_run_resumes(tmp_path: Path) -> None:
    """Also in the middle of a round, and if one rank evaluates or saves alone."""
    kept = str(tmp_path / "checkpoint.pt")
    for steps in ("7", "14"):
        report = document(launch(2, ddp("local-sgd:every=4,staleness=1+int8", SCRIPT, steps, kept), "torchrun"))
        assert all(report["equal"])
        assert report["worst"] < report["moved"]


def test_a_line_of_the_script_does_the_same() -> None:
    done = launch(2, ["-W", "ignore", str(PROGRAMS / "own_attached.py")], "torchrun")
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
    done = launch(2, ddp("local-sgd", str(script)), "torchrun")
    assert done.returncode
    assert "FSDP, DeepSpeed and tensor parallelism are not supported; hint: " in done.stderr
    done = launch(0, ["-m", "hvdtrain.ddp", str(tmp_path / "none.py")])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no such script; hint: " in done.stderr
    assert json.dumps(done.stdout) == '""'
