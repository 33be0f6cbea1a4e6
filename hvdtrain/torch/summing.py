"""Sums the gradients of a DistributedDataParallel model by a strategy, instead of DDP's own reducer.

DDP asks its reducer to expect gradients in each forward pass whose backward pass is to be synchronized. `Expecting`
takes that place, so `no_sync`, Join and the flags that trainers set keep their meaning. Gradients are sent while
backward runs, once steps are alike (see `overlap`). When backward ends, `parameter.grad` is the mean of all ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.frameworks.hooks_torch import GradientHooks
from hvdtrain.horovod_api import job, record
from hvdtrain.observe.timing import Clock
from hvdtrain.strategies import parse
from hvdtrain.torch.buffers import Buffers, send_only_changed
from hvdtrain.torch.exchanging import STATE
from hvdtrain.torch.overlap import Overlap
from hvdtrain.torch.recorded import learning_rate
from hvdtrain.torch.vectors import BUFFERS, Parameters


class Expecting:
    """Stands for a model's C++ reducer, which never sums anything."""

    def __init__(self, model: DistributedDataParallel, sums: Summing | None, buffers: Buffers) -> None:
        """`sums`: sums the model's gradients; None leaves them unsummed."""
        self._reducer, self._model, self.sums, self.buffers = model.reducer, weakref.ref(model), sums, buffers

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The backward pass of this forward pass is to be synchronized. `outputs`: only if some may be unused."""
        if self.sums is None:
            return
        model: Any = self._model()
        self.sums.expect(all_used=not (model.find_unused_parameters or model.static_graph))
        for output in outputs:
            if output.requires_grad:
                output.register_hook(self._queue)
        model._static_graph_delay_allreduce_enqueued = False  # backward begins with `_delay_all_reduce`

    def _queue(self, gradient: torch.Tensor) -> None:
        if self.sums is not None:
            self.sums.end_with_backward()

    def _delay_all_reduce(self) -> None:
        """DDP calls this when backward ends, if static_graph=True."""
        if self.sums is not None:
            self.sums.finish()

    def _rebuild_buckets(self) -> bool:
        return False

    def _push_all_rebuilt_params(self) -> None:
        pass

    def _set_forward_pass_work_handle(self, work: Any, divides_by_initial_size: bool) -> None:
        if not divides_by_initial_size:
            raise ValueError("hvdtrain divides by all ranks; hint: leave divide_by_initial_world_size out of Join")

    def _get_zeros_like_grad_buckets(self) -> list[Any]:
        """Join calls this on a rank that has no more batches, when the others synchronize."""
        if self.sums is not None:
            self.sums.take_part()
        return []

    def _get_local_used_map(self) -> torch.Tensor:
        raise ValueError("hvdtrain needs no find_unused_parameters in Join; hint: leave it out")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


class PassOverlap(Overlap):
    """Sends gradients during the passes that DDP synchronizes, in which only backward changes them."""

    def __init__(
        self, buckets: Sequence[range], parameters: Sequence[torch.nn.Parameter], send: Callable[[int], None]
    ) -> None:
        self._hooks = GradientHooks(buckets, parameters, send, repeated=self._repeat)
        self._before: list[int] | None = None
        self._is_alike = self._has_repeated = self._hooks.active = False

    def _repeat(self, index: int) -> None:
        self._has_repeated = True

    def begin(self) -> None:
        """The backward pass that follows is synchronized."""
        self._hooks.begin()
        self._hooks.active, self._has_repeated = self._is_alike, False

    def pause(self) -> None:
        self._is_alike = False

    def changed(self) -> bool:
        return self._has_repeated

    def is_steady(self) -> bool:
        if self.active:
            return True
        alike, self._before = self._hooks.counts == self._before, self._hooks.counts
        return alike

    def next_step(self, *, steady: bool, changed: bool) -> None:
        if not self.active:
            self._hooks.expected = self._hooks.counts
        self._is_alike, self._hooks.active = steady and not changed, False
        self._hooks.begin()


class Summing:
    """The exchange of one model's gradients."""

    def __init__(self, model: DistributedDataParallel, strategy: str, buffers: Buffers) -> None:
        """Collective."""
        self._spec, self._buffers = parse(strategy), buffers
        trained = [(name, each) for name, each in model.module.named_parameters() if each.requires_grad]
        self._named = {name: each for name, each in trained if name not in model.parameters_to_ignore}
        self._shapes = [tuple(each.shape) for each in self._named.values()]
        self._strategy, self._world = job.job().strategy(self._spec, self._shapes)
        self._parameters = Parameters(
            self._named,
            lambda _: None,
            self._strategy,
            ranks=self._world.size,
            divided=True,
            careful=self._spec.capabilities.has_residual,
            overlap=PassOverlap,
            updates_unused=False,
        )
        self._clock = Clock()
        self._steps: record.Steps | None = None
        self._is_recorded = False
        self._waits: set[int] | None = None
        """Parameters whose gradients this backward pass has yet to compute; None: it is not synchronized"""
        self._all_used = self._ends = False
        """Whether backward computes all gradients; whether `finish` will be called when it ends"""
        this = weakref.ref(self)
        for index, parameter in enumerate(self._named.values()):
            parameter.register_post_accumulate_grad_hook(functools.partial(_computed, this, index))

    def expect(self, *, all_used: bool) -> None:
        """The next backward pass is to be synchronized. `all_used`: it computes all gradients.

        Raises RuntimeError if the one before did not.
        """
        if self._waits and self._all_used and len(self._waits) < len(self._named):
            name = list(self._named)[min(self._waits)]
            problem = f"the loss does not use {len(self._waits)} of {len(self._named)} parameters, such as {name}"
            raise RuntimeError(f"{problem}; hint: DistributedDataParallel(..., find_unused_parameters=True)")
        self._waits, self._all_used, self._ends = set(range(len(self._named))), all_used, False
        self._parameters.begin_pass()

    def computed(self, index: int) -> None:
        """Backward has computed a gradient."""
        if self._waits is not None:
            self._waits.discard(index)
            if not self._waits and self._all_used:
                self.end_with_backward()

    def end_with_backward(self) -> None:
        """Call `finish` when the backward pass that runs now has ended."""
        if self._waits is not None and not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Sum the gradients that were not sent during backward. Collective."""
        if self._waits is not None:
            self._waits = None
            self._exchange()

    def take_part(self) -> None:
        """Exchange without gradients, because this rank has no more batches. Collective."""
        self._parameters.joined = True
        try:
            self._exchange()
        finally:
            self._parameters.joined = False

    def _exchange(self) -> None:
        if not self._is_recorded:
            self._is_recorded = True
            self._steps = job.recorder(
                self._spec,
                self._world,
                shapes=self._shapes,
                device=str(next(iter(self._named.values())).device),
                threads=torch.get_num_threads(),
            )
        self._parameters.buffers_changed = self._buffers.changed()
        done = self._strategy.step(self._parameters, 1.0, self._clock)
        sent_bytes = done.sent_bytes
        if self._parameters.must_repeat:
            self._parameters.must_repeat = False
            done = self._strategy.step(self._parameters, 1.0, self._clock)
            sent_bytes += done.sent_bytes
        self._buffers.equal = done.totals is not None and not done.totals[BUFFERS]
        waited_s = self._clock.take("communication")
        if self._steps is not None and not self._parameters.joined:
            local_sent_bytes = self._world.take_local_sent_bytes()
            self._steps.done(
                lr=self._lr(), exchange_s=waited_s, sent_bytes=sent_bytes, local_sent_bytes=local_sent_bytes
            )

    def _lr(self) -> float | None:
        return next((learning_rate(each) for made in _optimizers if (each := made()) and self.trains(each)), None)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of this model."""
        own = set(map(id, self._named.values()))
        return any(id(each) in own for group in optimizer.param_groups for each in group["params"])

    def state(self) -> dict[str, Any]:
        """What this rank needs to continue with the same bits."""
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in self._strategy.state().items()}
        return {"strategy": str(self._spec), "rank": self._world.rank, "size": self._world.size, "arrays": arrays}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state. Another rank's is resharded, and another strategy's is ignored, with a line."""
        if state["strategy"] != str(self._spec):
            if self._world.rank == 0:
                job.say(f"the residual of {state['strategy']} is not used, because the strategy is now {self._spec}")
            return
        arrays = {name: np.array(array.cpu()) for name, array in state["arrays"].items()}
        is_own = (state["rank"], state["size"]) == (self._world.rank, self._world.size)
        self._strategy.load(arrays if is_own else self._strategy.reshard_state([arrays]))
        self._parameters.pause()


_optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
_models = weakref.WeakSet[DistributedDataParallel]()


def sum_gradients(model: DistributedDataParallel, strategy: str | None) -> None:
    """From now on a strategy sums the model's gradients; None leaves them unsummed. Collective."""
    is_first = not isinstance(model.reducer, Expecting)
    buffers = Buffers(model) if is_first else model.reducer.buffers
    sums = None if strategy is None else Summing(model, strategy, buffers)
    if is_first:
        send_only_changed()
        model._remove_autograd_hooks()
        model.reducer = Expecting(model, sums, buffers)
        _models.add(model)
    else:
        model.reducer.sums = sums
    model.require_backward_grad_sync = sums is not None


def keep_state(optimizer: torch.optim.Optimizer) -> None:
    """From now on the optimizer's `state_dict` has the state of the models that it trains."""
    _optimizers.append(weakref.ref(optimizer))
    optimizer.register_state_dict_post_hook(_add_state)
    optimizer.register_load_state_dict_pre_hook(_load_state)


def _sums_of(optimizer: torch.optim.Optimizer) -> list[Summing]:
    sums = [model.reducer.sums for model in _models if model.reducer.sums is not None]
    return [each for each in sums if each.trains(optimizer)]


def _add_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for sums in _sums_of(optimizer)[:1]:
        state[STATE] = sums.state()


def _load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for sums in _sums_of(optimizer)[:1] if STATE in state else ():
        sums.load(state[STATE])


def _computed(summing: weakref.ref[Summing], index: int, parameter: torch.nn.Parameter) -> None:
    if this := summing():
        this.computed(index)
