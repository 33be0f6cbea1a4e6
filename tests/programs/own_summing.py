"""Gradients of DistributedDataParallel that a strategy sums, next to those of plain DDP; rank 0 prints JSON.

Ranks count as hosts. Without a launcher, torch.multiprocessing starts two ranks, which at last have groups of one rank.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import rank_per_host  # noqa: F401 (each rank is a host)
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hvdtrain.torch as hvd

WIDTH, STEPS = 64, 8


class Net(torch.nn.Module):
    """Eight layers. `last`: how many of them are used; `reentrant`: recomputes each, the first one twice."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, last: int = 8) -> torch.Tensor:
        if self.reentrant:
            x.requires_grad_()
        for layer in [*self.layers[:last], self.layers[0]] if self.reentrant else self.layers[:last]:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x))
        return x


class Scaled(Net):
    """Has buffers that no forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.full((3, 3), -torch.inf))
        self.register_buffer("places", torch.arange(5))

    def forward(self, x: torch.Tensor, last: int = 8) -> torch.Tensor:
        return super().forward(x * self.scale * self.places[1], last)


class Training:
    """A model, an optimizer and rows, with a strategy or with plain DDP."""

    def __init__(self, strategy: str, net: torch.nn.Module | None = None, **of_ddp: Any) -> None:
        self.net = net or Net()
        self.ddp = DistributedDataParallel(self.net, **of_ddp)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        if strategy:
            hvd.attach(self.ddp, self.optimizer, strategy=strategy)

    def loss(self, step: int, **named: Any) -> torch.Tensor:
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        return (self.ddp(torch.randn(8, WIDTH, generator=draw), **named) - 0.5).square().sum()

    def step(self, step: int, **named: Any) -> None:
        self.optimizer.zero_grad(set_to_none=step % 3 > 0)
        self.loss(step, **named).backward()
        self.optimizer.step()


def plain(strategy: str) -> torch.nn.Module:
    training = Training(strategy)
    for step in range(STEPS):
        training.step(step)
    if strategy:
        loss, sums = training.loss(0), training.ddp.reducer.sums
        assert sums._parameters.exchanges_in_backward, "steps are alike"
        loss.backward()
    return training.net


def accumulating(strategy: str) -> torch.nn.Module:
    """The last step has a backward pass more, and flags are set as contexts and as trainers do."""
    training = Training(strategy, gradient_as_bucket_view=True)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        passes = 3 if step == STEPS - 1 else 2
        for part in range(passes):
            training.ddp.require_backward_grad_sync = part == passes - 1
            training.loss(10 * step + part).backward()
        torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        with training.ddp.no_sync():
            training.loss(500 + step).backward()
        training.loss(600 + step).backward()
        training.optimizer.step()
    return training.net


def with_unused_layers(strategy: str) -> torch.nn.Module:
    """Ranks use different layers, and some layers are used by none: these must not decay."""
    training = Training(strategy, find_unused_parameters=True)
    for step in range(STEPS):
        training.step(step, last=7 if step % 2 == dist.get_rank() else 4)
    return training.net


def with_buffers(strategy: str) -> torch.nn.Module:
    """Ranks change a buffer in three ways after a forward pass. Rank 0's are sent before the next, and else never."""
    training, own, sends = Training(strategy, Scaled()), 1.0 + dist.get_rank(), list[int]()
    send, net = training.ddp._sync_module_buffers, training.net

    def counted(rank: int) -> None:
        sends.append(step)
        send(rank)

    training.ddp._sync_module_buffers = counted
    for step in range(STEPS):
        training.optimizer.zero_grad()
        loss = training.loss(step)
        if step == 1:
            net.scale.fill_(own)
        elif step == 3:
            net.scale.data += own
        elif step == 5:
            net.scale = torch.tensor(0.5 * own)
        loss.backward()
        training.optimizer.step()
    assert sends == ([0, 2, 4, 6] if strategy else [*range(STEPS)]), sends
    return net


def recomputing(strategy: str) -> torch.nn.Module:
    """Reentrant checkpoints compute gradients in backward passes within the backward pass, the first layer's twice."""
    training = Training(strategy, Net(reentrant=True), static_graph=True)
    for step in range(STEPS):
        training.step(step)
    return training.net


