"""Check hvdtrain.torch.DistributedOptimizer with strategies; rank 0 prints their names.

Every check raises if it fails. Each rank has its own loopback address, so that the strategies see several hosts.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import rank_per_host  # noqa: F401 (each rank is a host)
import torch
from torch.nn.functional import cross_entropy

import hvdtrain.torch as hvd
from hvdtrain.horovod_api import job
from hvdtrain.observe.timing import Clock

STRATEGIES = ("hierarchical", "powersgd:rank=2", "local-sgd:every=3,outer_momentum=0.5")
STRATEGIES += ("local-sgd:every=3,staleness=1,parts=3,lr_scaling=sqrt+powersgd:rank=2,bits=4",)
LR, STEPS = 0.1, 8


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 12, generator=draw), torch.randint(0, 3, (16,), generator=draw)


def loss_of(net: torch.nn.Module, step: int, ranks: Iterable[int]) -> torch.Tensor:
    """Return the mean over ranks of their mean losses."""
    losses = [cross_entropy(net(x), y) for x, y in (batch(step, rank) for rank in ranks)]
    return torch.stack(losses).mean()


def flat(net: torch.nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy().copy()


def wrapped(net: torch.nn.Module, strategy: str, decay: float = 0.0, **settings: Any) -> Any:
    inner = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=decay)
    return hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), strategy=strategy, **settings)


def train(net: torch.nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(net, step, [hvd.rank()]).backward()
        optimizer.step()


def assert_equal_on_all_ranks(values: np.ndarray) -> None:
    assert len(set(hvd.allgather_object(values.tobytes()))) == 1, "the ranks' weights differ"


class Plain:
    """strategies.Vectors in NumPy: SGD with momentum on one vector."""

    def __init__(self, net: torch.nn.Module, local: bool) -> None:
        self.net, self.local = net, local
        self.velocity = np.zeros_like(flat(net))

    def vector(self) -> np.ndarray:
        gradient = torch.cat([p.grad.reshape(-1) for p in self.net.parameters()]).numpy()
        self.gradients = np.concatenate([gradient / np.float32(1 if self.local else hvd.size()), np.float32([0, 1, 0])])
        return self.gradients

    def tail(self) -> np.ndarray:
        return np.array([0.0, 1.0, 0.0])

    def share(self) -> tuple[int, int]:
        self.vector()  # the gradients of a step without an exchange
        return 1, hvd.size()

    updates_parts = False

    def apply(self, lr: float) -> None:
        self.velocity = np.float32(0.9) * self.velocity + self.gradients[:-3]
        self.set_weights(flat(self.net) - np.float32(lr) * self.velocity)

    def weights(self, arrays: range | None = None) -> np.ndarray:
        return torch.cat([each.detach().reshape(-1) for each in self.some(arrays)]).numpy().copy()

    @torch.no_grad()
    def set_weights(self, weights: np.ndarray, arrays: range | None = None) -> None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), self.some(arrays))

    def some(self, arrays: range | None) -> list[torch.nn.Parameter]:
        return list(self.net.parameters())[arrays.start if arrays else 0 : arrays.stop if arrays else None]


def optimizer_equals_strategy(strategy: str) -> None:
    """The weights are those that the strategy computes from plain vectors. Resumed weights equal uninterrupted ones."""
    net = model()
    optimizer = wrapped(net, strategy)
    assert isinstance(optimizer, torch.optim.SGD)
    train(net, optimizer, range(STEPS // 2))
    saved = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()], saved)
    train(net, optimizer, range(STEPS // 2, STEPS))
    last = flat(net)
    optimizer.synchronize_weights()
    assert_equal_on_all_ranks(flat(net))

    loss_of(net, STEPS, [hvd.rank()]).backward()
    optimizer.synchronize()  # without a step before the state is loaded
    new = model()
    for each, resumed in ((new, wrapped(new, strategy)), (net, optimizer)):
        weights, state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        each.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(each, resumed, range(STEPS // 2, STEPS))
        assert np.array_equal(flat(each), last), "the resumed weights differ from the uninterrupted ones"

    plain = model()
    exchange = job.wanted(strategy)
    assert exchange is not None
    tested, _ = job.job().strategy(exchange, [tuple(p.shape) for p in plain.parameters()], torch.optim.SGD)
    vectors = Plain(plain, tested.capabilities.local_updates)
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(plain, step, [hvd.rank()]).backward()
        tested.step(vectors, LR, Clock())
    np.testing.assert_allclose(last, flat(plain), rtol=2e-5, atol=2e-6)


def sum_equals_average() -> None:
    """op=Sum at a learning rate divided by the number of ranks equals op=Average, also with sparse gradients."""
    for as_dense in (True, False):
        nets = [Odd(), Odd()]
        for net, op, rate in zip(nets, (hvd.Sum, hvd.Average), (LR / hvd.size(), LR), strict=True):
            inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=rate)
            optimizer = hvd.DistributedOptimizer(inner, strategy="hierarchical", op=op, sparse_as_dense=as_dense)
            net(hvd.rank()).backward()
            optimizer.step()
        np.testing.assert_allclose(*map(flat, nets), rtol=1e-5, atol=1e-6)
        assert not np.array_equal(flat(nets[0]), flat(Odd()))


def broadcast_before_wrapping() -> None:
    """As in Horovod's examples. The step that creates the optimizer's state for the broadcast does not count."""
    for kind in (torch.optim.Adam, hvd.Muon):
        ends = []
        for before in (False, True):
            net = model()
            inner = kind(net.parameters(), lr=LR)
            if before:
                hvd.broadcast_optimizer_state(inner, root_rank=0)
            train(net, hvd.DistributedOptimizer(inner, strategy="hierarchical"), range(4))
            ends.append(flat(net))
        assert np.array_equal(*ends)


def one_file_for_all_ranks(strategy: str) -> None:
    """All ranks can load the state that rank 0 saved while the weights were equal, or only rank 0 loads it."""
    net = model()
    optimizer = wrapped(net, strategy, decay=0.01)
    train(net, optimizer, range(4))
    early = hvd.broadcast_object(optimizer.state_dict())
    optimizer.synchronize_weights()
    state = hvd.broadcast_object([net.state_dict(), optimizer.state_dict()])
    ends = []
    for loading in (range(hvd.size()), [0]):
        again = model()
        resumed = wrapped(again, strategy, decay=0.01)
        if not early["exchange"]["in_sync"] and hvd.rank():
            rejects(ValueError, "weights differed", lambda to=resumed: to.load_state_dict(early))
        if hvd.rank() in loading:
            again.load_state_dict(state[0])
            resumed.load_state_dict(copy.deepcopy(state[1]))  # steps change the momentum in place
        if len(loading) == 1:
            hvd.broadcast_parameters(again.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(resumed, root_rank=0)
        train(again, resumed, range(4, STEPS))
        resumed.synchronize_weights()
        ends.append(flat(again))
        assert_equal_on_all_ranks(ends[-1])
    assert np.array_equal(*ends)


def rejects(kind: type[Exception], text: str, mistake: Callable[[], Any]) -> None:
    try:
        mistake()
    except kind as error:
        assert text in str(error), error
        assert "\n" not in str(error)
    else:
        raise AssertionError(f"not raised: {text}")


class Odd(torch.nn.Module):
    """Frozen, unused and shared parameters, and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = torch.nn.Embedding(7, 5, sparse=True)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.shared = torch.nn.Linear(5, 5)
        self.unused = torch.nn.Linear(2, 2)
        self.first = torch.nn.Linear(5, 1)

    def forward(self, rank: int) -> torch.Tensor:
        x = self.shared(self.shared(self.frozen(self.words(torch.tensor([rank, rank, 3])))))
        return self.first(x).mean() if rank == 0 else x.square().mean()  # only rank 0 uses `first`


