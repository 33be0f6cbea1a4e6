"""Muon for PyTorch: momentum whose matrices are orthogonalised.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, with three of its five Newton-Schulz
iterations. They run on the small Gram matrix, and on all weights of one shape at once, which on a CPU takes a quarter
of the time.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hvdtrain.frameworks import ITERATIONS, NEWTON_SCHULZ, SMALLEST_SQUARE, by_muon


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised for weights of two or more dimensions: p -= lr sqrt(max(1, m / n)) factor(v).

    A weight (out, in, h, w) is a matrix of m = out rows and n = in h w columns. The singular values of `factor(v)` are
    0.68 to 1.21 where those of v were at least a 50th of its norm. Vectors, and weights with "embed" in their name if
    `params` are named parameters, are updated by `rest`: SGD with Nesterov momentum, or AdamW. A parameter group with
    a `method`, "muon", "sgd" or "adamw", is updated by that one, for example the last layer of a language model.

    `weight_decay` is decoupled from the gradient, except in SGD. `rest_scale` is the learning rate of the rest relative
    to `lr`. `betas` and `eps` belong to AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        rest: Literal["sgd", "adamw"] = "sgd",
        rest_scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """Raises ValueError for an unknown method."""
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "method": "muon",
        }
        groups: list[dict[str, Any]] = []
        for given in _groups(params):
            if "method" in given:
                groups.append(given)
                continue
            weights = [each if isinstance(each, tuple) else ("", each) for each in given["params"]]
            chosen = [by_muon(name, weight.ndim) for name, weight in weights]
            for method, wanted, scale in (("muon", True, 1.0), (rest, False, rest_scale)):
                some = [each for each, is_muon in zip(given["params"], chosen, strict=True) if is_muon is wanted]
                if some:
                    groups.append({**given, "params": some, "method": method, "lr": given.get("lr", lr) * scale})
        if unknown := {group["method"] for group in groups} - METHODS.keys():
            raise ValueError(f"method {unknown.pop()!r} is unknown; hint: {', '.join(METHODS)}")
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have a gradient. Returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                METHODS[group["method"]](self, weights, group)
        return loss

    def _muon(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        shapes = collections.defaultdict[Any, list[Tensor]](list)
        for weight in weights:
            shapes[weight.shape, weight.dtype, weight.device].append(weight)
        stacks: dict[Any, Stack] = self.__dict__.setdefault("_stacks", {})  # a copied optimizer has none
        for key, alike in shapes.items():
            if key not in stacks or len(stacks[key].factors) < len(alike):
                stacks[key] = Stack(alike)
            stacks[key].update(alike, self._slot(alike, "momentum_buffer"), group["lr"], group["momentum"])

    def _sgd(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        gradients: Sequence[Any] = [weight.grad for weight in weights]
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        velocities = self._slot(weights, "momentum_buffer")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(weights, gradients, alpha=-group["lr"])
        torch._foreach_add_(weights, velocities, alpha=-group["lr"] * group["momentum"])

    def _adamw(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        gradients: Sequence[Any] = [weight.grad for weight in weights]
        first, second = group["betas"]
        means, squares = self._slot(weights, "exp_avg"), self._slot(weights, "exp_avg_sq")
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        for weight, mean, square in zip(weights, means, squares, strict=True):
            self.state[weight]["step"] = self.state[weight].get("step", torch.zeros(())) + 1
            done = self.state[weight]["step"].item()
            correction = math.sqrt(1 - second**done)
            scale = -group["lr"] * correction / (1 - first**done)
            weight.addcdiv_(mean, square.sqrt().add_(group["eps"] * correction), value=scale)

    def _slot(self, weights: Sequence[Tensor], name: str) -> list[Tensor]:
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight)
        return [self.state[weight][name] for weight in weights]


METHODS = {"muon": Muon._muon, "sgd": Muon._sgd, "adamw": Muon._adamw}


class Stack:
    """Matrices of one shape, and the memory in which their orthogonal factors are computed.

    It is bfloat16 on a GPU. Gram matrices, which are small, are always float32.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        first = weights[0]
        rows, columns = first.shape[0], math.prod(first.shape[1:])
        self._scale = math.sqrt(max(1.0, rows / columns))
        half = first.is_cuda or first.dtype == torch.bfloat16
        options: Any = {"dtype": torch.bfloat16 if half else torch.float32, "device": first.device}
        self._matrices = torch.empty(len(weights), rows, columns, **options)
        self.factors = torch.empty_like(self._matrices)
        side, options["dtype"] = min(rows, columns), torch.float32
        self._gram, self._step, self._product, self._spare = torch.empty(4, len(weights), side, side, **options)

    def update(self, weights: Sequence[Tensor], velocities: Sequence[Tensor], lr: float, momentum: float) -> None:
        """Add the gradients to the velocities, and subtract the orthogonal factors from the weights."""
        for weight, velocity, matrix in zip(weights, velocities, self._matrices, strict=False):
            torch.add(weight.grad, velocity, alpha=momentum, out=velocity)
            torch.add(weight.grad, velocity, alpha=momentum, out=matrix.view(weight.shape))
        self.orthogonalise(len(weights))
        for weight, factor in zip(weights, self.factors, strict=False):
            weight.add_(factor.view(weight.shape), alpha=-lr * self._scale)

    def orthogonalise(self, count: int) -> None:
        """Compute the first `factors`, with singular values near 1 and the singular vectors of the matrices."""
        a, b, c = NEWTON_SCHULZ
        memory = (self._matrices, self.factors, self._gram, self._step, self._product, self._spare)
        matrices, factors, gram, step, product, spare = (each[:count] for each in memory)
        wide = matrices.shape[1] <= matrices.shape[2]
        left, right = (matrices, matrices.mT) if wide else (matrices.mT, matrices)
        if matrices.dtype == gram.dtype:
            torch.bmm(left, right, out=gram)
        else:
            gram.copy_(torch.bmm(left, right))
        squares = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp_(min=SMALLEST_SQUARE)
        gram.div_(squares)
        for number in range(ITERATIONS):
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=step)
            step.diagonal(dim1=1, dim2=2).add_(a)
            if number == 0:
                torch.mul(step, squares.rsqrt(), out=product)
            else:
                torch.bmm(step, product, out=spare)
                product, spare = spare, product
            if number < ITERATIONS - 1:
                torch.bmm(step, gram, out=spare)
                torch.bmm(spare, step, out=gram)
        small = product.to(matrices.dtype)
        torch.bmm(*((small, matrices) if wide else (matrices, small)), out=factors)


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameters in any form that torch.optim accepts as groups."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [
        {**group, "params": [each] if isinstance(each := group["params"], Tensor) else list(each)} for group in groups
    ]
