"""What scripts do with their weights between two averages, each time next to the same training written by hand.

Usage: own_idioms.py STRATEGY... Two ranks that play two hosts. By hand (`Hand`) each rank trains its own model, and
the ranks average the weights. Rank 0 prints JSON: for each strategy and idiom, the largest distance of what the
script read and of the weights at the end, of all ranks; and the error messages of unsupported idioms.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import io
import json
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import strategy_hosts
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.horovod_api import job
from hvdtrain.strategies import parse
from hvdtrain.system.exits import Failure
from hvdtrain.torch import attached

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
strategy_hosts.joined(1)
attached.join("hierarchical")
WORLD = job.job().world()
INPUTS, OUTPUTS, ROWS = 6, 3, 8


class Net(torch.nn.Module):
    """Layers that scripts treat in different ways."""

    def __init__(self, *, norm: bool = False, freezes: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(INPUTS, 12), torch.nn.Tanh())
        self.norm = torch.nn.BatchNorm1d(12) if norm else torch.nn.Identity()
        self.head = torch.nn.Linear(12, OUTPUTS)
        self.other = torch.nn.Linear(2, 2) if unused else None
        self.freezes = freezes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.freezes:
            self.encoder.eval()
        return self.head(self.norm(self.encoder(x)))


class Hand:
    """A model whose ranks average their weights every k steps, without anything of hvdtrain but a reducer's sum."""

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> None:
        exchange = parse(strategy)
        self.module, self._net, self.optimizer = self, net, optimizer
        self._weights = [each for each in net.parameters() if each.requires_grad]
        self._every, self._staleness = 1, 0
        if exchange.algorithm is not None:
            self._every, self._staleness = exchange.settings.every, exchange.settings.staleness
        assert exchange.reducer is not None
        shapes = [tuple(each.shape) for each in self._weights]
        self.reducer, self.steps = exchange.reducer.cls(shapes, exchange.reducer.settings), 0
        self._flights: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._common = self._began = self._left = self._flat()
        self._shares_buffers, self._in_sync = True, True
        step = optimizer.step
        optimizer.step = lambda *given: (step(*given), self._stepped())[0]  # type: ignore[method-assign]

    def _flat(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self._weights])

    @torch.no_grad()
    def _set(self, flat: torch.Tensor) -> None:
        for weight, part in zip(self._weights, flat.split([each.numel() for each in self._weights]), strict=True):
            weight.copy_(part.view_as(weight))

    def _stepped(self) -> None:
        self.steps += 1
        if self.steps % self._every == 0:
            own = self._flat() - self._began
            vector = (own / size).numpy().copy()
            WORLD.reduce(vector, vector.size, self.reducer)
            self._flights.append((self.steps + self._staleness, own, torch.from_numpy(vector)))
            self._began = self._flat()
        while self._flights and self._flights[0][0] <= self.steps:
            _, own, mean = self._flights.pop(0)
            self._common = self._common + mean
            self._set(self._flat() - own + mean if self._staleness else self._common)
            self._began = self._began - own + mean if self._staleness else self._common
            self._shares_buffers = True
        self._in_sync, self._left = not self._flights and self.steps % self._every == 0, self._flat()

    def _read(self) -> dict[str, torch.Tensor]:
        """What the script reads: the last average, unless it has written to the weights since the last step."""
        if self._in_sync or not torch.equal(self._left, self._flat()):
            return dict(self._net.named_parameters())
        names = [name for name, each in self._net.named_parameters() if each.requires_grad]
        parts = self._common.split([each.numel() for each in self._weights])
        return {name: part.view_as(each) for name, part, each in zip(names, parts, self._weights, strict=True)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._shares_buffers:
            for buffer in self._net.buffers():
                dist.broadcast(buffer, 0)
            self._shares_buffers = False
        if torch.is_grad_enabled():
            return self._net(x)
        return torch.func.functional_call(self._net, self._read(), (x,))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in (self._net.state_dict() | self._read()).items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._net.load_state_dict(state)
        self._flights = []
        self.reducer.drop_residual()
        self._common = self._began = self._flat()
        self._left = self._common + 1

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:  # parameters(), train(), eval()
        return getattr(self._net, name)


class Script:
    """A training, by hand or with `DistributedDataParallel`."""

    def __init__(self, strategy: str, by_hand: bool, **net: bool) -> None:
        torch.manual_seed(0)
        self.net = Net(**net)
        if net.get("freezes"):
            self.net.encoder.requires_grad_(False)
        self.optimizer = self.made(self.net)
        self.by_hand, self.reads = by_hand, list[torch.Tensor]()
        self._draw = torch.Generator().manual_seed(rank)
        if by_hand:
            self.model: Any = Hand(self.net, self.optimizer, "hierarchical" if "auto" in strategy else strategy)
        else:
            self.model = DistributedDataParallel(self.net, find_unused_parameters=bool(net.get("unused")))
            if attached.attach_model(self.model, strategy):
                attached.convert(self.optimizer, strategy)

    @staticmethod
    def made(net: Net) -> torch.optim.Optimizer:
        rest = [each for name, each in net.named_parameters() if each.requires_grad and not name.startswith("other")]
        return torch.optim.SGD(rest, lr=0.1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(ROWS, INPUTS, generator=self._draw), torch.randn(ROWS, OUTPUTS, generator=self._draw)

    def loss(self) -> torch.Tensor:
        x, y = self.batch()
        return (self.model(x) - y).square().mean()

    def step(self, times: int = 1, between: Callable[[], None] = lambda: None) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.loss().backward()
            between()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, model: Any = None) -> None:
        """All ranks with the same inputs, as for an early stop."""
        x = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(99))
        was_training = self.net.training
        self.model.eval()
        self.reads.append((model or self.model)(x).clone())
        self.model.train(was_training)

    def save(self) -> dict[str, torch.Tensor]:
        state = copy.deepcopy(self.model.state_dict())
        state = {name.removeprefix("module."): each for name, each in state.items()}
        self.reads.append(torch.cat([each.flatten().double() for each in state.values()]))
        return state

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.model.module.load_state_dict(state)


