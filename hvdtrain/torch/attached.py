"""DistributedDataParallel, and the optimizers of an unmodified script, exchange by a strategy.

With a reducer, DistributedDataParallel calls a hook with its gradients (`hook`). With local-sgd and `auto` it leaves
them alone, and the optimizer exchanges in `step`: it is made an `Exchanging` one in place, because the script, its
scheduler and its trainer hold it already.

Between two averages the ranks' weights differ. What all ranks call together averages them (`TOGETHER`). Otherwise a
script may evaluate or save on one rank only, so nothing can be sent. `eval()` and `state_dict()` then make the
parameters hold the last average, which all ranks have, and the next training step puts the rank's own weights back.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdtrain.horovod_api import job, ranks
from hvdtrain.strategies import Exchange, Strategy, parse
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.torch import api as horovod
from hvdtrain.torch.automatic import Measuring
from hvdtrain.torch.collectives import FRONT
from hvdtrain.torch.exchanging import STATE, Exchanging
from hvdtrain.torch.hook import Buckets, check_group, join
from hvdtrain.torch.vectors import by_name
from hvdtrain.training import profiled

TOGETHER = {
    "torch.distributed": ("", ["barrier"]),  # accelerator.wait_for_everyone() too
    "transformers.trainer": ("Trainer", ["evaluate", "_save_checkpoint", "_finalize_training"]),
    "accelerate.accelerator": ("Accelerator", ["save_state"]),
    **{
        f"{package}.{module}": names
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, names in {
            "trainer.trainer": ("Trainer", ["save_checkpoint"]),
            "loops.fit_loop": ("_FitLoop", ["on_run_end"]),
            "loops.evaluation_loop": ("_EvaluationLoop", ["run"]),
        }.items()
    },
}
"""Functions that all ranks call after the same step: module -> class, names"""

_models = weakref.WeakKeyDictionary[Any, set[int]]()
"""Attached models, and the ids of the parameters whose optimizer exchanges"""
_owners = weakref.WeakKeyDictionary[Any, Any]()
"""Each module of an attached model -> a weak reference to the model"""
_optimizers: list[weakref.ref[Any]] = []
"""Attached optimizers in the order in which they were made, which is the same on all ranks"""


class Attached(Measuring):
    """Begins to exchange when the model whose parameters it has is attached and computes for the first time."""

    _begun = False
    exchanging = False
    _early: dict[str, Any] | None = None
    """The exchange's state that was loaded before the first step"""
    _own: list[torch.Tensor] | None = None
    """This rank's weights while the parameters hold the last average"""
    _chosen_strategy: str
    _seen: Any = None
    """The strategy's common weights after the last step"""

    def trains(self, model: Any) -> bool:
        """Whether it has parameters of this model."""
        return any(id(each) in _models[model] for group in self.param_groups for each in group["params"])

    def begin(self) -> None:
        """Connect to the other ranks, once. Collective."""
        self._targets = [model for model in list(_models) if self.trains(model)]
        is_planned = profiled.observer() is not None  # also without DistributedDataParallel, which one rank may omit
        if self._begun or not (self._targets or is_planned):
            return
        join(FRONT, self._chosen_strategy)
        self._begun = self.exchanging = self._step_supports_amp_scaling = True
        _watch_together()
        exchange = job.exchange(self._chosen_strategy)
        assert exchange is not None
        self._connect(exchange, by_name(self, None), average=True, sparse_as_dense=False)
        if self._early is not None:
            self._loaded = self._checked(self._early)
        if (rule := job.rule(self._chosen_strategy)) is not None or is_planned:
            self.measure(rule, horovod.Average)

    def step(self, closure: Any = None) -> Any:
        """Make a step, then average weights if they are due. Collective."""
        self.begin()
        self.show_own()
        self._opt_called = True  # what a scheduler's wrapper would note
        if not self.exchanging:
            return super(Exchanging, self).step(closure)
        loss = super().step(closure)
        if self._local and (common := self._strategy.common_weights) is not self._seen:
            self._seen = common
            for model in self._targets:  # its buffers follow rank 0's when it computes next, as in every step otherwise
                model.require_forward_param_sync = True
        return loss

    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # schedulers need not wrap it

    def _use(self, exchange: Exchange, sparse: set[str]) -> None:
        """Once `auto` has chosen a reducer, DistributedDataParallel takes over, so that clipping sees the mean."""
        has_chosen = "_strategy" in self.__dict__ and not exchange.capabilities.local_updates
        if not has_chosen or not all(isinstance(model, DistributedDataParallel) for model in self._targets):
            super()._use(exchange, sparse)
            return
        self._parameters.remove_hooks()
        self.exchanging = self._step_supports_amp_scaling = False
        for model in self._targets:
            _hook(model, str(exchange))
            model.require_backward_grad_sync = True

    # --- what others see ----------------------------------------------------------------------------------------

    def average_now(self) -> None:
        """Average weights that have changed since the last average. Collective."""
        if self.exchanging and not self._strategy.in_sync:
            self.show_own()
            self.synchronize_weights()

    @torch.no_grad()
    def show_average(self) -> None:
        """Let the parameters hold the last average. Equal on all ranks."""
        if self.exchanging and self._own is None and (common := self._strategy.common_weights) is not None:
            self._own = [weight.detach().clone() for weight in self._named.values()]
            self._parameters.set_weights(common)

    @torch.no_grad()
    def show_own(self) -> None:
        """Let the parameters hold this rank's own weights again."""
        if self._own is not None:
            torch._foreach_copy_(list(self._named.values()), self._own)
            self._own = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and, under "exchange", what belongs to the last average."""
        return super().state_dict() if self.exchanging else super(Exchanging, self).state_dict()

    def _exchange_state(self, strategy: Strategy) -> dict[str, Any]:
        state = super()._exchange_state(strategy)
        if strategy.in_sync:
            return state
        fresh = ranks.fresh(self._exchange, self._world, [tuple(each.shape) for each in self._named.values()])
        arrays = {name: state["arrays"][name] for name in fresh.state()}  # nothing of the round that has begun
        return state | {"in_sync": True, "arrays": arrays}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Another rank's, such as one file for all ranks, is enough."""
        self._own = None  # of before
        if self.exchanging:
            super().load_state_dict(state_dict)
        else:
            super(Exchanging, self).load_state_dict(state_dict)
            self._early = state_dict.get(STATE)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.exchanging:
            raise ValueError("local-sgd needs all parameters; hint: add groups before the first step")
        super(Exchanging, self).add_param_group(param_group)


