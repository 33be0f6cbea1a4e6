"""hvdtrain.torch on real ranks: Horovod's calls, carried by Horovod and by our streams, give the same."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from conftest import PROGRAMS, ROOT, document, launch
from torch import nn

from hvdtrain.torch.vectors import Parameters


@functools.cache
def calls(ranks: int, launcher: str, strategy: str = "", *words: str) -> Any:
    extra = {"HVDTRAIN_STRATEGY": strategy} if strategy else {}
    return document(launch(ranks, ["-W", "ignore", str(PROGRAMS / "own_calls.py"), *words], launcher, extra))


@pytest.mark.parametrize(
    ("ranks", "launcher", "words"),
    [(2, "mpirun", ["late"]), (2, "torchrun", []), (2, "horovodrun --gloo", [])],
)
def test_every_call_gives_on_streams_what_it_gives_on_horovod(ranks: int, launcher: str, words: list[str]) -> None:
    ours = calls(ranks, launcher, "" if words or launcher == "torchrun" else "powersgd", *words)
    horovods = calls(ranks, "mpirun")
    assert (ours["carried"], horovods["carried"]) == ("streams", "Horovod")
    assert set(ours["needs Horovod"]) == {"Adasum", "join"}
    assert all("unset HVDTRAIN_STRATEGY" in error for error in ours["needs Horovod"].values())
    for rank, (mine, theirs) in enumerate(zip(ours["ranks"], horovods["ranks"], strict=True)):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == value, f"{name} on rank {rank}"


def test_the_page_lists_every_name_of_horovods_module() -> None:
    page = (ROOT / "docs" / "reference" / "horovod-compatibility.md").read_text()
    states = {"Horovod's": True, "ours": False, "raises": None}
    rows = re.findall(r"^\| `horovod\.torch` \| ([\w']+) \| (.*) \|$", page, re.M)
    told = {name: states[state] for state, listed in rows for name in re.findall(r"`(\w+)`", listed)}
    assert told == calls(2, "mpirun")["same"]


def test_an_optimizer_on_a_strategy_does_what_the_loop_does_and_what_users_expect() -> None:
    """The program compares and raises: see its checks."""
    done = launch(3, [str(PROGRAMS / "own_optimizer.py")], "torchrun")
    assert len(document(done)["done"]) == 17


def test_gradients_come_back_in_the_order_of_the_parameters_memory() -> None:
    """By which fused optimizers go: of channels_last kernels, say."""
    kernel = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([kernel], lr=0.5, fused=True)
    vectors = Parameters({"kernel": kernel}, lambda: optimizer.step(), ranks=1, divided=True, careful=False)
    for _ in range(2):
        kernel.grad = torch.randn_like(kernel)
        expected = kernel.detach() - 0.5 * kernel.grad
        vectors.vector()
        vectors.apply(0.5)
        torch.testing.assert_close(kernel.detach(), expected)


def test_a_hook_sums_the_buckets_of_distributeddataparallel() -> None:
    """Several buckets. Exact sums are PyTorch's own; what a reducer leaves out comes in a later step."""
    told = document(launch(2, [str(PROGRAMS / "own_hook.py")], "torchrun"))
    assert told["hierarchical"][0] < 1e-6
    assert told["bf16"][0] < 2**-8
    worst, of_the_sum = told["powersgd:rank=4"]
    assert 0 < 5 * of_the_sum < worst < 0.1
    assert "a reducer alone" in told["refused"]
