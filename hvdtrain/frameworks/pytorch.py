"""A PyTorch replica: one model on one device, updated by an optimizer of torch.optim."""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.arrays import Array
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.backends.framework import TorchStep
from hvdtrain.config.options import TrainConfig
from hvdtrain.data import Batch
from hvdtrain.frameworks import Profiler, statistics_of
from hvdtrain.frameworks.flat_torch import Average, Flat
from hvdtrain.frameworks.hooks_torch import GradientHooks
from hvdtrain.frameworks.muon_torch import Muon
from hvdtrain.records.metrics import Metric
from hvdtrain.strategies import Strategy
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOTS = {"momentum": "momentum_buffer", "adam_mean": "exp_avg", "adam_square": "exp_avg_sq", "adam_steps": "step"}
"""hvdtrain's and torch.optim's names of the optimizer's state of a parameter"""
CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_"""


def prepare(device: str, local_rank: int, threads: int, *, exclusive_gpu: bool = False) -> str:
    """Select this rank's GPU, or the CPU with `threads` threads, and return the device's name.

    With `exclusive_gpu` and device "auto", surplus ranks use the CPU. Raises Failure (78) if "gpu" is requested and
    none exists.
    """
    torch.set_num_threads(threads)
    available = device == "gpu" or not exclusive_gpu or local_rank < torch.cuda.device_count()
    if device != "cpu" and available and torch.cuda.is_available():
        own = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
        return str(own)
    if device == "gpu":
        raise Failure("--device gpu: PyTorch finds no GPU; hint: use --device cpu or auto", exits.BAD_CONFIG)
    return "cpu"


class TorchReplica:
    """See `frameworks.Replica`. `model.loss(*arrays)` returns the sum of losses and the metric's sums by name."""

    _hooks: GradientHooks | None = None
    """None if the strategy reads the gradients after backward"""
    reports = True
    one_backward = True
    """Whether each step runs backward once, so that gradients are final when they are computed"""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        device: str,
        config: TrainConfig,
        world: Communicator,
        strategy: Strategy,
        metric: Metric,
    ) -> None:
        self.device, self._metric = device, metric
        self._device = torch.device(device)
        self._model = model.to(self._device)
        self._world = world
        self._parameters = dict(model.named_parameters())
        floats = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
        self.statistics = statistics_of(model, floats)
        self._autocast = (
            contextlib.nullcontext()
            if config.precision == "fp32"
            else torch.autocast(self._device.type, PRECISIONS[config.precision])
        )
        self._named = trained = [(name, each) for name, each in self._parameters.items() if each.requires_grad]
        optimizer = _optimizer(trained, config)
        self._step = TorchStep(self._model, optimizer)
        self._local, self._flat = strategy.capabilities.local_updates, None
        if strategy.capabilities.in_backward:
            self._step = world.in_framework.overlapped(self._model, optimizer, strategy.settings)
        else:
            self._flat = Flat([each for _, each in trained], metric.size + 1, self._device)
            self.use(strategy)
        self._average, self._averages = None, dict[str, torch.Tensor]()
        if config.ema:
            self._average = Average([self._flat.weights] if self._flat else [each for _, each in trained])
            arrays = self._flat.split(self._average.arrays[0]) if self._flat else self._average.arrays
            self._averages = dict(zip([name for name, _ in trained], arrays, strict=True))
        self._optimizer: torch.optim.Optimizer = self._step.optimizer
        # PyTorch's first scale, divided by the loss factor so that backward sees the same scale in every strategy.
        first_scale = 2.0**16 / self._step.loss_factor
        self._scaler = torch.amp.GradScaler(
            self._device.type, init_scale=first_scale, enabled=config.precision == "fp16"
        )
        self._parts: dict[range, list[list[torch.nn.Parameter]]] = {}
        """By range of arrays: their parameters in each of the optimizer's groups"""
        self._trained, self._clip_norm = [each for _, each in trained], config.clip_norm

    def use(self, strategy: Strategy) -> None:
        assert self._flat is not None
        self._local = strategy.capabilities.local_updates
        self._flat.use(strategy)
        if self._hooks:
            self._hooks.remove()
        buckets = strategy.buckets() if self.one_backward else ()
        if not buckets:
            self._hooks = None
            return
        flat, names = self._flat, [name for name, _ in self._named]
        this = weakref.ref(self)  # hooks stay on a model that is put into another replica, and must not keep this one

        def report(number: int) -> None:
            if (replica := this()) is None or not replica.reports:
                return
            begin, end = flat.borders[buckets[number].start], flat.borders[buckets[number].stop] if number else None
            strategy.on_bucket_ready(number, flat.memory, flat.piece(begin, end))

        def repeated(index: int) -> None:  # as the hooks of reentrant checkpoints are, once for each use of a weight
            raise Failure(
                f"{names[index]}: its gradient arrived twice in one backward pass, so an incomplete one may "
                "have been sent; a shared weight cannot be used inside reentrant checkpoints; hint: "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )

        self._hooks = GradientHooks(buckets, [each for _, each in self._named], report, repeated)

    def backward(self, batch: Batch, lr: float, stop: float) -> None:
        self._train(True)
        if self._flat is None:
            self._optimizer.zero_grad()
        else:
            self._flat.gradients.zero_()
        with self._autocast:
            loss, sums = self._step.loss(*self._tensors(batch.arrays))
        tail = torch.cat([*self._numbers(loss, sums), torch.tensor([batch.weight, stop]).to(loss)])
        self._tail = self._world.in_framework.start_sum(tail, "step.totals")
        self._samples = batch.weight, batch.total_weight
        mean_of = batch.weight if self._local else batch.total_weight
        if self._hooks and self._flat:
            self._flat.set_tail(tail)
            self._hooks.begin()
        self._step.backward(self._scaler.scale(loss / (mean_of / self._step.loss_factor)))
        while self._hooks and self._hooks.next < len(self._hooks.buckets):  # gradients that the loss does not need
            self._hooks.report_next()

    def _train(self, training: bool) -> None:
        if self._model.training != training:  # setting it in every module takes as long as a small layer
            self._model.train(training)

    def vector(self) -> Array:
        assert self._flat is not None
        return self._flat.memory if self._hooks else self._flat.vector(self._tail)

    def tail(self) -> np.ndarray:
        return np.asarray(self._world.in_framework.finish_sum(self._tail).cpu().numpy(), dtype=np.float64)

    def share(self) -> tuple[int, int]:
        return self._samples

    @property
    def updates_parts(self) -> bool:
        on_cpu = self._flat is not None and self._device.type == "cpu"
        return on_cpu and not self._clip_norm and not self._scaler.is_enabled()  # these need all gradients

    def apply(self, lr: float, arrays: range | None = None) -> None:
        if self._flat is not None:
            self._flat.take_gradients()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if arrays is not None:
            self._update(arrays)
            return
        with self._step.updating():
            if self._clip_norm:
                self._scaler.unscale_(self._optimizer)
                self._clip_gradients()
            self._scaler.step(self._optimizer)
        self._scaler.update()

    def _update(self, arrays: range) -> None:
        """Make the optimizer's step for these arrays only."""
        groups = self._optimizer.param_groups
        if arrays not in self._parts:
            some = {id(each) for each in self._trained[arrays.start : arrays.stop]}
            self._parts[arrays] = [[each for each in group["params"] if id(each) in some] for group in groups]
        every = [group["params"] for group in groups]
        for group, part in zip(groups, self._parts[arrays], strict=True):
            group["params"] = part
        try:
            self._optimizer.step()
        finally:
            for group, whole in zip(groups, every, strict=True):
                group["params"] = whole

    def _clip_gradients(self) -> None:
        """Do what torch.nn.utils.clip_grad_norm_ does, in one piece if the gradients are one vector."""
        gradients = (
            [self._flat.gradients] if self._flat else [each.grad for each in self._trained if each.grad is not None]
        )
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, torch.clamp(self._clip_norm / (norm + CLIP_EPSILON), max=1.0))

    def weights(self, arrays: range | None = None) -> Array:
        assert self._flat is not None
        return self._flat.as_given(self._flat.weights[self._flat.span(arrays)])

    def set_weights(self, weights: Array, arrays: range | None = None) -> None:
        assert self._flat is not None
        self._flat.weights[self._flat.span(arrays)].copy_(torch.as_tensor(weights), non_blocking=True)

    def waited_s(self) -> float | None:
        return self._step.waited_s()

    def sent_bytes(self) -> tuple[int, int]:
        return 0, 0

    @torch.no_grad()
    def observe(self, batch: Batch) -> None:
        self._model.train()
        with self._autocast:
            self._model.loss(*self._tensors(batch.arrays))

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> np.ndarray:
        self._model.eval()
        with self._autocast:
            loss, sums = self._model.loss(*self._tensors(batch.arrays))
        return np.append(torch.cat(self._numbers(loss.double(), sums)).cpu().numpy(), batch.weight)

    def state(self) -> dict[str, np.ndarray]:
        arrays = {f"parameter.{name}": p.detach().cpu().numpy() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            slots = self._optimizer.state.get(parameter, {})
            arrays |= {f"{slot}.{name}": slots[key].cpu().numpy() for slot, key in SLOTS.items() if key in slots}
        arrays |= {f"average.{name}": each.cpu().numpy() for name, each in self._averages.items()}
        if self._scaler.is_enabled():
            scaler = self._scaler.state_dict()
            arrays["loss_scale"] = np.array([scaler["scale"], scaler["_growth_tracker"]], dtype=np.float64)
        return arrays

    @torch.no_grad()
    def load(self, state: dict[str, np.ndarray]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(torch.from_numpy(state[f"parameter.{name}"]))
            for slot, key in SLOTS.items():
                if (array := state.get(f"{slot}.{name}")) is not None:
                    self._optimizer.state[parameter][key] = torch.from_numpy(array.copy()).to(self._device)
        if self._average is not None:
            self._average.restart()
            for name, average in self._averages.items():
                if (array := state.get(f"average.{name}")) is not None:
                    average.copy_(torch.from_numpy(array))
        if "loss_scale" in state:
            scale, steps = state["loss_scale"]
            self._scaler.load_state_dict(
                {**self._scaler.state_dict(), "scale": float(scale), "_growth_tracker": int(steps)}
            )

    def local_state(self) -> dict[str, np.ndarray]:
        return {name: buffer.cpu().numpy() for name, buffer in self._model.named_buffers()}

    @torch.no_grad()
    def load_local(self, state: dict[str, np.ndarray]) -> None:
        for name, buffer in self._model.named_buffers():
            if name in state:
                buffer.copy_(torch.from_numpy(state[name]))

    def average(self, decay: float, weights: Array | None) -> None:
        assert self._average is not None
        self._average.update(decay, weights)

    def swap_average(self) -> None:
        assert self._average is not None
        self._average.swap()

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def profiler(self) -> Profiler:
        from hvdtrain.frameworks.profile_torch import TorchProfiler

        return TorchProfiler()

    def _numbers(self, loss: torch.Tensor, sums: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the loss and the metric's sums as vectors of the loss's type."""
        return [each.detach().to(loss).reshape(-1) for each in (loss, *self._metric.in_order(sums))]

    def _tensors(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self._device, non_blocking=True) for array in arrays]


def _optimizer(trained: list[tuple[str, torch.nn.Parameter]], config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimizer == "muon":
        return _eager(Muon)(trained, config.lr, config.momentum, config.weight_decay)
    parameters = [each for _, each in trained]
    # Fused SGD leaves the momentum uninitialised if loss scaling skips the very first step.
    common: Any = {"weight_decay": config.weight_decay, "fused": config.precision != "fp16"}
    if config.optimizer == "adam":
        return _eager(torch.optim.AdamW)(parameters, config.lr, **common)
    return _eager(torch.optim.SGD)(parameters, config.lr, momentum=config.momentum, **common)


def _eager(optimizer: type[torch.optim.Optimizer]) -> Any:
    """Return the optimizer with methods that do not import torch.compile, which takes as long as importing torch.

    The original methods are wrapped to exclude them from compilation, and hvdtrain compiles no optimizer.
    """
    step, add, zero = (inspect.unwrap(getattr(optimizer, name)) for name in ("step", "add_param_group", "zero_grad"))
    methods = {"step": torch.no_grad()(step), "add_param_group": add, "zero_grad": zero}
    return type(optimizer.__name__, (optimizer,), methods)