def odd_models() -> None:
    """Several groups with a scheduler train as in one process."""

    def groups(net: Odd) -> list[dict[str, Any]]:
        rest = [p for name, p in net.named_parameters() if not name.startswith("words")]
        return [{"params": [net.words.weight]}, {"params": rest, "lr": 0.05, "weight_decay": 0.1}]

    for as_dense in (True, False):
        net, one = Odd(), Odd()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(groups(net), lr=LR),
            strategy="hierarchical",
            sparse_as_dense=as_dense,
            backward_passes_per_step=2,
        )
        alone = torch.optim.SGD(groups(one), lr=LR)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (optimizer, alone)]
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(2):
                net(hvd.rank()).backward()
            optimizer.step()
            alone.zero_grad()
            for rank in range(hvd.size()):
                (2 * one(rank) / hvd.size()).backward()
            for parameter in one.parameters():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)  # as in Horovod, for equal weight decay
            alone.step()
            for scheduler in schedulers:
                scheduler.step()
        np.testing.assert_allclose(flat(net), flat(one), rtol=1e-5, atol=1e-6)
        assert list(optimizer.state_dict()["exchange"]["sparse"]) == ([] if as_dense else ["allreduce.noname.0.0"])
    dense = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=LR), strategy="hierarchical")
    net.zero_grad()
    net.frozen.requires_grad_(True)
    net(hvd.rank()).backward()
    rejects(ValueError, "was frozen", dense.step)


