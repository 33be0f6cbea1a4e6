"""The gradients of weights as factors: `F.linear`, and so `nn.Linear`, keeps what its product would be made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Pair = tuple[np.ndarray, np.ndarray]


class Kept(TorchFunctionMode):
    """While it is entered, backward does not multiply the gradients of these weights; see `strategies.Factored`.

    Each call of a layer adds rows. Raises RuntimeError in backward for a weight that is used otherwise too.
    """

    def __init__(self, weights: Mapping[int, torch.nn.Parameter]) -> None:
        super().__init__()
        self.weights = weights
        self._places = {id(weight): place for place, weight in weights.items()}
        self._anchor = torch.zeros((), requires_grad=True)
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {place: [] for place in weights}
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
            weight.register_post_accumulate_grad_hook(_used_otherwise)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            if (place := self._places.get(id(weight))) is not None:
                return _Linear.apply(x, weight.detach(), bias, self._anchor, self._rows[place].append)
        return func(*args, **(kwargs or {}))

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()

    def pairs(self) -> dict[int, Pair]:
        found = {}
        for place, rows in self._rows.items():
            slopes, inputs = zip(*rows, strict=True) if rows else ((), ())
            a, b = self.weights[place].shape
            found[place] = _matrix(slopes, a), _matrix(inputs, b)
        return found

    @torch.no_grad()
    def multiply(self, factors: Mapping[int, tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]) -> None:
        for place, pair in factors.items():
            weight = self.weights[place]
            slopes, inputs = (torch.cat([torch.from_numpy(part) for part in each]).to(weight.device) for each in pair)
            torch.mm(slopes.T, inputs, out=weight.grad)


class Seen(TorchFunctionMode):
    """While it is entered, it counts the rows that each weight is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[int, int] = {}
        self._others: set[int] = set()
        """Weights that something else makes a tensor of"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made, given = func(*args, **(kwargs or {})), [*args, *(kwargs or {}).values()]
        if func is F.linear:
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            self._rows[id(weight)] = self._rows.get(id(weight), 0) + x.shape[:-1].numel()
            given = [x, bias]
        if isinstance(made, Tensor | tuple | list):
            self._others |= {id(part) for each in given for part in (each if isinstance(each, list) else [each])}
        return made

    def rows(self, weight: Tensor) -> int:
        """0 for one that is not, or not only, the weight of `F.linear`."""
        return 0 if id(weight) in self._others else self._rows.get(id(weight), 0)


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward gives the pair of factors to `keep` in place of the weight's gradient."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        keep: Callable[[tuple[Tensor, Tensor]], None],
    ) -> Tensor:
        context.save_for_backward(x, weight)
        context.keep = keep
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = context.saved_tensors
        context.keep((slope, x.detach()))
        before = (slope @ weight.to(slope.dtype)).to(x.dtype) if context.needs_input_grad[0] else None
        bias = slope.reshape(-1, slope.shape[-1]).sum(0) if context.needs_input_grad[2] else None
        return before, None, bias, None, None


def _matrix(calls: Sequence[Tensor], width: int) -> np.ndarray:
    """The rows of all calls, float32 in host memory."""
    parts = [each.reshape(-1, width).float().cpu() for each in calls]
    return (parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, width), *parts])).numpy()


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Those of `F.linear`, by its names."""
    return input, weight, bias


def _used_otherwise(weight: Tensor) -> None:
    raise RuntimeError(
        f"a weight {tuple(weight.shape)} that the workload calls dense is used by something else than F.linear: leave "
        "it out of `dense`"
    )
