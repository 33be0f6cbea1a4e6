"""Adapter for a user's PyTorch module: its loss returns sums over samples, as the training loop needs them."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.config.options import TrainConfig
from hvdtrain.models.layers import Layer, grouped, regression_terms
from hvdtrain.system.exits import BAD_CONFIG, Failure

Shapes = Mapping[str, tuple[int, ...]]


class Own(nn.Module):
    """Trains the parameters of `model` that require a gradient.

    Running statistics of BatchNorm are kept separately on each rank. Other buffers, and parameters without a gradient,
    are constants. Random layers draw from the step's key (see `data.halves`).

    `loss(outputs, targets)` returns each sample's loss (n, ...) or their mean. `sums(outputs, targets)` returns by name
    each sample's terms in the sums of `shapes` (n, *shape). `threads` is 0, since PyTorch can use any number of
    threads. `layers` are those of an nn.Sequential with pipeline stages, known after `probe`. Each of its children
    draws from its own seed.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        sums: Callable[[Any, Any], Mapping[str, Tensor]],
        shapes: Shapes,
        config: TrainConfig,
        inputs: Sequence[str] = (),
    ) -> None:
        """`inputs`: the keywords by which the model takes its inputs; empty if it takes them by position.

        Raises Failure (78) if a parameter is not float32, or there are none.
        """
        super().__init__()
        self.threads = 0
        self.layers: list[Layer] = []
        self._begins: list[int] = []
        """The first child in each of `layers`"""
        self._first = 0
        hooked = any(
            getattr(model, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
        )
        self._inputs = () if isinstance(model, nn.Sequential) else tuple(inputs)
        self._sequential = type(model) is nn.Sequential and not hooked
        self.model, self._loss, self._sums, self._shapes, self._config = model, loss, sums, shapes, config
        self._constants: dict[str, np.ndarray] = {}
        self._has_trained = False
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        wrong = [f"{name} is {array.dtype}" for name, array in trained.items() if array.dtype != torch.float32]
        if wrong or not trained:
            message = wrong[0] if wrong else "no parameter requires a gradient"
            raise Failure(f"model: {message}; hint: float32 parameters are needed, see model.float()", BAD_CONFIG)
        self.shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in trained.items()}
        for module in model.modules():  # the exchange and fused optimizers need dense gradients
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False
        batch_norm = nn.modules.batchnorm._NormBase
        norms = {name: module for name, module in model.named_modules() if isinstance(module, batch_norm)}
        if endless := [name for name, norm in norms.items() if norm.momentum is None]:
            message = f"model.{endless[0]} has momentum=None, a mean over all steps"
            raise Failure(f"{message}; hint: give it a momentum", BAD_CONFIG)
        self.statistics = {
            f"{name}.{kind}".lstrip("."): norm.momentum
            for name, norm in norms.items()
            for kind in ("running_mean", "running_var")
            if norm.track_running_stats
        }
        """Names of the running statistics, and their momentum"""

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters, with their names in the user's module."""
        return (named for named in self.model.named_parameters() if named[1].requires_grad)

    def named_buffers(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """The running statistics."""
        return (named for named in self.model.named_buffers() if named[0] in self.statistics)

    def arrays(self) -> dict[str, np.ndarray]:
        """Trained parameters and running statistics."""
        return {name: _array(tensor) for name, tensor in (*self.named_parameters(), *self.named_buffers())}

    def constants(self) -> dict[str, np.ndarray]:
        """Everything else in the module's `state_dict`."""
        counts = {f"{name.rpartition('running_')[0]}num_batches_tracked" for name in self.statistics}
        known = {*self.shapes, *self.statistics, *counts}
        return {name: _array(tensor) for name, tensor in self.model.state_dict().items() if name not in known}

    @torch.no_grad()
    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets the module's values."""
        held = self.model.state_dict()
        for name, array in arrays.items():
            held[name].copy_(torch.from_numpy(np.require(array, requirements="W")))

    def set_constants(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.take(arrays)
        self._constants = {name: array.copy() for name, array in arrays.items()}

    def part(self, part: range) -> Own:
        """The model of a stage, with only these `layers`. It shares its values with this model."""
        children = list(self.model._modules.items())
        begins = [*self._begins, len(children)]
        stage = nn.Sequential(OrderedDict(children[begins[part.start] : begins[part.stop]]))
        result = Own(stage, self._loss, self._sums, self._shapes, self._config)
        result.eval()  # the children may differ, and the loop changes all at once
        result._first, state = begins[part.start], stage.state_dict()
        result._constants = {name: array for name, array in self._constants.items() if name in state}
        return result

    def forward(self, *arrays: Tensor) -> Any:
        """Outputs for inputs, targets and key as in `loss`; for a stage, its output for the previous stage's output."""
        *inputs, _, key = arrays
        seed = _seed(key) if self.training else None
        self._has_trained |= self.training
        if not self.training and self._has_trained and self._constants:
            self._check_constants()
        if not self._sequential:
            _draw_from(seed, key.device)
            positional, named = self._arguments(inputs)
            outputs = self.model(*positional, **named)
        else:
            (outputs,) = inputs
            for number, child in enumerate(self.model._modules.values(), start=self._first):
                _draw_from(None if seed is None else seed + number, key.device)
                outputs = cast(nn.Module, child)(outputs)
        return outputs.float() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs

    def loss(self, *arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses, and the metric's sums, for inputs, targets (n, ...) and key."""
        outputs, targets = self(*arrays), arrays[-2]
        losses, count = self._loss(outputs, targets), len(targets)
        total = losses * count if losses.ndim == 0 else losses.reshape(count, -1).mean(1).sum()
        with torch.no_grad():
            terms = self._sums(outputs.detach() if isinstance(outputs, Tensor) else outputs, targets)
            sums = {name: _summed(values, self._shapes.get(name, ()), count) for name, values in terms.items()}
        return total, sums

    def _arguments(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        return ((), dict(zip(self._inputs, inputs, strict=True))) if self._inputs else (inputs, {})

    def _check_constants(self) -> None:
        """Called once after some training. Raises Failure (78) if a buffer other than running statistics has
        changed."""
        now = self.constants()
        if changed := [name for name, array in self._constants.items() if not np.array_equal(array, now[name])]:
            raise Failure(
                f"model: training changes its buffer {changed[0]}; only running statistics of BatchNorm may change, "
                "since ranks cannot agree on other values",
                BAD_CONFIG,
            )
        self._constants = {}

    @torch.no_grad()
    def probe(self, arrays: list[np.ndarray]) -> float:
        """Mean multiply-adds of a linear or convolutional layer for one sample, measured with a batch in evaluation
        mode.

        Raises Failure (78) if the model does not take these inputs, or the loss is a sum over samples, since their
        number would be unknown.
        """
        self.eval()
        device = next(self.model.parameters()).device
        *inputs, targets, _ = [torch.from_numpy(array).to(device) for array in arrays]
        positional, named = self._arguments(inputs)
        try:
            inspect.signature(self.model.forward).bind(*positional, **named)
        except TypeError as error:
            given = f"the inputs {', '.join(self._inputs)}" if self._inputs else f"{len(inputs)} inputs"
            message = f"{type(self.model).__name__}.forward, called with {given} of a sample: {error}"
            raise Failure(f"{message}; hint: make the samples' inputs its arguments", BAD_CONFIG) from error
        outputs, work = _worked(self.model, *positional, **named)
        once = self._loss(outputs, targets)
        positional, named = self._arguments([torch.cat([array, array]) for array in inputs])
        outputs = self.model(*positional, **named)
        twice = self._loss(outputs, torch.cat([targets, targets]))
        if once.ndim == 0 and once and abs(float(twice / once) - 2) < 0.01:
            raise Failure(
                "loss returns a sum over samples; hint: return their mean, or one loss per sample", BAD_CONFIG
            )
        if self._config.stages > 1 and self._sequential:
            self.layers, self._begins = grouped(self._children(inputs[0]))
        return sum(work) / max(1, len(work)) / len(targets)

    def _children(self, x: Any) -> Iterator[tuple[Layer, bool, bool]]:
        """The children of a Sequential, for `grouped`; x: its inputs."""
        names = {id(tensor): name for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        trained, count = {id(parameter) for _, parameter in self.named_parameters()}, len(x)
        for name, child in cast(dict[str, nn.Module], self.model._modules).items():
            held = [id(tensor) for tensor in (*child.parameters(), *child.buffers())]
            fits = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x) == count
            x, work = _worked(child, x)
            layer = Layer(
                name=name,
                arrays=tuple(names[number] for number in held if number in names),
                output=tuple(x.shape[1:]) if isinstance(x, Tensor) else (),
                multiply_adds=sum(work) / count or float(sum(parameter.numel() for parameter in child.parameters())),
            )
            yield layer, not trained.isdisjoint(held), fits

    @torch.no_grad()
    def release(self) -> None:
        """Gives the parameters their own memory again, outside the vector of the exchange, and moves all to the device
        where some of them are."""
        if used := [parameter.device for parameter in self.parameters() if parameter.device.type != "cpu"]:
            self.to(used[0])
        for parameter in self.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None


def _worked(module: nn.Module, *inputs: Any, **named: Any) -> tuple[Any, list[float]]:
    """A module's outputs, and the multiply-adds of its linear and convolutional layers."""
    work: list[float] = []
    hooks = [
        layer.register_forward_hook(lambda layer, _, out: work.append(out.numel() * layer.weight[0].numel()))
        for layer in module.modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    ]
    outputs = module(*inputs, **named)
    for hook in hooks:
        hook.remove()
    return outputs, work


def _seed(key: Tensor) -> int:
    high, low = (int(half) & 0xFFFFFFFF for half in key.tolist())
    return high * 0x9E3779B1 + low  # PyTorch's CPU generator uses only the lower half of a seed


def _draw_from(seed: int | None, device: torch.device) -> None:
    """Seeds the random numbers of a layer on this device, if there is a seed. `torch.manual_seed` would take 100 times
    as long, since it seeds all kinds of devices."""
    if seed is None:
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def correct(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each sample's term in the sum of `metrics.Accuracy`, for scores (n, classes, ...)."""
    if outputs.ndim != targets.ndim + 1 or outputs.shape[1] == 1:
        shapes = f"outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}"
        hint = "give the class numbers as targets, or metric= and sums="
        raise Failure(f"accuracy needs one score per class: {shapes}; hint: {hint}", BAD_CONFIG)
    return {"correct": outputs.argmax(1) == targets}


def errors(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each sample's terms in the sums of `metrics.Regression`, for numbers (n, ...)."""
    return regression_terms(outputs.double().reshape(targets.shape), targets.double())


def _summed(values: Tensor, shape: tuple[int, ...], count: int) -> Tensor:
    """The sum over samples. If a sample has several values per term, their mean is used."""
    return values.double().reshape(count, int(np.prod(shape)), -1).mean(-1).sum(0).reshape(shape)


def _array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
