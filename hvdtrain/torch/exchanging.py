"""Optimizers that exchange gradients or weights by a strategy; see `DistributedOptimizer`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import warnings
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.arrays import to_host
from hvdtrain.horovod_api import job, ranks
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import Spec, Strategy, automatic
from hvdtrain.torch import api as horovod
from hvdtrain.torch.api import Average, Sum
from hvdtrain.torch.overlap import Overlap
from hvdtrain.torch.recorded import learning_rate
from hvdtrain.torch.vectors import (
    JOINED,
    Parameters,
    Skipping,
    evaluated,
    has_unknown_gradients,
    scaled,
    step_evaluated,
    unscale,
)

STATE = "exchange"
"""The key of the strategy's state in a state_dict"""


class Exchanging(Skipping):
    """Base class that makes an optimizer's steps exchange."""

    _step_supports_amp_scaling = True
    """Makes GradScaler call `step` even if this rank's gradients are not finite, because other ranks wait for it"""
    exchanging = True
    """Whether steps exchange. Otherwise they are the wrapped optimizer's steps."""
    _overlaps = True
    """Whether gradients may be sent during backward"""
    _updates_unused = True
    """Whether parameters that no rank uses are updated too, with zeros as gradients, as in Horovod"""
    has_loaded = False
    """Whether the script has loaded weights since the last step"""

    def _connect(
        self, exchange: Spec, named: dict[str, torch.nn.Parameter], *, average: bool, sparse_as_dense: bool
    ) -> None:
        """Collective."""
        self._named = named
        self._parameter_names = {parameter: name for name, parameter in named.items()}  # Horovod's attribute
        self._mean, self._sparse_as_dense = average, sparse_as_dense
        self._use(exchange, set())
        shapes = {name: list(parameter.shape) for name, parameter in named.items()}
        digests = self._world.gather(hashlib.sha256(json.dumps(shapes).encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise ValueError(
                    f"rank {rank} trains parameters of other names or shapes than rank 0; hint: build the same model"
                )
        self._clock, self._waited_s = Clock(), 0.0
        self._recorded = job.recorder(
            exchange,
            self._world,
            shapes=list(shapes.values()),
            device=str(next(iter(named.values())).device),
            threads=torch.get_num_threads(),
        )
        self._synchronized = self._compared = self._all_joined = False
        job.job().on_join(self._take_part)
        self._loaded: dict[str, Any] | None = None
        """The exchange's state that `load_state_dict` received, until `share_loaded_state`"""
        self._deferred: bool | None = None
        """Whether `synchronize` left an update to the next `step`; None: updates are made at once"""
        self._losses: list[Any] = []
        """What the closure of the current step returned, if there is one"""
        self._found_inf: bool | None = None
        """Whether GradScaler found that this rank's gradients are not finite; None without a GradScaler"""

    def _use(self, exchange: Spec, sparse: set[str]) -> None:
        """Exchange by this strategy from now on; see `_make`. Collective."""
        self._exchange, self._exchange_name = exchange, str(exchange)
        self._local = exchange.capabilities.local_updates
        self._average = self._mean and not self._local
        self._make(sparse)

    def _make(self, sparse: set[str]) -> None:
        """Make the strategy. It does not exchange `sparse` parameters, whose gradients travel as rows. Collective."""
        dense = {name: parameter for name, parameter in self._named.items() if name not in sparse}
        self._sparse = {name: parameter for name, parameter in self._named.items() if name in sparse}
        shapes = [tuple(parameter.shape) for parameter in dense.values()]
        self._strategy, self._world = job.job().strategy(self._exchange, shapes, type(self))
        self._generation = job.job().generation
        size, careful = self._world.size, self._exchange.capabilities.has_residual
        if previous := self.__dict__.get("_parameters"):
            previous.remove_hooks()
        self._parameters = Parameters(
            dense,
            self._update,
            self._strategy,
            ranks=size,
            divided=self._average,
            careful=careful,
            overlap=Overlap if self._overlaps else None,
            updates_unused=self._updates_unused,
        )
        if self._local:
            _averaging.add(self)
            _watch_loads()

    def _reconnect(self) -> None:
        """If a host was lost, make the strategy again for the ranks that are left. Collective."""
        if self._generation != job.job().generation:
            self._make(set(self._sparse))
            self._synchronized, self._deferred, self._compared = False, None, False

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> Any:
        """Exchange, then make the wrapped optimizer's step. Collective."""
        self._losses = evaluated(closure)
        if not self.exchanging or not (self._should_synchronize or self._synchronized or self._local):
            if self._parameters.exchanges_in_backward:  # the others wait for the rest
                self._parameters.discards = True
                self._run_exchange()
                self._parameters.discards = False
            step_evaluated(super().step, self._losses, self.param_groups)
            return next(iter(self._losses), None)
        if self._synchronized and self._should_synchronize:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(); the "
                "gradients are not exchanged again",
                stacklevel=2,
            )
        with self._grad_scaler():
            if not self._synchronized or self._local:
                self._run_exchange()
            elif self._deferred:
                self._deferred = None
                self._update(1.0)
        self._synchronized, self._deferred = False, None
        return next(iter(self._losses), None)

    step.hooked = True  # type: ignore[attr-defined] # the wrapped class's step calls the hooks

    def synchronize(self) -> None:
        """Exchange the gradients now, for example to clip them before a `step` in `skip_synchronize`. Collective.

        Does nothing with a strategy whose ranks update with their own gradients.
        """
        self._synchronized = True
        if not self._local:
            self._deferred = False
            self._run_exchange()

    def synchronize_weights(self) -> None:
        """Give all ranks the same weights, before an evaluation or a checkpoint. Collective."""
        self._reconnect()
        if self._local and not self._compared:
            self.share_loaded_state()
        done = self._strategy.synchronize(self._parameters, self._clock)
        self._note(done.totals)
        if self._recorded is not None:
            local_sent_bytes = self._world.take_local_sent_bytes()
            self._recorded.exchanged(self._clock.take("communication"), done.sent_bytes, local_sent_bytes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: a step exchanges all gradients that have been accumulated."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError("the strategy needs all parameters; hint: add groups before DistributedOptimizer")

    def _run_exchange(self) -> None:
        job.job().exchanging(id(self))
        self._reconnect()
        if has_unknown_gradients(self.param_groups, self._named):
            raise ValueError(
                "a parameter that was frozen when DistributedOptimizer was called has a gradient; "
                "hint: wrap the optimizer again"
            )
        if not self._compared:
            self.share_loaded_state()
        if not self._compared:
            self._compare()
        with self._clock.span("communication"):
            if not self._parameters.joined:  # as in Horovod, allgathers of ranks that have not joined raise an error
                self._exchange_rows()
        if self.has_loaded:
            self.has_loaded = False
            self._strategy.restart(self._parameters)
        done = self._strategy.step(self._parameters, 1.0, self._clock)
        sent_bytes = done.sent_bytes
        if self._parameters.must_repeat:
            self._parameters.must_repeat = False
            done = self._strategy.step(self._parameters, 1.0, self._clock)
            sent_bytes += done.sent_bytes
        self._note(done.totals)
        self._waited_s = self._clock.take("communication")
        if self._recorded is not None and not self._parameters.joined:
            self._recorded.done(
                lr=learning_rate(self),
                exchange_s=self._waited_s,
                sent_bytes=sent_bytes,
                local_sent_bytes=self._world.take_local_sent_bytes(),
            )

    def _note(self, totals: np.ndarray | None) -> None:
        """Note the totals that have arrived, if any."""
        self._all_joined = totals is not None and totals[JOINED] == totals[-1]

    def _take_part(self) -> bool:
        """Exchange once without gradients, because this rank has joined. Returns whether all ranks have. Collective."""
        before = {} if self._local else {name: array.copy() for name, array in self._strategy.state().items()}
        self._parameters.joined = True
        try:
            self._run_exchange()
        finally:
            self._parameters.joined = False
        if self._all_joined and before:  # no rank has used the sum, so the residual must keep its part of it
            self._strategy.load(before)
        return self._all_joined

    def _update(self, factor: float) -> None:
        """Make the wrapped optimizer's step, with the learning rate times a factor.

        After `synchronize` this is left to `step`. With a GradScaler, infinite gradients are skipped.
        """
        if self._deferred is False:
            self._deferred = True
        elif self._found_inf is None or not self._parameters.lost():
            with scaled(self.param_groups, factor):
                step_evaluated(super().step, self._losses, self.param_groups)

    @contextlib.contextmanager
    def _grad_scaler(self) -> Iterator[None]:
        """Undo GradScaler's scale, which it leaves as attributes, so that the wrapped optimizer does not see it."""
        attributes: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        self._found_inf = bool(attributes["found_inf"]) if attributes else None
        self._parameters.not_finite = bool(self._found_inf)
        if attributes.get("grad_scale") is not None:
            unscale([each.grad for each in self._named.values() if each.grad is not None], attributes["grad_scale"])
        try:
            yield
        finally:
            self.__dict__.update(attributes)
            self._found_inf, self._parameters.not_finite = None, False

    def _compare(self) -> None:
        """Before the first exchange, compare the ranks' weights or find out which gradients are sparse."""
        if self._local:
            self._check_weights()
        elif not self._sparse_as_dense:
            own = [name for name, each in self._named.items() if each.grad is not None and each.grad.is_sparse]
            sparse = {name for names in self._world.gather(own) for name in names}
            if sparse != set(self._sparse):
                self._make(sparse)
        self._compared = True

    def _check_weights(self) -> None:
        """Raise ValueError if the ranks' weights differ. Collective."""
        hint = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
        job.check_beginning(self._world, zlib.crc32(to_host(self._parameters.weights()).data), hint)

    def _exchange_rows(self) -> None:
        """Concatenate all ranks' rows of sparse gradients, as Horovod does."""
        op, handles = Average if self._average else Sum, []
        for name, parameter in self._sparse.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            rows = gradient if gradient.is_sparse else gradient.to_sparse(1)
            handles.append(horovod.sparse_allreduce_async(rows, name=f"rows.{name}", op=op))
        for parameter, handle in zip(self._sparse.values(), handles, strict=True):
            parameter.grad = handle()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def share_loaded_state(self) -> None:
        """Continue from the state that `load_state_dict` received. Collective.

        Ranks that loaded none continue from the first rank that did: in Horovod's examples only rank 0 loads.
        """
        self._reconnect()
        self._strategy.state()  # waits for exchanges under way
        ranks_with_state = self._world.gather(self._loaded is not None)
        if not any(ranks_with_state):
            return
        loaded, self._loaded = self._loaded, None
        if not all(ranks_with_state):
            first = horovod.broadcast_object(loaded, root_rank=ranks_with_state.index(True), name="exchange")
            loaded = loaded or self._checked(first)
        assert loaded is not None
        self._resume(loaded["strategy"])
        if set(loaded["sparse"]) != set(self._sparse):
            self._make(set(loaded["sparse"]))
        arrays = {name: np.array(array.cpu()) for name, array in loaded["arrays"].items()}
        self._strategy.load(arrays if self._is_own(loaded) else self._strategy.reshard_state([arrays]))
        self._compared = not self._local or not loaded["in_sync"]
        self.has_loaded = False  # `_compare` checks the weights

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and this rank's state of the exchange under "exchange"."""
        state = self._exchange_state(self._strategy) if self._loaded is None else self._loaded
        return super().state_dict() | {STATE: state}

    def _exchange_state(self, strategy: Strategy) -> dict[str, Any]:
        return {
            "strategy": self._exchange_name,
            "rank": self._world.rank,
            "size": self._world.size,
            "sparse": list(self._sparse),
            "in_sync": strategy.in_sync,
            "arrays": {name: torch.from_numpy(np.array(array)) for name, array in strategy.state().items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, so that training continues bit for bit if this rank saved it.

        With another rank's state, such as one file for all ranks, the strategy resumes as far as it can
        (docs/guides/horovod-script.md).
        Without a state of the exchange, or if `auto` had not chosen yet, it starts again. Raises ValueError for the
        state of another strategy, or one that only the rank that saved it can load.
        """
        if STATE in state_dict and state_dict[STATE]["strategy"] != automatic.NAME:
            loaded = self._checked(state_dict[STATE])
        else:
            shapes = [tuple(parameter.shape) for name, parameter in self._named.items() if name not in self._sparse]
            loaded = self._exchange_state(ranks.fresh(self._exchange, self._world, shapes, type(self)))
        super().load_state_dict(state_dict)
        self._synchronized, self._deferred = False, None
        self._loaded, self._compared = loaded, False
        self._parameters.pause()  # `step` shares this state first

    def _accepts(self, strategy: str) -> bool:
        """Whether the state of this strategy can be loaded."""
        return strategy == self._exchange_name

    def _resume(self, strategy: str) -> None:
        """The ranks continue from the state of this strategy, which `_accepts` has accepted. Collective."""

    def _is_own(self, state: dict[str, Any]) -> bool:
        return (state["rank"], state["size"]) == (job.job().rank, job.job().size)

    def _checked(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the exchange's state. Raises ValueError if this rank cannot load it."""
        problem = ""
        if not self._accepts(state["strategy"]):
            problem = f"strategy {state['strategy']} saved it, but this optimizer has {self._exchange_name}"
        elif not self._is_own(state) and not state["in_sync"]:
            problem = (
                f"rank {state['rank']} of {state['size']} saved it while the ranks' weights differed; "
                "hint: save on each rank, or after optimizer.synchronize_weights()"
            )
        if problem:
            raise ValueError(f"this state_dict cannot be loaded: {problem}")
        return state


def unsupported(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], passes: int = 1) -> str:
    """Return why no strategy supports the optimizer; empty if one does."""
    if any(each.is_complex() for each in parameters):
        return "complex parameters cannot be exchanged; hint: train torch.view_as_real of them"
    if passes <= 0:
        return "backward_passes_per_step must be > 0"
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return (
            f"{type(optimizer).__name__} evaluates its closure a different number of times on each rank; hint: use SGD"
        )
    return ""


_averaging = weakref.WeakSet[Exchanging]()
"""Optimizers whose ranks average weights"""


@functools.cache
def _watch_loads() -> None:
    """From now on, weights that a script loads begin a new round (see `LocalSGD.restart`)."""
    load = torch.nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, *arguments: Any, **named: Any) -> Any:
        result = load(self, *arguments, **named)
        loaded = {id(weight) for weight in self.parameters()}
        for optimizer in _averaging:
            optimizer.has_loaded |= not loaded.isdisjoint(map(id, optimizer._named.values()))
        return result

    torch.nn.Module.load_state_dict = load_state_dict