def trains_in_eval_mode(s: Script) -> None:
    s.model.eval()
    s.step(7)


def freezes_in_forward(s: Script) -> None:
    for _ in range(4):
        s.step(2)
        s.evaluate()


def evaluates_an_ema(s: Script) -> None:
    weights = list(s.net.parameters())
    ema = [each.detach().clone() for each in weights]
    for step in range(7):
        s.step()
        for average, weight in zip(ema, weights, strict=True):
            average.lerp_(weight.detach(), 0.5)
        if step in (2, 5):
            kept = [each.detach().clone() for each in weights]
            for weight, average in zip(weights, ema, strict=True):
                weight.data.copy_(average)
            s.evaluate()
            s.save()
            for weight, old in zip(weights, kept, strict=True):
                weight.data.copy_(old)
            s.evaluate()


def loads_the_best_model(s: Script) -> None:
    s.step(3)
    best = s.save()
    s.step(3)
    s.evaluate()
    s.load(best)
    s.evaluate()
    s.step()
    s.save()
    s.step(6)


def clamps_after_a_checkpoint(s: Script) -> None:
    for _ in range(6):
        s.step()
        s.save()
        for weight in s.net.parameters():
            weight.data.clamp_(-0.2, 0.2)


def clamps_gradients(s: Script) -> None:
    def clamp() -> None:
        for weight in s.net.parameters():
            weight.grad.data.clamp_(-0.01, 0.01)

    s.step(4)
    s.step(4, clamp)


def computes_targets_between_forward_and_backward(s: Script) -> None:
    for _ in range(7):
        s.optimizer.zero_grad()
        loss = s.loss()
        with torch.no_grad():
            target = s.model(s.batch()[0])
        (loss + (s.model(s.batch()[0]) - target).square().mean()).backward()
        s.reads.append(target)
        s.optimizer.step()


def accumulates_by_setting_the_flag(s: Script) -> None:
    for _ in range(7):
        s.optimizer.zero_grad()
        for last in (False, True):
            s.model.require_backward_grad_sync = last
            (s.loss() / 2).backward()
        s.optimizer.step()


def accumulates_by_no_sync(s: Script) -> None:
    for _ in range(7):
        s.optimizer.zero_grad()
        with s.model.no_sync():
            (s.loss() / 2).backward()
        (s.loss() / 2).backward()
        s.optimizer.step()


def averages_copies(s: Script) -> None:
    """Stochastic weight averaging, and copies and pickles of attached models."""
    swa = torch.optim.swa_utils.AveragedModel(s.net)
    for _ in range(6):
        s.step()
        swa.update_parameters(s.net)
    s.evaluate(swa)
    s.evaluate(copy.deepcopy(s.net))
    if not s.by_hand:
        torch.optim.swa_utils.AveragedModel(s.model)
        kept = io.BytesIO()
        torch.save([s.optimizer, s.model, s.net], kept)
        kept.seek(0)
        optimizer = torch.load(kept, weights_only=False)[0]
        assert type(optimizer) is torch.optim.SGD
        assert type(copy.deepcopy(s.optimizer)) is torch.optim.SGD
        assert b"hvdtrain" not in pickle.dumps(s.optimizer)
    s.step(2)


def resumes_within_a_round(s: Script) -> None:
    """The model and the optimizer, from what one rank has saved."""
    s.step(6)
    kept = [s.model.state_dict(), s.optimizer.state_dict(), s.model.reducer.state() if s.by_hand else None]
    kept = copy.deepcopy(kept)
    dist.broadcast_object_list(kept, 0)
    s.step(3)
    s.model.load_state_dict(kept[0])
    s.optimizer.load_state_dict(kept[1])
    if s.by_hand:
        s.model.steps = 0  # the round that had begun is not part of the checkpoint
        s.model.reducer.load(s.model.reducer.reshard_state([kept[2]], first=False) if rank else kept[2])
    s.evaluate()
    s.step(6)


