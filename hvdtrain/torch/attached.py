"""DistributedDataParallel, and the optimizers of an unmodified script, exchange by a strategy.

With a reducer, the strategy sums gradients during backward instead of DistributedDataParallel (`summing`). With
local-sgd and `auto` gradients stay unsummed there, and the optimizer exchanges in `step`. Its class is changed in
place, because the script, its scheduler and its trainer hold the object already.

Between two averages the ranks' weights differ. `reading` decides which weights the script sees. Functions that all
ranks call together average the weights first (`TOGETHER`).
"""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdtrain.comm.elastic import unsupported as unsupported_in_elastic_jobs
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.horovod_api import job, ranks
from hvdtrain.strategies import Spec, Strategy, parse
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.torch import api as horovod
from hvdtrain.torch import reading, summing
from hvdtrain.torch.automatic import Measuring
from hvdtrain.torch.buffers import Buffers
from hvdtrain.torch.collectives import FRONT
from hvdtrain.torch.exchanging import STATE, Exchanging, unsupported
from hvdtrain.torch.vectors import BUFFERS, by_name
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
_optimizers: list[weakref.ref[Any]] = []
"""Attached optimizers in the order in which they were made, which is the same on all ranks"""


class Attached(Measuring):
    """Begins to exchange in its first step, if the model whose parameters it has is attached."""

    _begun = False
    exchanging = False
    _updates_unused = False
    _early: dict[str, Any] | None = None
    """The exchange's state that was loaded before the first step"""
    _copy: list[torch.Tensor] | None = None
    """The last average, for forward passes until the next step"""
    _chosen_strategy: str
    _averages_seen = 0
    _buffers: Sequence[Buffers] = ()
    """Of the models that are DistributedDataParallel"""
    _buffers_changed = False
    """Whether any rank's have changed, as far as the ranks have said since `_send_buffers`"""
    _amp = False
    """Whether the optimizer itself supports GradScaler's attributes"""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As in `Exchanging`, also in the step in which it begins."""
        begins = not self._begun and any(map(self.trains, list(_models)))
        return self.exchanging or begins or self._amp

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self._amp = supports

    def trains(self, model: Any) -> bool:
        """Whether it has parameters of this model."""
        return any(id(each) in _models[model] for group in self.param_groups for each in group["params"])

    def begin(self) -> None:
        """Connect to the other ranks, once. Collective. Raises Failure (78) for what no strategy supports."""
        self._targets = [model for model in list(_models) if self.trains(model)]
        is_planned = profiled.observer() is not None  # also without DistributedDataParallel, which one rank may omit
        if self._begun or not (self._targets or is_planned):
            return
        join(self._chosen_strategy)
        exchange, named = job.exchange(self._chosen_strategy), by_name(self, None)
        assert exchange is not None
        if problem := unsupported(self, list(named.values())) or self._unaveraged(exchange):
            raise Failure(f"strategy {self._chosen_strategy}: {problem}", exits.BAD_CONFIG)
        if any(weight.dtype == torch.float64 for weight in named.values()):
            _warn_of_float64(self._chosen_strategy)
        self._begun = self.exchanging = True
        _watch_together()
        self._connect(exchange, named, average=True, sparse_as_dense=False)
        self.weights = list(named.values())
        self._marks = reading.Marks(self.weights)
        if (rule := job.rule(self._chosen_strategy)) is not None or is_planned:
            self.measure(rule, horovod.Average)
        if self._early is not None and "in_sync" in self._early:  # otherwise the optimizer did not exchange
            loaded = self._checked(self._early)
            self._loaded = loaded if loaded["arrays"] else None
        for model in self._targets:
            reading.watch(model, self)
        self._buffers = [model.reducer.buffers for model in self._targets if isinstance(model, DistributedDataParallel)]

    def _unaveraged(self, exchange: Spec) -> str:
        """Why averaging the parameters would not average the model; empty if it does."""
        may_average = exchange.capabilities.local_updates or job.rule(self._chosen_strategy) is not None
        if may_average and hasattr(self, "train") and hasattr(self, "eval"):
            return (
                f"{type(self).__name__} keeps weights of its own beside the parameters, which local-sgd does not "
                "average; hint: use a reducer, such as int8"
            )
        return ""

    def step(self, closure: Any = None) -> Any:
        """Make a step, then average weights if they are due. Collective."""
        self.begin()
        self._opt_called = True  # as a scheduler's wrapper would do
        if not self.exchanging:
            return super(Exchanging, self).step(closure)
        if any(model._join_config.enable for model in self._targets if isinstance(model, DistributedDataParallel)):
            problem = f"strategy {self._exchange}: ranks with fewer batches (Join) would not take part in averages"
            raise Failure(f"{problem}; hint: drop the last batches, or use a reducer, such as int8", exits.BAD_CONFIG)
        loss, self._copy = super().step(closure), None
        if self.exchanging and (not self._local or self._strategy.averages != self._averages_seen):
            self._send_buffers()
        if self.exchanging and self._local:
            self._averages_seen = self._strategy.averages
            self._marks.set()
        return loss

    step.hooked = step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # schedulers need not wrap it

    def _run_exchange(self) -> None:
        self._parameters.buffers_changed = any(each.changed() for each in self._buffers)
        super()._run_exchange()

    def _note(self, totals: np.ndarray | None) -> None:
        super()._note(totals)
        self._buffers_changed |= totals is not None and totals[BUFFERS] > 0

    def _use(self, exchange: Spec, sparse: set[str]) -> None:
        """Once `auto` has chosen a reducer, DistributedDataParallel takes over, so that clipping sees the mean."""
        has_chosen = "_strategy" in self.__dict__ and self._steps is None and not exchange.capabilities.local_updates
        if not has_chosen or not all(isinstance(model, DistributedDataParallel) for model in self._targets):
            super()._use(exchange, sparse)
            return
        self._parameters.remove_hooks()
        self._send_buffers()
        self.exchanging = False
        for model in self._targets:
            summing.sum_gradients(model, str(exchange))

    def averaged(self) -> None:
        """The weights have been averaged outside `step`."""
        self._copy = None
        self._send_buffers()
        self._averages_seen = self._strategy.averages

    def _send_buffers(self) -> None:
        """When the models compute next, their buffers become rank 0's, unless no rank's have changed."""
        for model in self._targets:
            model.require_forward_param_sync = True
        for each in self._buffers:
            each.equal = not self._buffers_changed
        self._buffers_changed = False

    # --- what others see ----------------------------------------------------------------------------------------

    @property
    def drifted(self) -> bool:
        """Whether this rank's weights may differ from the last average."""
        return self.exchanging and not self._strategy.in_sync

    def average(self, *, kept: bool) -> list[torch.Tensor] | None:
        """See `reading.Averaging`."""
        if not (self.exchanging and self._local) or (common := self._strategy.common_weights) is None:
            return None
        if self._marks.changed():
            return None
        copy = self._copy or self._parameters.shaped(common)
        self._copy = None if kept else copy
        return copy

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and, under "exchange", what belongs to the last average."""
        return super().state_dict() if self.exchanging else super(Exchanging, self).state_dict()

    def _exchange_state(self, strategy: Strategy) -> dict[str, Any]:
        state = super()._exchange_state(strategy)
        if strategy.in_sync:
            return state
        shapes = [tuple(each.shape) for each in self._named.values()]
        fresh = ranks.fresh(self._exchange, self._world, shapes, type(self))
        arrays = {name: state["arrays"][name] for name in fresh.state()}  # nothing of the round that has begun
        return state | {"in_sync": True, "arrays": arrays}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Another rank's, such as one file for all ranks, is enough."""
        if self.exchanging:
            super().load_state_dict(state_dict)
        else:
            super(Exchanging, self).load_state_dict(state_dict)
            self._early = state_dict.get(STATE)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.exchanging:
            raise ValueError("local-sgd needs all parameters; hint: add groups before the first step")
        super(Exchanging, self).add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are optimizers as the script made them: connections belong to this one only."""
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), self.__getstate__()  # type: ignore[attr-defined]


def attach(model: Any, optimizer: torch.optim.Optimizer, *, strategy: str | None = None) -> None:
    """Let a model and its optimizer exchange by a strategy, as `python -m hvdtrain.ddp` does. Collective.

    Args:
        model: DistributedDataParallel, or a model that no other library synchronizes. Rank 0's weights are sent to all.
        optimizer: Has parameters of the model.
        strategy: A --strategy string, by default HVDTRAIN_STRATEGY or exact sums.

    Raises Failure for a strategy that scripts cannot use.
    """
    name = job.resolved(strategy or os.environ.get(job.VARIABLE) or DEFAULT_REDUCER)
    if attach_model(model, name):
        convert(optimizer, name)
    else:
        summing.keep_state(optimizer)


def attach_model(model: Any, strategy: str) -> bool:
    """Let a model exchange by a strategy. Collective. Returns whether its optimizer has to be converted."""
    wrapped = isinstance(model, DistributedDataParallel)
    join(strategy)
    if job.rule(strategy) and job.job().world().hosts_count == 1:
        strategy = DEFAULT_REDUCER
    sums = wrapped and _sums_gradients(strategy)
    _models[model] = set() if sums else {id(each) for each in model.parameters()}
    types = {each.dtype for each in model.parameters()}
    if sums and strategy == DEFAULT_REDUCER and (torch.float64 in types or any(each.is_complex for each in types)):
        return False  # PyTorch's own sums are exact; a strategy would sum in float32
    if any(each.is_complex for each in types):
        hint = f"train torch.view_as_real of them, or use {DEFAULT_REDUCER}"
        raise Failure(f"strategy {strategy}: complex parameters cannot be exchanged; hint: {hint}", exits.BAD_CONFIG)
    if sums and torch.float64 in types:
        _warn_of_float64(strategy)
    if wrapped:
        _check(model)
        summing.sum_gradients(model, strategy if sums else None)
        _watch_hooks()
    else:
        horovod.broadcast_parameters(model.state_dict(), root_rank=0)
    return not sums


def _warn_of_float64(strategy: str) -> None:
    if job.job().rank == 0:
        job.say(f"{strategy} exchanges float64 as float32; {DEFAULT_REDUCER} keeps float64")


def join(strategy: str) -> None:
    """Connect the ranks of torch.distributed, or else of the launcher, for a strategy. Collective.

    Raises Failure (78) if scripts cannot use the strategy, or the launcher has numbered the ranks differently.
    """
    if launch_env().launcher == "elastic":
        raise unsupported_in_elastic_jobs()
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if launch_env().launcher == "alone" and ranks[1] > 1:  # processes that the script has started itself
        os.environ |= {"HVDTRAIN_TORCH_RANK": str(ranks[0]), "HVDTRAIN_TORCH_SIZE": str(ranks[1])}
    job.init(FRONT, strategy=strategy)
    job.exchange(strategy)  # takes over if Horovod carries the calls
    if dist.is_initialized() and ranks != (own := (job.job().rank, job.job().size)):
        has, launched = ("rank {} of {}".format(*each) for each in (ranks, own))
        problem = f"torch.distributed says {has}, the launcher {launched}; hint: wrap the model before hvd.init, and"
        raise Failure(f"{problem} give init_process_group the launcher's ranks", exits.BAD_CONFIG)


def _check(model: DistributedDataParallel) -> None:
    """Raise Failure (78) if DistributedDataParallel has fewer ranks than the job, or a hook of the script."""
    if (size := dist.get_world_size(model.process_group)) != job.job().size:
        problem = f"process_group= has {size} ranks, but hvdtrain exchanges between all {job.job().size}"
        hint = "leave process_group= out, or use DistributedDataParallel without hvdtrain"
        raise Failure(f"{problem}; hint: {hint}", exits.BAD_CONFIG)
    if model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "")
        problem = f"the script has registered the communication hook {name}, which hvdtrain would not call"
        raise Failure(f"{problem}; hint: leave register_comm_hook out", exits.BAD_CONFIG)


@functools.cache
def _watch_hooks() -> None:
    """From now on, communication hooks of attached models are left out, with a line."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def leave_out(self: Any, state: Any, function: Any) -> None:
        if not isinstance(self.reducer, summing.Expecting):
            register(self, state, function)
        elif job.job().rank == 0:
            name = getattr(function, "__qualname__", function)
            job.say(f"hvdtrain's strategy replaces the script's communication hook {name}")

    DistributedDataParallel.register_comm_hook = leave_out