def attach(model: Any, optimizer: torch.optim.Optimizer, *, strategy: str | None = None) -> None:
    """Let a model and its optimizer exchange by a strategy, as `python -m hvdtrain.ddp` does. Collective.

    Args:
        model: DistributedDataParallel, or a model that no other library synchronizes. Rank 0's weights are sent to all.
        optimizer: Has parameters of the model.
        strategy: A --strategy string, by default HVDTRAIN_STRATEGY or exact sums.

    Raises Failure for a strategy that scripts cannot use.
    """
    name = strategy or os.environ.get(job.VARIABLE) or DEFAULT_REDUCER
    if attach_model(model, name):
        convert(optimizer, name)


def attach_model(model: Any, strategy: str) -> bool:
    """Let a model exchange by a strategy. Collective. Returns whether its optimizer has to be converted."""
    wrapped = isinstance(model, DistributedDataParallel)
    join(FRONT, strategy)
    if wrapped:
        check_group(model)
    else:
        horovod.broadcast_parameters(model.state_dict(), root_rank=0)
    if job.rule(strategy) and job.job().world().hosts_count == 1:
        strategy = DEFAULT_REDUCER
    if wrapped and _fits_hook(strategy):
        _models[model] = set()
        _hook(model, strategy)
        return False
    _models[model] = {id(each) for each in model.parameters()}
    _owners.update(dict.fromkeys(model.modules(), weakref.ref(model)))
    model.register_forward_pre_hook(_before_forward)
    _watch_modules()
    if wrapped:
        model.require_backward_grad_sync = False
    return True


