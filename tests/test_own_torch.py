"""hvdtrain.torch on real ranks: calls have the same results on Horovod and on hvdtrain's TCP backend."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import horovod.torch
import pytest
import torch
from conftest import PROGRAMS, document, launch
from torch import nn

from hvdtrain import resnet
from hvdtrain.torch import api
from hvdtrain.torch.vectors import Parameters

WITHOUT_HOROVOD = ["-W", "ignore", str(PROGRAMS / "without_horovod.py")]


def calls(launcher: str, strategy: str = "", *words: str) -> Any:
    extra = {"HVDTRAIN_STRATEGY": strategy} if strategy else {}
    return document(launch(2, ["-W", "ignore", str(PROGRAMS / "own_calls.py"), *words], launcher, extra))


@pytest.fixture(scope="module")
def on_horovod() -> Any:
    return calls("mpirun")


@pytest.mark.parametrize(
    ("launcher", "strategy", "words"),
    [("forks", "", []), pytest.param("horovodrun --gloo", "powersgd", ["late"], marks=pytest.mark.slow)],
)
def test_both_backends_return_the_same_results(launcher: str, strategy: str, words: list[str], on_horovod: Any) -> None:
    on_tcp = calls(launcher, strategy, *words)
    assert (on_tcp["backend"], on_horovod["backend"]) == ("tcp", "Horovod")
    assert set(on_tcp["needs Horovod"]) == {"Adasum"}
    assert on_tcp["ranks"] == on_horovod["ranks"]


@pytest.mark.slow
def test_calls_return_the_same_results_without_horovod(on_horovod: Any, tmp_path: Path) -> None:
    """The home folder of many containers cannot be written."""
    extra = {"HOME": "/proc", "TMPDIR": str(tmp_path)}
    on_tcp = document(launch(2, [*WITHOUT_HOROVOD, str(PROGRAMS / "own_calls.py")], "torchrun", extra))
    assert list(tmp_path.glob("hvdtrain-*.key"))
    assert set(on_tcp["needs Horovod"]) == {"Adasum"}
    for own, expected in zip(on_tcp["ranks"], on_horovod["ranks"], strict=True):
        own["is"][1:3] = expected["is"][1:3]  # whether Horovod was built with MPI and Gloo
        assert own == expected


def test_functions_have_the_arguments_of_horovods() -> None:
    for name, function in vars(horovod.torch).items():
        if name.startswith("_") or not inspect.isfunction(function) or name == "check_extension":
            continue
        own = getattr(api, name)
        expected, actual = (inspect.signature(each).parameters for each in (function, own))
        if name not in ("init", "shutdown"):
            assert list(actual)[: len(expected)] == list(expected), name


def test_without_horovod_its_own_transport_is_an_error_of_one_line() -> None:
    script = [*WITHOUT_HOROVOD, str(PROGRAMS / "own_calls.py")]
    done = launch(2, script, "mpirun")
    assert done.returncode and "Traceback" not in done.stderr
    assert "hint: run `make setup` in a checkout, or `hvdtrain build-horovod`" in done.stderr
    done = launch(2, [*WITHOUT_HOROVOD, str(resnet.__file__), "--dry-run", "--epochs=1"], "mpirun")
    assert done.returncode == 0, "a dry run needs no Horovod"


def test_gradients_are_sent_during_backward_once_steps_are_alike() -> None:
    """The program compares the weights with those of one process, also for scripts that change gradients later."""
    overlapped = document(launch(2, [str(PROGRAMS / "own_overlap.py")], "forks"))
    learned, given_up = [False, False, True], [False, False]
    for script in ("plain", "accumulating", "with_useless_backward", "with_unused_layers"):
        assert overlapped[script][:3] == learned and all(overlapped[script][2:]), script
    for script in ("with_useless_backward_late", "clipping_late", "clamping_data_late", "one_rank_accumulates_more"):
        assert overlapped[script][:3] == learned and overlapped[script][-2:] == given_up, script
    assert not any(overlapped["clamping_data"])


def test_an_optimizer_trains_as_the_strategy_and_resumes_exactly() -> None:
    """The program compares, and raises if a check fails. It needs no Horovod."""
    assert document(launch(3, [*WITHOUT_HOROVOD, str(PROGRAMS / "own_optimizer.py")], "forks"))["strategies"]


@pytest.mark.parametrize(
    ("launcher", "strategy"), [pytest.param("mpirun", "", marks=pytest.mark.slow), ("forks", "hierarchical")]
)
def test_ranks_with_different_numbers_of_batches_join(launcher: str, strategy: str) -> None:
    """The program compares with one process, on Horovod and on the TCP backend."""
    extra = {"HVDTRAIN_STRATEGY": strategy} if strategy else {}
    done = launch(2, ["-W", "ignore", str(PROGRAMS / "own_join.py")], launcher, extra)
    assert (done.returncode, done.stdout.count("joined")) == (0, 2), done.stderr


def test_gradients_return_in_the_memory_order_of_the_parameters() -> None:
    """Fused optimizers rely on it, for example with channels_last kernels."""
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([kernel], lr=0.5, fused=True)
    strategy: Any = None  # which nothing is reported to
    vectors = Parameters(
        {"kernel": kernel}, lambda _: optimizer.step(), strategy, ranks=1, divided=True, careful=False, overlap=None
    )
    for _ in range(2):
        kernel.grad = torch.randn_like(kernel)
        expected = kernel.detach() - 0.5 * kernel.grad
        vectors.vector()
        vectors.apply(0.5)
        torch.testing.assert_close(kernel.detach(), expected)


def test_gradients_of_distributed_data_parallel_are_summed_by_a_strategy() -> None:
    """Exact sums equal PyTorch's, whatever the script does with DDP. A residual arrives in later steps and is saved."""
    report = document(launch(2, ["-W", "ignore", str(PROGRAMS / "own_summing.py")], "forks"))
    for kind, distance in report["exact"].items():
        assert distance < 1e-6, kind
    assert report["reducers"]["bf16"][0] < 2**-8
    for strategy in ("powersgd:rank=4", "int4"):
        worst, of_the_sum = report["reducers"][strategy]
        assert 0 < 5 * of_the_sum < worst < 0.2, strategy
    assert all(report["resumed"].values()), report["resumed"]
    assert "not use 2 of 16 parameters, such as layers.7.weight; hint:" in report["refusal"]


def test_ranks_of_torch_multiprocessing_are_one_job() -> None:
    done = launch(0, ["-W", "ignore", str(PROGRAMS / "own_summing.py")])
    assert done.returncode and "process_group= has 1 ranks" in done.stderr, done.stderr
