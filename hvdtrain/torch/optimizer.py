"""`DistributedOptimizer`: Horovod's own with Horovod's own exchange, and ours on a strategy.

On a strategy `step` exchanges what backward left in the parameters' gradients, as the strategy says, and then makes the
wrapped optimizer's own step. Nothing is started during backward: a strategy sends one vector.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import horovod.torch as horovod
import numpy as np
import torch
from horovod.torch import Average, Compression, Sum, global_process_set

from hvdtrain.horovod_api import job
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import Exchange, Strategy
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.torch.recorded import rate, watched
from hvdtrain.torch.vectors import Parameters, has_unknown_gradients, unscale

STATE = "exchange"
"""The key of a state_dict that holds the strategy's"""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    strategy: str | None = None,
) -> Any:
    """The optimizer, of the class that it had, with gradients exchanged between ranks; see horovod.torch for the rest.

    `strategy`: what --strategy takes, e.g. "powersgd:rank=4"; None: HVDTRAIN_STRATEGY, else Horovod's own exchange. On
    a strategy `groups` and `backward_passes_per_step` change nothing: a step exchanges one vector, whenever it is
    called. Collective. Raises Failure for a strategy that a script cannot have, ValueError for what does not go with
    it.
    """
    if isinstance(optimizer, Exchanging):
        raise ValueError("DistributedOptimizer: this one is distributed already, give it a new one of torch.optim")
    exchange = job.exchange(strategy)
    wrong, exact = "", False
    if exchange is not None:
        doubles = any(each.dtype == torch.float64 for group in optimizer.param_groups for each in group["params"])
        wrong = _unfit(exchange, compression, op, gradient_predivide_factor, process_set)
        exact = str(exchange) == DEFAULT_REDUCER and bool(wrong or doubles)
        if any(each.is_complex() for group in optimizer.param_groups for each in group["params"]):
            wrong = "it exchanges real numbers: train torch.view_as_real of complex parameters"
        elif backward_passes_per_step <= 0:
            wrong = "backward_passes_per_step must be > 0"
        elif (asked := inspect.signature(optimizer.step).parameters.get("closure")) and asked.default is asked.empty:
            wrong = f"{type(optimizer).__name__} evaluates its closure as often as each rank likes in a step: take SGD"
        elif exact:
            wrong = ""
        elif doubles:
            warnings.warn(f"{exchange} exchanges float64 rounded to float32; {DEFAULT_REDUCER} does not", stacklevel=2)
        if wrong:
            raise ValueError(f"DistributedOptimizer, strategy {exchange}: {wrong}")
    if exchange is None or exact:  # by Horovod's calls, whatever carries them
        own = horovod.DistributedOptimizer(
            optimizer,
            named_parameters=named_parameters,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        type(own).synchronize_weights = lambda self: None
        return watched(own) if process_set == global_process_set else own
    named = _named(optimizer, named_parameters)
    if not named:
        raise ValueError(f"DistributedOptimizer, strategy {exchange}: no parameter requires a gradient")
    cls: Any = type(type(optimizer).__name__, (Exchanging, type(optimizer)), {})
    made: Exchanging = cls.__new__(cls)
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's wrapper round the step of the optimizer that was
    if made.__dict__.pop("_made_by_broadcast", None) is made.state:  # a step without gradients is none of the training
        made.state.clear()
    made._connect(exchange, named, divided=op == Average, sparse_as_dense=sparse_as_dense)
    return made


def _unfit(exchange: Exchange, compression: Any, op: int, predivide: float, process_set: Any) -> str:
    """Why a strategy does not go with the arguments; empty if it does."""
    if compression is not Compression.none:
        return "compression= is part of the strategy: give strategy='fp16' (or bf16) and leave compression= out"
    if op not in (Average, Sum):
        return "gradients can be averaged (op=hvd.Average) or summed (op=hvd.Sum)"
    if op == Sum and exchange.capabilities.local_updates:
        return "it averages the ranks' weights, so op=hvd.Sum means nothing: leave it out"
    if predivide != 1.0 and op != Average:
        return "gradient_predivide_factor goes with op=hvd.Average only"
    if process_set != global_process_set:
        return "it works on all ranks together, not on a process_set: leave that out"
    return ""


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """See `horovod.torch.broadcast_optimizer_state`. What the exchange itself keeps stays each rank's own, but where
    only some ranks loaded it."""
    if not isinstance(optimizer, Exchanging):
        fresh = horovod.broadcast_object(not optimizer.state, root_rank, name="fresh")
        horovod.broadcast_optimizer_state(optimizer, root_rank, model)
        optimizer.__dict__["_made_by_broadcast"] = optimizer.state if fresh else None
        return
    optimizer.take_loaded()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    with optimizer.without_exchange():  # it makes a step, and so decays weights, where the optimizer has no state yet
        horovod.broadcast_optimizer_state(optimizer, root_rank, model)
    with torch.no_grad():
        torch._foreach_copy_(weights, before)


class Exchanging(torch.optim.Optimizer):
    """What an optimizer's class is extended by: steps that exchange."""

    _step_supports_amp_scaling = True
    """GradScaler calls `step` also if this rank's gradients are not finite: others wait for it"""

    def _connect(
        self, exchange: Exchange, named: dict[str, torch.nn.Parameter], *, divided: bool, sparse_as_dense: bool
    ) -> None:
        """Collective."""
        shapes = {name: list(parameter.shape) for name, parameter in named.items()}
        self._named, self._spelling = named, str(exchange)
        self._parameter_names = {parameter: name for name, parameter in named.items()}  # as Horovod's has it
        self._asked, self._local = exchange, exchange.capabilities.local_updates
        self._divided, self._sparse_as_dense = divided and not self._local, sparse_as_dense
        self._make(set())
        told = self._world.gather(hashlib.sha256(json.dumps(shapes).encode()).hexdigest())
        if len(set(told)) > 1:
            other = next(rank for rank, digest in enumerate(told) if digest != told[0])
            raise ValueError(f"rank {other} and rank 0 train parameters of other names or shapes: build the same model")
        self._clock = Clock()
        self._recorded = job.recorder(
            exchange,
            self._world,
            parameters=sum(parameter.numel() for parameter in named.values()),
            device=str(next(iter(named.values())).device),
            threads=torch.get_num_threads(),
        )
        self._exchanges = self._should_synchronize = True
        self._synchronized = self._compared = False
        self._loaded: dict[str, Any] | None = None
        """What `load_state_dict` was given of the exchange, until `take_loaded`"""
        self._deferred: bool | None = None
        """While `synchronize` exchanges: whether an update is due; None: it is made at once"""
        self._scaler_found: bool | None = None
        """Whether GradScaler found that this rank's gradients are not finite; None: there is none"""

    def _make(self, sparse: set[str]) -> None:
        """The strategy, for all parameters but these, whose gradients travel as the rows that they have. Collective."""
        dense = {name: parameter for name, parameter in self._named.items() if name not in sparse}
        self._sparse = {name: parameter for name, parameter in self._named.items() if name in sparse}
        shapes = [tuple(parameter.shape) for parameter in dense.values()]
        self._strategy, self._world = job.job().strategy(self._asked, shapes)
        size, careful = self._world.size, self._asked.capabilities.has_residual
        self._parameters = Parameters(dense, self._own_step, ranks=size, divided=self._divided, careful=careful)

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:
        """Exchanges, and makes the wrapped optimizer's step. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._exchanges or not (self._should_synchronize or self._synchronized or self._local):
            super().step()
            return loss
        if self._synchronized and self._should_synchronize:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                "gradients are not exchanged again",
                stacklevel=2,
            )
        with self._grad_scaler():
            if not self._synchronized or self._local:
                self._exchange()
            elif self._deferred:
                self._deferred = None
                self._own_step()
        self._synchronized, self._deferred = False, None
        return loss

    step.hooked = True  # type: ignore[attr-defined] # the wrapped class's step calls the hooks, once

    def synchronize(self) -> None:
        """Exchanges the gradients now, to clip them, say, before `step` in `skip_synchronize`. Collective.

        With a strategy whose ranks update by their own gradients there is nothing to exchange yet.
        """
        self._synchronized = True
        if not self._local:
            self._deferred = False
            self._exchange()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Steps inside use the gradients as `synchronize` left them, or else this rank's own."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def synchronize_weights(self) -> None:
        """Makes the weights the same on all ranks, before an evaluation or a checkpoint; does nothing where they always
        are. Collective."""
        if self._local and not self._compared:
            self.take_loaded()
        told = self._strategy.synchronize(self._parameters, self._clock)
        if self._recorded is not None:
            local_sent_bytes = self._world.take_local_sent_bytes()
            self._recorded.exchanged(self._clock.take("communication"), told.sent_bytes, local_sent_bytes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes nothing: a step exchanges whatever has been accumulated."""

    @contextlib.contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Steps inside are the wrapped optimizer's own."""
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("the strategy was made for the parameters there were: add groups before DistributedOptimizer")

    def _exchange(self) -> None:
        if has_unknown_gradients(self.param_groups, self._named):
            raise ValueError(
                "a parameter has a gradient that was frozen when DistributedOptimizer was called: call it again, round "
                "the optimizer of what is trained now"
            )
        if not self._compared:
            self.take_loaded()
        if not self._compared:
            self._compare()
        with self._clock.span("communication"):
            self._exchange_rows()
        told = self._strategy.step(self._parameters, 0.0, self._clock)
        if self._recorded is not None:
            waited_s = self._clock.take("communication")
            self._recorded.done(
                lr=rate(self),
                exchange_s=waited_s,
                sent_bytes=told.sent_bytes,
                local_sent_bytes=self._world.take_local_sent_bytes(),
            )

    def _own_step(self) -> None:
        """The wrapped optimizer's; later if `synchronize` asked for the exchange, never with infinite gradients if a
        GradScaler is there to lower its scale."""
        if self._deferred is False:
            self._deferred = True
        elif self._scaler_found is None or not self._parameters.lost():
            super().step()

    @contextlib.contextmanager
    def _grad_scaler(self) -> Iterator[None]:
        """Takes what GradScaler tells a step: the wrapped optimizer sees gradients without a scale."""
        told: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        self._scaler_found = bool(told["found_inf"]) if told else None
        self._parameters.not_finite = bool(self._scaler_found)
        if told.get("grad_scale") is not None:
            unscale([each.grad for each in self._named.values() if each.grad is not None], told["grad_scale"])
        try:
            yield
        finally:
            self.__dict__.update(told)
            self._scaler_found, self._parameters.not_finite = None, False

    def _compare(self) -> None:
        """Before the first exchange: ranks that train by themselves must begin alike, and those that exchange gradients
        know from then on which of them are sparse."""
        if self._local:
            how = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
            job.check_beginning(self._world, zlib.crc32(self._parameters.weights()), how)
        elif not self._sparse_as_dense:
            mine = [name for name, each in self._named.items() if each.grad is not None and each.grad.is_sparse]
            found = {name for names in self._world.gather(mine) for name in names}
            if found != set(self._sparse):
                self._make(found)
        self._compared = True

    def _exchange_rows(self) -> None:
        """Sparse gradients, as Horovod exchanges them: all ranks' rows, one behind the other."""
        op, waiting = Average if self._divided else Sum, []
        for name, parameter in self._sparse.items():
            rows = parameter.grad
            if rows is None or not rows.is_sparse:
                rows = torch.zeros_like(parameter).to_sparse(1) if rows is None else rows.to_sparse(1)
            waiting.append(horovod.sparse_allreduce_async(rows, name=f"rows.{name}", op=op))
        for parameter, rows in zip(self._sparse.values(), waiting, strict=True):
            parameter.grad = rows()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def take_loaded(self) -> None:
        """Goes on from what `load_state_dict` was given; ranks that loaded nothing from what the first did that has: in
        Horovod's examples rank 0 alone loads, and broadcasts. Collective, as `load_state_dict` cannot be."""
        self._strategy.state()  # waits for what is on its way on the same streams
        have = self._world.gather(self._loaded is not None)
        if not any(have):
            return
        told, self._loaded = self._loaded, None
        if not all(have):
            first = horovod.broadcast_object(told, root_rank=have.index(True), name="exchange")
            told = told or self._fitting(first)
        assert told is not None
        if set(told["sparse"]) != set(self._sparse):
            self._make(set(told["sparse"]))
        arrays = {name: np.array(array.cpu()) for name, array in told["arrays"].items()}
        self._strategy.load(arrays if self._own(told) else self._strategy.reshard_state([arrays]))
        self._compared = not self._local or not told["in_sync"]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under "exchange" this rank's of the strategy."""
        if self._loaded is not None:
            return super().state_dict() | {STATE: self._loaded}
        return super().state_dict() | {STATE: self._told(self._strategy)}

    def _told(self, strategy: Strategy) -> dict[str, Any]:
        """This rank's state of an exchange."""
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in strategy.state().items()}
        told = {"strategy": self._spelling, "rank": self._world.rank, "size": self._world.size}
        return told | {"sparse": list(self._sparse), "in_sync": strategy.in_sync, "arrays": arrays}

    def _fresh(self) -> Strategy:
        """One that has exchanged nothing yet, on the same streams."""
        shapes = [tuple(parameter.shape) for name, parameter in self._named.items() if name not in self._sparse]
        return job.fresh(self._asked, self._world, shapes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on bit for bit with what this rank saved. With what another rank saved, as with one file for all, the
        strategy continues as far as possible: see docs/guides/horovod-script.md. Without its state it starts again.

        Raises ValueError for the state of another strategy, or one that only its own rank can go on with.
        """
        told = self._fitting(state_dict[STATE] if STATE in state_dict else self._told(self._fresh()))
        super().load_state_dict(state_dict)
        self._synchronized, self._deferred = False, None
        self._loaded, self._compared = told, False

    def _own(self, told: dict[str, Any]) -> bool:
        """Whether an exchange's state is this very rank's."""
        return (told["rank"], told["size"]) == (self._world.rank, self._world.size)

    def _fitting(self, told: dict[str, Any]) -> dict[str, Any]:
        """An exchange's state, if this rank can go on with it. Raises ValueError if not."""
        wrong = ""
        if told["strategy"] != self._spelling:
            wrong = f"it was made with strategy {told['strategy']}, this optimizer has {self._spelling}"
        elif not self._own(told) and not told["in_sync"]:
            wrong = (
                f"it is rank {told['rank']}'s of {told['size']}, saved while the ranks' weights differed: save on each "
                "rank, or after optimizer.synchronize_weights()"
            )
        if wrong:
            raise ValueError(f"this state_dict cannot be loaded: {wrong}")
        return told


def _named(optimizer: torch.optim.Optimizer, given: Any) -> dict[str, torch.nn.Parameter]:
    """What is trained, by name, in the order of the optimizer's groups. Raises ValueError for names as Horovod does."""
    groups = [group["params"] for group in optimizer.param_groups]
    ours = [parameter for group in groups for parameter in group]
    if given is None:  # Horovod's names
        names = {id(p): f"allreduce.noname.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group)}
    else:
        pairs = list(given)
        if any(not isinstance(pair, tuple) for pair in pairs):
            raise ValueError("named_parameters takes (name, parameter) pairs, as model.named_parameters() gives them")
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"named_parameters has a name twice: {', '.join(twice)}")
        names = {id(parameter): name for name, parameter in pairs}
        if lacking := [list(parameter.shape) for parameter in ours if id(parameter) not in names]:
            raise ValueError(f"named_parameters lacks parameters of the optimizer, of shapes {lacking}")
    return {names[id(parameter)]: parameter for parameter in ours if parameter.requires_grad}