def two_models(strategy: str) -> torch.nn.Module:
    """Each has its own optimizer; the loss of one reaches both."""
    first, second = Training(strategy), Training(strategy)
    for step in range(STEPS):
        first.step(step)
        second.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        second.ddp(first.ddp(torch.randn(8, WIDTH, generator=draw))).square().sum().backward()
        second.optimizer.step()
        first.optimizer.zero_grad()
    return torch.nn.ModuleList([first.net, second.net])


def uneven(strategy: str) -> torch.nn.Module:
    """Rank 1 has three batches more."""
    training = Training(strategy)
    with Join([training.ddp]):
        for step in range(STEPS + 3 * dist.get_rank()):
            training.step(step)
    return training.net


def in_double(strategy: str) -> torch.nn.Module:
    torch.manual_seed(0)
    training = Training(strategy, torch.nn.Linear(WIDTH, 4, dtype=torch.float64))
    for step in range(STEPS):
        training.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        training.ddp(torch.randn(8, WIDTH, generator=draw, dtype=torch.float64)).square().sum().backward()
        training.optimizer.step()
    return training.net


KINDS: tuple[Callable[[str], torch.nn.Module], ...] = (
    plain,
    accumulating,
    with_unused_layers,
    with_buffers,
    recomputing,
    two_models,
    uneven,
    in_double,
)


def vector(net: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def everywhere(values: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    everyone = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return all(torch.equal(each, everyone[0]) for each in everyone)


def gradients(strategy: str) -> np.ndarray:
    """The gradients of each step as rows, at the first weights."""
    training, rows = Training(strategy), []
    for step in range(12):
        training.net.zero_grad()
        training.loss(step % 2).backward()
        rows.append(torch.cat([each.grad.flatten() for each in training.net.parameters()]).numpy().copy())
    return np.stack(rows)


def resumed(strategy: str) -> bool:
    """Whether a training that continues from checkpoints of each rank has the bits of one that was not interrupted."""
    training = Training(strategy)
    for step in range(6):
        training.step(step)
    kept = copy.deepcopy([training.ddp.state_dict(), training.optimizer.state_dict()])
    again = Training(strategy)
    again.ddp.load_state_dict(kept[0])
    again.optimizer.load_state_dict(kept[1])
    for each in (training, again):
        for step in range(6, 12):
            each.step(step)
    copy.deepcopy(again.ddp)
    return torch.equal(vector(training.net), vector(again.net))


def refusal() -> str:
    """What the second step of a script says whose loss leaves out a layer without find_unused_parameters=True."""
    training = Training("hierarchical")
    training.step(0, last=7)
    try:
        training.step(1)
    except RuntimeError as error:
        return str(error)
    return ""


def compare() -> None:
    report: dict[str, Any] = {"exact": {}, "reducers": {}, "resumed": {}, "refusal": refusal()}
    for kind in KINDS:
        expected, actual = vector(kind("")), vector(kind("hierarchical"))
        assert everywhere(actual), kind.__name__
        report["exact"][kind.__name__] = float((expected - actual).abs().max() / expected.abs().max())
    exact = gradients("")
    for strategy in ("bf16", "powersgd:rank=4", "int4"):
        reduced = gradients(strategy)
        assert everywhere(torch.from_numpy(reduced[-1])), strategy
        errors = np.linalg.norm(reduced - exact, axis=1) / np.linalg.norm(exact, axis=1)
        error_of_sum = np.linalg.norm((reduced - exact).sum(0)) / np.linalg.norm(exact.sum(0))
        report["reducers"][strategy] = [float(errors.max()), float(error_of_sum)]
    for strategy in ("hierarchical", "powersgd:rank=4", "int8"):
        report["resumed"][strategy] = resumed(strategy)
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)


def spawned(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert torch.allclose(vector(plain("")), vector(plain("hierarchical")), rtol=1e-5)
    groups = [dist.new_group([each]) for each in range(2)]
    Training("hierarchical", process_group=groups[rank])


if __name__ == "__main__" and "RANK" in os.environ:
    dist.init_process_group("gloo")
    compare()
    gc.collect()  # DistributedDataParallel has reference cycles, and Gloo's threads must end before the group
    dist.destroy_process_group()
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (f"{folder}/store",), 2)