def exact(ranks: hvd.ProcessSet) -> None:
    """In float64, the ranks of a process set train as one process."""
    if not ranks.included():
        return
    net, one = model().double(), model().double()
    optimizer = wrapped(net, "hierarchical", process_set=ranks)
    alone = torch.optim.SGD(one.parameters(), lr=LR, momentum=0.9)
    for step in range(4):
        for each, stepping, of in ((net, optimizer, [hvd.rank()]), (one, alone, ranks.ranks)):
            stepping.zero_grad()
            losses = [cross_entropy(each(x.double()), y) for x, y in (batch(step, rank) for rank in of)]
            torch.stack(losses).mean().backward()
            stepping.step()
    np.testing.assert_allclose(flat(net), flat(one), rtol=1e-12)


def clipped(strategy: str) -> None:
    """Clipping between synchronize() and step() equals one process."""
    net, one = model(), model()
    optimizer, alone = wrapped(net, strategy), torch.optim.SGD(one.parameters(), lr=LR, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step, [hvd.rank()]).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clone()  # as net.double() and net.float() do
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.zero_grad()
        loss_of(one, step, range(hvd.size())).backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        alone.step()
    np.testing.assert_allclose(flat(net), flat(one), rtol=2e-5, atol=2e-6)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer.step()
    assert "skip_synchronize" in str(warned[0].message)