def convert(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Make the optimizer an `Attached` one in place."""
    amp = optimizer.__dict__.pop("_step_supports_amp_scaling", False)
    optimizer.__dict__.pop("step", None)  # a scheduler may have wrapped it
    optimizer.__class__ = type(type(optimizer).__name__, (Attached, type(optimizer)), {})
    optimizer._amp, optimizer._chosen_strategy = amp, strategy
    _optimizers.append(weakref.ref(optimizer))
    summing.keep_state(optimizer)


def watch_script(strategy: str) -> None:
    """From now on, attach every DistributedDataParallel and every optimizer that this process makes."""
    made, set_up = DistributedDataParallel.__init__, torch.optim.Optimizer.__init__
    start = torch.multiprocessing.start_processes

    @functools.wraps(made)
    def wrap(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        attach_model(self, strategy)

    @functools.wraps(set_up)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        set_up(self, *arguments, **named)
        if _sums_gradients(strategy):
            summing.keep_state(self)
        else:
            convert(self, strategy)

    @functools.wraps(start)
    def refuse(*arguments: Any, start_method: str = "spawn", **named: Any) -> Any:
        if start_method != "fork":  # the new processes would not pass through hvdtrain.ddp
            problem = "hvdtrain.ddp: this script starts its own ranks (torch.multiprocessing.spawn)"
            hint = "let torchrun start them, or call hvd.attach in each"
            raise Failure(f"{problem}, which would train without hvdtrain; hint: {hint}", exits.BAD_CONFIG)
        return start(*arguments, start_method=start_method, **named)

    DistributedDataParallel.__init__, torch.optim.Optimizer.__init__ = wrap, begin
    torch.multiprocessing.start_processes = torch.multiprocessing.spawn.__globals__["start_processes"] = refuse
    register_optimizer_step_pre_hook(_check_model)


def _check_model(*_: Any) -> None:
    """Raise Failure (78) if several ranks train without DistributedDataParallel."""
    if not _models and dist.is_initialized() and dist.get_world_size() > 1:
        problem = "this script trains without DistributedDataParallel; FSDP, DeepSpeed and tensor parallelism are not"
        hint = "choose DDP in its settings, or start it without hvdtrain.ddp"
        raise Failure(f"hvdtrain.ddp: {problem} supported; hint: {hint}", exits.BAD_CONFIG)


def _sums_gradients(strategy: str) -> bool:
    """Whether the strategy sums the gradients of one backward pass, so that the optimizer need not exchange."""
    return not (job.rule(strategy) or profiled.observer()) and parse(strategy).algorithm is None


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
        if function.__name__ != "barrier" or not any((*arguments[:1], named.get("group"))):
            _average_all()
        return function(*arguments, **named)

    return averaged


def _average_all() -> None:
    """Average the weights of all optimizers that have not done so since their last step. Collective.

    The ranks may have collected different ones of those that their scripts no longer use.
    """
    present = {number: each for number, made in enumerate(_optimizers) if (each := made()) is not None}
    drifted = [number for number, each in present.items() if each.drifted]
    for number in sorted(set.intersection(*map(set, horovod.allgather_object(drifted, name="drifted")))):
        present[number].synchronize_weights()
        present[number].averaged()
