"""Check `strategy="auto"` of hvdtrain.torch.DistributedOptimizer; rank 0 prints what was chosen.

Every check raises if it fails. Each rank has its own loopback address and host name, so that the ranks are several
hosts. Nothing limits loopback, so a slow link is assumed where a choice other than exact sums is needed.
"""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterable
from typing import Any

import numpy as np
import rank_per_host  # noqa: F401 (each rank is a host)
import torch
from torch.nn.functional import cross_entropy

import hvdtrain.torch as hvd
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.plan import choice, learning
from hvdtrain.plan.network import Link

host = f"host{launch_env().rank}"
STEPS = 24


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 90), torch.nn.ReLU(), torch.nn.Linear(90, 90), torch.nn.Linear(90, 3)
    )


def flat(net: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy().copy()


def wrapped(net: torch.nn.Module, strategy: str, adam: bool = False) -> Any:
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(torch.optim.AdamW(net.parameters()) if adam else sgd, strategy=strategy)


def train(net: torch.nn.Module, optimizer: Any, steps: Iterable[int]) -> int | None:
    """Train, and return the first step after the choice."""
    chosen_at = None
    for step in steps:
        draw = torch.Generator().manual_seed(100 * step + hvd.rank())
        x, y = torch.randn(16, 40, generator=draw), torch.randint(0, 3, (16,), generator=draw)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        if chosen_at is None and not optimizer.state_dict()["exchange"]["strategy"].startswith("auto"):
            chosen_at = step + 1
    return chosen_at


def without_exchange(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "exchange"}


def exact_sums_stay() -> None:
    ends = []
    for strategy in ("auto:exact", "hierarchical"):
        net = model()
        train(net, wrapped(net, strategy), range(STEPS))
        ends.append(flat(net))
    assert np.array_equal(*ends), "auto:exact differs from exact sums"


def equals_naming_the_strategy(rule: str) -> str:
    """Until the choice, training equals the smallest sums; then it equals the choice. A resumed run keeps it."""
    net = model()
    optimizer = wrapped(net, rule)
    assert train(net, optimizer, range(2)) is None
    early = copy.deepcopy(optimizer.state_dict())  # steps change the momentum in place
    chosen_at = train(net, optimizer, range(2, STEPS))
    assert chosen_at is not None
    weights, state = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    chosen = state["exchange"]["strategy"]
    assert len(set(hvd.allgather_object((chosen, chosen_at)))) == 1, "the ranks chose differently"

    named = model()
    smallest = wrapped(named, "powersgd:rank=4")
    train(named, smallest, range(chosen_at))
    rest = wrapped(named, chosen)
    rest.load_state_dict(without_exchange(smallest.state_dict()))
    train(named, rest, range(chosen_at, STEPS))
    assert np.array_equal(flat(net), flat(named)), f"{rule} differs from {chosen}, named from step {chosen_at}"

    resumed = model()
    resumed.load_state_dict(weights)
    again = wrapped(resumed, rule)
    again.load_state_dict(state)
    train(resumed, again, range(STEPS, STEPS + 3))
    assert again.state_dict()["exchange"]["strategy"] == chosen
    train(net, optimizer, range(STEPS, STEPS + 3))
    assert np.array_equal(flat(net), flat(resumed)), "the resumed run differs"
    optimizer.synchronize_weights()
    assert len(set(hvd.allgather_object(flat(net).tobytes()))) == 1, "the ranks' weights differ"

    other = wrapped(model(), rule)
    other.load_state_dict(early)
    assert other.state_dict()["exchange"]["strategy"] == "auto", "it has not chosen yet"
    return chosen


def depends_on_the_optimizer() -> str:
    """With AdamW, what was measured with Adam is chosen."""
    net = model()
    optimizer = wrapped(net, "auto", adam=True)
    assert train(net, optimizer, range(STEPS)) is not None
    chosen = optimizer.state_dict()["exchange"]["strategy"]
    assert chosen in learning.candidates("adam") and chosen not in learning.candidates("sgd"), chosen
    return str(chosen)


hvd.init()
socket.gethostname = lambda: host
exact_sums_stay()
choice.FAST_LINK = Link.of_rate(2e5)
found = [equals_naming_the_strategy(rule) for rule in ("auto", "auto:within=0.2")]
found.append(depends_on_the_optimizer())
if hvd.rank() == 0:
    print(json.dumps({"chosen": found}))