def scaled(strategy: str, order: str) -> None:
    """With GradScaler, all ranks skip a step if gradients of rank 1 are infinite, and no residual keeps them."""
    net = model()
    optimizer = wrapped(net, strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(6):
        before = flat(net)
        optimizer.zero_grad()
        loss = loss_of(net, step, [hvd.rank()])
        is_infinite = step == 2 and hvd.rank() == 1
        scaler.scale(loss * (torch.inf if is_infinite else 1)).backward()
        if order == "synchronize":
            optimizer.synchronize()
        if order:
            scaler.unscale_(optimizer)
        if order == "unscale":
            optimizer.synchronize()
        if order:
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        skipped = np.array_equal(before, flat(net))
        expected = step == 2 and (is_infinite or not strategy.startswith("local"))
        assert skipped == expected, (strategy, order, step, skipped)
    optimizer.synchronize_weights()
    assert np.isfinite(flat(net)).all()
    assert_equal_on_all_ranks(flat(net))


def mistakes() -> None:
    net = model()
    for text, settings in {
        "compression=": {"compression": hvd.Compression.fp16},
        "op=hvd.Average": {"op": hvd.Max},
        "process_set=": {"process_set": hvd.ProcessSet([0])},
        "backward_passes_per_step": {"backward_passes_per_step": 0},
    }.items():
        rejects(ValueError, text, lambda settings=settings: wrapped(net, "powersgd", **settings))
    rejects(ValueError, "op=hvd.Sum", lambda: wrapped(net, "local-sgd", op=hvd.Sum))
    complex_net = torch.nn.Linear(2, 2, dtype=torch.complex64)
    rejects(ValueError, "view_as_real", lambda: wrapped(complex_net, "hierarchical"))
    frozen = model().requires_grad_(False)
    rejects(ValueError, "no parameter requires a gradient", lambda: wrapped(frozen, "hierarchical"))
    lbfgs = torch.optim.LBFGS(net.parameters())
    rejects(ValueError, "LBFGS", lambda: hvd.DistributedOptimizer(lbfgs, strategy="powersgd"))
    for strategy in ("native", "async-ps", "allreduce", "powersdg"):
        rejects(Exception, strategy, lambda name=strategy: wrapped(net, name))
    rejects(ValueError, "same model", lambda: wrapped(torch.nn.Linear(2, 2 + hvd.rank()), "hierarchical"))
    net[0].weight.data += hvd.rank()
    local = wrapped(net, "local-sgd")
    rejects(ValueError, "distributed already", lambda: hvd.DistributedOptimizer(local, strategy="powersgd"))
    rejects(ValueError, "broadcast_parameters", lambda: train(net, local, range(1)))
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(local, root_rank=0)
    train(net, local, range(1))
    rejects(ValueError, "add groups before", lambda: local.add_param_group({"params": []}))
    other = wrapped(net, "powersgd", op=hvd.Sum)
    foreign = copy.deepcopy(other.state_dict())
    foreign["param_groups"][0]["lr"] = 99.0
    rejects(ValueError, "this optimizer has local-sgd", lambda: local.load_state_dict(foreign))
    assert local.param_groups[0]["lr"] != 99.0, "a rejected state changes the optimizer"
    train(net, other, range(1))


class SAM(torch.optim.SGD):
    """Foret et al., "Sharpness-aware minimization", 2021: a step with the gradients of other weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss, weights = closure(), [weight for group in self.param_groups for weight in group["params"]]
        moves = [0.05 * weight.grad for weight in weights]
        for weight, move in zip(weights, moves, strict=True):
            weight.data += move
        with torch.enable_grad():
            closure()
        for weight, move in zip(weights, moves, strict=True):
            weight.data -= move
        super().step()
        return loss


def with_closure() -> None:
    """A step with a closure equals one process, or is an error."""

    def closure(net: torch.nn.Module, ranks: Iterable[int]) -> torch.Tensor:
        net.zero_grad()
        loss = loss_of(net, 0, ranks)
        loss.backward()
        return loss.detach()

    for settings in ({}, {"compression": hvd.Compression.fp16}):  # by the strategy, and by Horovod's calls
        net, one, other = model(), model(), model()
        optimizer, alone = wrapped(net, "hierarchical", **settings), torch.optim.SGD(one.parameters(), LR, 0.9)
        own_loss = loss_of(one, 0, [hvd.rank()])
        assert optimizer.step(lambda net=net: closure(net, [hvd.rank()])) == own_loss
        alone.step(lambda one=one: closure(one, range(hvd.size())))
        np.testing.assert_allclose(flat(net), flat(one), rtol=1e-3, atol=1e-4 if settings else 2e-6)
        sharp = SAM(other.parameters(), LR)
        sharp = hvd.DistributedOptimizer(sharp, other.named_parameters(), strategy="hierarchical", **settings)
        mistake = functools.partial(sharp.step, functools.partial(closure, other, [hvd.rank()]))
        rejects(ValueError, "at other weights", mistake)


pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair])
for name in STRATEGIES:
    optimizer_equals_strategy(name)
    one_file_for_all_ranks(name)
for order in ("", "unscale", "synchronize"):
    scaled("powersgd:rank=2", order)
scaled("hierarchical", "unscale")
scaled("local-sgd:every=2+powersgd", "")
clipped("hierarchical")
odd_models()
sum_equals_average()
broadcast_before_wrapping()
with_closure()
exact(hvd.global_process_set)
exact(pair)
mistakes()
if hvd.rank() == 0:
    print(json.dumps({"strategies": STRATEGIES}))
