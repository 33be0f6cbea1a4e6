"""Check that scripts exchange during backward, also if their gradients change afterwards. Each check raises.

A script is a generator that yields when the optimizer steps. It runs on real ranks, and once more for all ranks in one
process, where gradients are averaged at each yield. Each rank has its own loopback address, as on several hosts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import rank_per_host  # noqa: F401 (each rank is a host)
import torch

import hvdtrain.torch as hvd

WIDTH, LR = 80, 0.05
Script = Callable[[torch.nn.Module, int], Iterator[None]]


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.Tanh())))


def loss(net: torch.nn.Module, step: int, rank: int, last: int = 8) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return (net[:last](torch.randn(8, WIDTH, generator=draw)) - 1).square().mean()


def plain(net: torch.nn.Module, rank: int) -> Iterator[None]:
    for step in range(8):
        net.zero_grad(set_to_none=step % 3 > 0)
        loss(net, step, rank).backward()
        yield


def accumulating(net: torch.nn.Module, rank: int) -> Iterator[None]:
    """The last step has a backward pass less."""
    for step in range(6):
        net.zero_grad()
        for part in range(2 if step < 5 else 1):
            loss(net, 10 * step + part, rank).backward()
        yield


def with_useless_backward(net: torch.nn.Module, rank: int) -> Iterator[None]:
    """As with two networks, whose losses both reach this one."""
    yield from _with_useless_backward(net, rank, range(8))


def with_useless_backward_late(net: torch.nn.Module, rank: int) -> Iterator[None]:
    yield from _with_useless_backward(net, rank, range(5, 6))


def _with_useless_backward(net: torch.nn.Module, rank: int, steps: range) -> Iterator[None]:
    for step in range(8):
        if step in steps:
            loss(net, 50 + step, rank).backward()
        net.zero_grad()
        loss(net, step, rank).backward()
        yield


def clipping_late(net: torch.nn.Module, rank: int) -> Iterator[None]:
    for step in range(8):
        net.zero_grad(set_to_none=step % 2 > 0)
        loss(net, step, rank).backward()
        if step > 4:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        yield


def clamping_data(net: torch.nn.Module, rank: int) -> Iterator[None]:
    """No version counter shows a change through `.data`."""
    for step in range(6):
        net.zero_grad()
        loss(net, step, rank).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-1e-4, 1e-4)
        yield


def clamping_data_late(net: torch.nn.Module, rank: int) -> Iterator[None]:
    for step in range(8):
        net.zero_grad()
        loss(net, step, rank).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(*((-1e-3, 1e-3) if step > 4 else (-1e3, 1e3)))
        yield


def with_unused_layers(net: torch.nn.Module, rank: int) -> Iterator[None]:
    """Ranks use different layers."""
    for step in range(8):
        net.zero_grad()
        loss(net, step, rank, last=8 if step < 4 or step % 2 == rank else 4).backward()
        yield


def one_rank_accumulates_more(net: torch.nn.Module, rank: int) -> Iterator[None]:
    for step in range(7):
        net.zero_grad()
        for part in range(2 if step > 3 and rank else 1):
            loss(net, 10 * step + part, rank).backward()
        yield


def alone(script: Script, ranks: int) -> np.ndarray:
    nets = [model() for _ in range(ranks)]
    for _ in zip(*(script(net, rank) for rank, net in enumerate(nets)), strict=True):
        with torch.no_grad():
            for each in zip(*(net.parameters() for net in nets), strict=True):
                gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in each]
                mean = torch.stack(gradients).sum(0) / ranks
                for one in each:
                    one -= LR * mean
                    one.grad = mean.clone()
    return torch.nn.utils.parameters_to_vector(nets[0].parameters()).detach().numpy()


def distributed(script: Script, strategy: str) -> tuple[np.ndarray, list[bool]]:
    """Return the weights, and for each step whether its gradients were sent during backward."""
    net, overlapped = model(), []
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=LR)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), strategy=strategy)
    for _ in script(net, hvd.rank()):
        overlapped.append(optimizer._parameters.exchanges_in_backward)
        optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    assert len(set(hvd.allgather_object(weights.tobytes()))) == 1, "the ranks' weights differ"
    return weights, overlapped


def skipping() -> None:
    """A step without exchange discards the gradients that backward has sent."""
    net = model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=LR), strategy="powersgd:rank=4")
    for step in range(6):
        optimizer.zero_grad()
        loss(net, step, hvd.rank()).backward()
        if step == 4:
            assert optimizer._parameters.exchanges_in_backward
            own = [parameter.grad.clone() for parameter in net.parameters()]
            with optimizer.skip_synchronize():
                optimizer.step()
            for parameter, gradient in zip(net.parameters(), own, strict=True):
                assert torch.equal(parameter.grad, gradient)
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        else:
            optimizer.step()


def loading(strategy: str) -> None:
    """A state that is loaded while gradients are sent during backward continues from where it was saved."""
    ends = []
    for loads in (False, True):
        net = model()
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=LR), strategy=strategy)
        for step in range(12):
            optimizer.zero_grad()
            loss(net, step, hvd.rank()).backward()
            if loads and step == 9:  # while they are being sent
                optimizer.state_dict()
            optimizer.step()
            if loads and step in (5, 8):
                optimizer.load_state_dict(optimizer.state_dict())
        ends.append(torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy())
    np.testing.assert_array_equal(*ends, err_msg=strategy)


def joining(strategy: str, exact: bool) -> None:
    """Rank 0 has 4 batches, twice, and rank 1 has 7. A rank that has joined counts as zeros."""
    net, one = model(), model()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=LR), strategy=strategy)
    alone = torch.optim.SGD(one.parameters(), lr=LR)
    for epoch in range(2):
        for step in range(7 if hvd.rank() else 4):
            optimizer.zero_grad()
            loss(net, 10 * epoch + step, hvd.rank()).backward()
            optimizer.step()
        assert hvd.join() == 1
        optimizer.synchronize_weights()
        if not strategy.startswith("local-sgd"):  # which also moves the weights of ranks that have joined
            hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        for step in range(7):
            alone.zero_grad()
            for rank in range(2):
                if rank or step < 4:
                    (loss(one, 10 * epoch + step, rank) / 2).backward()
            alone.step()
    weights, expected = (torch.nn.utils.parameters_to_vector(each.parameters()).detach() for each in (net, one))
    assert len(set(hvd.allgather_object(weights.numpy().tobytes()))) == 1, "the ranks' weights differ"
    difference = float((weights - expected).norm() / expected.norm())
    assert difference < (1e-6 if exact else 0.03), (strategy, difference)


hvd.init()
report = {}
scripts = [plain, accumulating, with_useless_backward, with_useless_backward_late, clipping_late, clamping_data]
scripts.append(clamping_data_late)
for script in (*scripts, with_unused_layers, one_rank_accumulates_more):
    weights, overlapped = distributed(script, "hierarchical")
    np.testing.assert_allclose(weights, alone(script, hvd.size()), rtol=2e-5, atol=2e-6, err_msg=script.__name__)
    report[script.__name__] = overlapped
one, _ = distributed(plain, "powersgd:rank=8")
np.testing.assert_allclose(np.linalg.norm(one - alone(plain, hvd.size())) / np.linalg.norm(one), 0, atol=0.02)
skipping()
for strategy in ("hierarchical", "powersgd:rank=8", "int8"):
    loading(strategy)
joining("hierarchical", exact=True)
for strategy in ("powersgd:rank=8", "int8", "local-sgd:every=2", "local-sgd:every=2,staleness=1+powersgd:rank=8"):
    joining(strategy, exact=False)
if hvd.rank() == 0:
    print(json.dumps(report))
