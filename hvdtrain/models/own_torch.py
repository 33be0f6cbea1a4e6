"""A script's own PyTorch module, as the loop wants a model: its loss returns sums over samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hvdtrain.config.options import TrainConfig
from hvdtrain.models.dense_torch import Seen
from hvdtrain.models.layers import Layer, grouped, regression_terms
from hvdtrain.system.exits import BAD_CONFIG, Failure

Shapes = Mapping[str, tuple[int, ...]]


class Own(nn.Module):
    """Trains the parameters of `model` that require a gradient. Running statistics of BatchNorm are each rank's own;
    other buffers, and parameters without a gradient, are constants. Random layers draw from the step's key: see
    `data.halves`.

    `loss(outputs, targets)` returns each sample's loss (n, ...) or their mean, `sums(outputs, targets)` by name what
    each sample adds to the sums of `shapes` (n, *shape). `threads`: those that PyTorch keeps; 0: it takes any number.
    `dense`: see `workload.Workload.dense`, known once the model was `probe`d; so are the `layers` of an nn.Sequential
    that is to be cut into stages. Each of its children draws from a seed of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        sums: Callable[[Any, Any], Mapping[str, Tensor]],
        shapes: Shapes,
        config: TrainConfig,
    ) -> None:
        """Raises Failure (78) for parameters that are not float32, and for none."""
        super().__init__()
        self.threads, self.dense = 0, dict[str, int]()
        self.layers: list[Layer] = []
        self._begins: list[int] = []
        """Which child each of the layers begins with"""
        self._first = 0
        hooked = any(
            getattr(model, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
        )
        self._sequential = type(model) is nn.Sequential and not hooked
        self.model, self._loss, self._sums, self._shapes, self._config = model, loss, sums, shapes, config
        self._constants: dict[str, np.ndarray] = {}
        self._has_trained = False
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        wrong = [f"{name} is {each.dtype}" for name, each in trained.items() if each.dtype != torch.float32]
        if wrong or not trained:
            what = wrong[0] if wrong else "no parameter requires a gradient"
            raise Failure(f"model: {what}; float32 parameters are trained: see model.float()", BAD_CONFIG)
        self.shapes: Shapes = {name: tuple(each.shape) for name, each in trained.items()}
        for each in model.modules():  # what is exchanged, and fused optimizers, take whole gradients
            if isinstance(each, nn.Embedding | nn.EmbeddingBag):
                each.sparse = False
        norms = {name: each for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._NormBase)}
        if endless := [name for name, each in norms.items() if each.momentum is None]:
            raise Failure(f"model.{endless[0]} has momentum=None, a mean over all steps: give it one", BAD_CONFIG)
        self.statistics = {
            f"{name}.{kind}".lstrip("."): each.momentum
            for name, each in norms.items()
            for kind in ("running_mean", "running_var")
            if each.track_running_stats
        }
        """Running statistics by name, and their momentum"""

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are trained, by their names in the script's module."""
        return (each for each in self.model.named_parameters() if each[1].requires_grad)

    def named_buffers(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, Tensor]]:
        """The running statistics."""
        return (each for each in self.model.named_buffers() if each[0] in self.statistics)

    def arrays(self) -> dict[str, np.ndarray]:
        """What is trained, and the running statistics."""
        return {name: _array(each) for name, each in (*self.named_parameters(), *self.named_buffers())}

    def constants(self) -> dict[str, np.ndarray]:
        """All else that the module's `state_dict` holds."""
        counts = {f"{name.rpartition('running_')[0]}num_batches_tracked" for name in self.statistics}
        known = {*self.shapes, *self.statistics, *counts}
        return {name: _array(each) for name, each in self.model.state_dict().items() if name not in known}

    @torch.no_grad()
    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Gives the module these values."""
        held = self.model.state_dict()
        for name, array in arrays.items():
            held[name].copy_(torch.from_numpy(np.require(array, requirements="W")))

    def set_constants(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.take(arrays)
        self._constants = {name: array.copy() for name, array in arrays.items()}

    def part(self, part: range) -> Own:
        """These `layers` alone, which share their values with this one."""
        children = list(self.model._modules.items())
        begins = [*self._begins, len(children)]
        mine = nn.Sequential(OrderedDict(children[begins[part.start] : begins[part.stop]]))
        made = Own(mine, self._loss, self._sums, self._shapes, self._config)
        made.eval()  # the children may be in either state, and the loop tells all at once
        made._first, held = begins[part.start], mine.state_dict()
        made._constants = {name: array for name, array in self._constants.items() if name in held}
        return made

    def forward(self, *arrays: Tensor) -> Any:
        """Outputs of inputs, targets and key as in `loss`; of a part, what it makes of what the one before made."""
        *inputs, _, key = arrays
        seed = _seed(key) if self.training else None
        self._has_trained |= self.training
        if not self.training and self._has_trained and self._constants:
            self._check_constants()
        if not self._sequential:
            _draw_from(seed, key.device)
            outputs = self.model(*inputs)
        else:
            (outputs,) = inputs
            for number, child in enumerate(self.model._modules.values(), start=self._first):
                _draw_from(None if seed is None else seed + number, key.device)
                outputs = cast(nn.Module, child)(outputs)
        return outputs.float() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs

    def loss(self, *arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the losses, and the metric's sums, of inputs, targets (n, ...) and key."""
        outputs, targets = self(*arrays), arrays[-2]
        losses, count = self._loss(outputs, targets), len(targets)
        total = losses * count if losses.ndim == 0 else losses.reshape(count, -1).mean(1).sum()
        with torch.no_grad():
            found = self._sums(outputs.detach() if isinstance(outputs, Tensor) else outputs, targets)
            sums = {name: _summed(each, self._shapes.get(name, ()), count) for name, each in found.items()}
        return total, sums

    def _check_constants(self) -> None:
        """Once, after some training: raises Failure (78) if that has changed a buffer other than running statistics."""
        now = self.constants()
        if changed := [name for name, array in self._constants.items() if not np.array_equal(array, now[name])]:
            raise Failure(
                f"model: training changes its buffer {changed[0]}; only running statistics of BatchNorm may change, "
                "since nobody knows what others are to be on all ranks together",
                BAD_CONFIG,
            )
        self._constants = {}

    @torch.no_grad()
    def probe(self, arrays: list[np.ndarray]) -> float:
        """Multiply-adds of a linear or convolutional layer of mean size for one sample, of a batch that the model sees
        in evaluation.

        Raises Failure (78) if the loss is a sum over samples, which nobody could tell from their mean.
        """
        self.eval()
        device = next(self.model.parameters()).device
        *inputs, targets, _ = [torch.from_numpy(array).to(device) for array in arrays]
        seen = Seen()
        with seen:
            made, work = _worked(self.model, *inputs)
            once = self._loss(made, targets)
        rows = {name: -(-seen.rows(each) // len(targets)) for name, each in self.named_parameters()}
        self.dense = {name: count for name, count in rows.items() if count}
        outputs = self.model(*(torch.cat([each, each]) for each in inputs))
        twice = self._loss(outputs, torch.cat([targets, targets]))
        if once.ndim == 0 and once and abs(float(twice / once) - 2) < 0.01:
            raise Failure("loss returns a sum over samples: let it return their mean, or each one's", BAD_CONFIG)
        if self._config.stages > 1 and self._sequential:
            self.layers, self._begins = grouped(self._children(inputs[0]))
        return sum(work) / max(1, len(work)) / len(targets)

    def _children(self, x: Any) -> Iterator[tuple[Layer, bool, bool]]:
        """Those of a Sequential, as `grouped` wants them; x: its inputs."""
        names = {id(each): name for name, each in (*self.named_parameters(), *self.named_buffers())}
        trained, count = {id(each) for _, each in self.named_parameters()}, len(x)
        for name, child in cast(dict[str, nn.Module], self.model._modules).items():
            held = [id(each) for each in (*child.parameters(), *child.buffers())]
            fits = isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1 and len(x) == count
            x, work = _worked(child, x)
            layer = Layer(
                name=name,
                arrays=tuple(names[each] for each in held if each in names),
                output=tuple(x.shape[1:]) if isinstance(x, Tensor) else (),
                multiply_adds=sum(work) / count or float(sum(each.numel() for each in child.parameters())),
            )
            yield layer, not trained.isdisjoint(held), fits

    @torch.no_grad()
    def release(self) -> None:
        """The script's module has its parameters to itself again, outside the vector that they were exchanged in, and
        all on the device where some are."""
        if used := [each.device for each in self.parameters() if each.device.type != "cpu"]:
            self.to(used[0])
        for parameter in self.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None


def _worked(module: nn.Module, *inputs: Any) -> tuple[Any, list[float]]:
    """What a module makes of its inputs, and the multiply-adds of its linear and convolutional layers."""
    work: list[float] = []
    hooks = [
        layer.register_forward_hook(lambda layer, _, out: work.append(out.numel() * layer.weight[0].numel()))
        for layer in module.modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    ]
    made = module(*inputs)
    for hook in hooks:
        hook.remove()
    return made, work


def _seed(key: Tensor) -> int:
    high, low = (int(half) & 0xFFFFFFFF for half in key.tolist())
    return high * 0x9E3779B1 + low  # of a seed PyTorch's CPU generator sees the lower half only


def _draw_from(seed: int | None, device: torch.device) -> None:
    """Seeds what a layer on this device may draw from, unless there is no seed. `torch.manual_seed`, which seeds all
    kinds of devices, takes 100 times as long."""
    if seed is None:
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def correct(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What `metrics.Accuracy` adds up, of scores (n, classes, ...)."""
    if outputs.ndim != targets.ndim + 1 or outputs.shape[1] == 1:
        told = f"outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}; give each class's number as target"
        raise Failure(f"accuracy needs a score for each class: {told}, or metric= and sums=", BAD_CONFIG)
    return {"correct": outputs.argmax(1) == targets}


def errors(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """What `metrics.Regression` adds up, of numbers (n, ...)."""
    return regression_terms(outputs.double().reshape(targets.shape), targets.double())


def _summed(values: Tensor, shape: tuple[int, ...], count: int) -> Tensor:
    """The sum over samples; of several numbers where one is to be added up, their mean is."""
    return values.double().reshape(count, int(np.prod(shape)), -1).mean(-1).sum(0).reshape(shape)


def _array(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())