def convert(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Make the optimizer an `Attached` one in place."""
    amp = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer.__dict__.pop("step", None)  # a scheduler may have wrapped it
    optimizer.__class__ = type(type(optimizer).__name__, (Attached, type(optimizer)), {})
    optimizer._step_supports_amp_scaling, optimizer._chosen_strategy = amp, strategy
    _optimizers.append(weakref.ref(optimizer))


def watch_script(strategy: str) -> None:
    """From now on, attach every DistributedDataParallel and every optimizer that this process makes."""
    made, set_up = DistributedDataParallel.__init__, torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def wrap(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        attach_model(self, strategy)

    @functools.wraps(set_up)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        set_up(self, *arguments, **named)
        convert(self, strategy)

    DistributedDataParallel.__init__ = wrap
    if not _fits_hook(strategy):
        torch.optim.Optimizer.__init__ = begin
    register_optimizer_step_pre_hook(_check_model)


def _check_model(*_: Any) -> None:
    """Raise Failure (78) if several ranks train without DistributedDataParallel."""
    if not _models and dist.is_initialized() and dist.get_world_size() > 1:
        problem = "this script trains without DistributedDataParallel; FSDP, DeepSpeed and tensor parallelism are not"
        hint = "choose DDP in its settings, or start it without hvdtrain.ddp"
        raise Failure(f"hvdtrain.ddp: {problem} supported; hint: {hint}", exits.BAD_CONFIG)


def _fits_hook(strategy: str) -> bool:
    """Whether a hook of DistributedDataParallel can do what the strategy does."""
    return not (job.rule(strategy) or profiled.observer()) and parse(strategy).algorithm is None


def _hook(model: DistributedDataParallel, strategy: str) -> None:
    model.register_comm_hook(Buckets(FRONT, strategy), lambda state, bucket: state.hook(bucket))


def _of(model: Any) -> list[Attached]:
    """The optimizers of a model."""
    return [each for made in _optimizers if (each := made()) is not None and each.trains(model)]


def _before_forward(model: Any, _: Any) -> None:
    trains = getattr(model, "module", model).training and torch.is_grad_enabled()
    for optimizer in _of(model):
        if trains:
            optimizer.begin()  # before a GradScaler lets ranks skip steps
            optimizer.show_own()
        else:
            optimizer.show_average()


@functools.cache
def _watch_modules() -> None:
    """From now on, `eval` and `state_dict` of attached models show the last average."""
    train, state_dict = torch.nn.Module.train, torch.nn.Module.state_dict

    def show(module: Any) -> None:
        if module in _owners and (model := _owners[module]()) is not None:
            for optimizer in _of(model):
                optimizer.show_average()

    @functools.wraps(train)
    def train_shown(self: Any, mode: bool = True) -> Any:
        if not mode:
            show(self)
        return train(self, mode)

    @functools.wraps(state_dict)
    def state_dict_shown(self: Any, *arguments: Any, **named: Any) -> Any:
        show(self)
        return state_dict(self, *arguments, **named)

    torch.nn.Module.train, torch.nn.Module.state_dict = train_shown, state_dict_shown


@functools.cache
def _watch_together() -> None:
    """From now on, the functions of TOGETHER average first, if the script has loaded them."""
    for module, (owner, names) in TOGETHER.items():
        if module in sys.modules:
            place = getattr(sys.modules[module], owner) if owner else sys.modules[module]
            for name in names:
                if function := getattr(place, name, None):  # other versions may have other names
                    setattr(place, name, _averaging(function))


def _averaging(function: Any) -> Any:
    @functools.wraps(function)
    def averaged(*arguments: Any, **named: Any) -> Any:
        of_some_ranks = function.__name__ == "barrier" and any((*arguments[:1], named.get("group")))
        for each in () if of_some_ranks else _optimizers:
            if (optimizer := each()) is not None:
                optimizer.average_now()
        return function(*arguments, **named)

    return averaged