def adds_a_group_before_the_first_step(s: Script) -> None:
    s.model(s.batch()[0])
    new = {"params": list(s.net.other.parameters()), "lr": 0.01}
    s.optimizer.add_param_group(new)
    s.step(6)


def keeps_running_statistics(s: Script) -> None:
    for _ in range(9):
        s.step()
        s.reads += [buffer.clone().double() for buffer in s.net.buffers()]
    s.evaluate()


def compiles(s: Script) -> None:
    model = s.model
    s.model = model if s.by_hand else torch.compile(model, backend="eager")
    for _ in range(3):
        s.step(2)
        s.evaluate()
    s.model = model


def adds_noise(s: Script) -> None:
    draw = torch.Generator().manual_seed(5)
    for _ in range(7):
        s.step()
        with torch.no_grad():
            for weight in s.net.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.01)
        s.evaluate()


def leaves_layers_unused(s: Script) -> None:
    """Weight decay must not move what no rank uses."""
    for group in s.optimizer.param_groups:
        group["weight_decay"] = 0.1
    s.optimizer.add_param_group({"params": list(s.net.other.parameters())})
    s.step(4)


def trains_twice(s: Script) -> None:
    """The objects of a training that has ended are collected on one rank only."""
    if not s.by_hand:
        other = Script(STRATEGY, False)
        other.step(3)
        if rank == 0:
            del other
            gc.collect()
        dist.barrier()
    s.step(3)


def complex_parameters() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 1, dtype=torch.complex64))
    made({"weight": weight}, lambda: (torch.randn(3, 4).to(weight.dtype) @ weight).abs().square().mean())


def uneven_batches() -> None:
    script = Script(STRATEGY, False)
    with Join([script.model]):
        script.step(3 + rank)


def schedule_free() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    weight = torch.nn.Parameter(torch.randn(4, 1))
    made({"weight": weight}, lambda: (torch.randn(3, 4) @ weight).square().mean(), ScheduleFree)


def made(weights: dict[str, torch.Tensor], loss: Callable[[], torch.Tensor], cls: Any = torch.optim.SGD) -> None:
    model = torch.nn.ParameterDict(weights)
    optimizer = cls(model.parameters(), lr=0.1)
    attached.attach_model(model, STRATEGY)
    attached.convert(optimizer, STRATEGY)
    loss().backward()
    optimizer.step()


IDIOMS: dict[Callable[[Script], None], dict[str, bool]] = {
    trains_in_eval_mode: {"norm": True},
    freezes_in_forward: {"freezes": True},
    evaluates_an_ema: {},
    loads_the_best_model: {},
    clamps_after_a_checkpoint: {},
    clamps_gradients: {},
    computes_targets_between_forward_and_backward: {},
    accumulates_by_setting_the_flag: {},
    accumulates_by_no_sync: {},
    averages_copies: {},
    resumes_within_a_round: {},
    adds_a_group_before_the_first_step: {"unused": True},
    keeps_running_statistics: {"norm": True},
    compiles: {},
    adds_noise: {},
    leaves_layers_unused: {"unused": True},
    trains_twice: {},
}
REFUSED = (complex_parameters, uneven_batches, schedule_free)

report: dict[str, dict[str, float]] = collections.defaultdict(dict)
messages: dict[str, dict[str, str]] = collections.defaultdict(dict)
for STRATEGY in sys.argv[1:]:
    for idiom, net in IDIOMS.items():
        if idiom is clamps_gradients and STRATEGY == "hierarchical":
            continue  # the script sees the mean of the gradients there
        scripts = [Script(STRATEGY, by_hand, **net) for by_hand in (False, True)]
        try:
            for each in scripts:
                idiom(each)
        except Exception:
            print(f"{STRATEGY} {idiom.__name__} by_hand={each.by_hand}", file=sys.stderr)
            raise
        seen = [[*each.reads, torch.cat([w.detach().flatten() for w in each.net.parameters()])] for each in scripts]
        assert len(seen[0]) == len(seen[1])
        worst = max(float((a - b).abs().max()) for a, b in zip(*seen, strict=True))
        worst = worst if math.isfinite(worst) else 1e9
        everyone: list[float] = [0.0] * size
        dist.all_gather_object(everyone, worst)
        report[STRATEGY][idiom.__name__] = max(everyone)
    for refused in REFUSED:
        try:
            refused()
            message = ""
        except Failure as failure:
            message = str(failure)
        messages[STRATEGY][refused.__name__] = message
if rank == 0:
    print(json.dumps({"distances": report, "messages": messages}))
dist.barrier()
dist.destroy_process_group()
