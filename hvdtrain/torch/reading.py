"""What a script reads between two averages of local-sgd, when the ranks' weights differ.

The parameters always hold this rank's own weights, and only the optimizer and the script write to them. But ranks that
evaluate, save or decide by what they read need equal weights, and one rank may do so alone, so nothing can be sent. So
`state_dict()` returns a copy of the last average, which all ranks have, and a forward pass without gradients uses such
a copy during that call. Once the script has written to the parameters (an EMA, a loaded model, a clamp), both use the
parameters themselves until the next step.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

FIRST = 4096
"""Numbers of each parameter whose norm shows a change by `.data`, which does not increment the version"""


class Marks:
    """Remembers weights well enough to see whether anybody has changed them since."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = weights
        self._places: list[int] = []
        self._first: list[torch.Tensor] = []
        """Views of the first numbers of each"""
        self._versions: list[int] = []
        self._norms: Sequence[torch.Tensor] = ()

    def set(self) -> None:
        places = [weight.data_ptr() for weight in self._weights]
        if places != self._places:
            self._places = places
            numeric = [each.detach() for each in self._weights if each.is_floating_point() and each.numel()]
            self._first = [each.as_strided((min(FIRST, each.numel(), _room(each)),), (1,)) for each in numeric]
        self._versions = [weight._version for weight in self._weights]
        self._norms = self._norm()

    def _norm(self) -> Sequence[torch.Tensor]:
        return torch._foreach_norm(self._first) if self._first else ()

    def changed(self) -> bool:
        """Whether a weight has changed since `set`."""
        return (
            [weight.data_ptr() for weight in self._weights] != self._places
            or [weight._version for weight in self._weights] != self._versions
            or not all(map(torch.equal, self._norm(), self._norms))
        )


def _room(tensor: torch.Tensor) -> int:
    """Numbers from the tensor's first to its memory's end: fewer than its numbers if it is expanded."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()


class Averaging(Protocol):
    """An optimizer whose ranks' weights differ between two averages."""

    weights: Sequence[torch.Tensor]

    def average(self, *, kept: bool) -> list[torch.Tensor] | None:
        """A copy of the last average, in the parameters' shapes and types; None to read the parameters.

        `kept`: the caller keeps the copy. Otherwise later calls may return the same one.
        """


_optimizers = weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]]()
"""Each module of a model whose reads are watched -> the optimizers of the model"""
_computing = weakref.WeakKeyDictionary[Any, list[contextlib.ExitStack]]()
"""Modules that compute with the average at the moment, with an entry for each call of them"""


def watch(model: torch.nn.Module, optimizer: Averaging) -> None:
    """From now on, reads of the model return what `optimizer.average` does."""
    _watch_state_dict()
    inner = getattr(model, "module", model)  # DistributedDataParallel calls it, and so do scripts
    if inner not in _optimizers:
        inner.register_forward_pre_hook(_before_forward)
        inner.register_forward_hook(_after_forward, always_call=True)
    for module in model.modules():
        _optimizers.setdefault(module, weakref.WeakSet()).add(optimizer)


@contextlib.contextmanager
def _averages(module: Any, *, kept: bool = False) -> Iterator[None]:
    """Let the parameters refer to copies of the last average. Their own memory is not touched."""
    own = []
    with torch.inference_mode(False), torch.no_grad():
        for optimizer in _optimizers[module]:
            if (average := optimizer.average(kept=kept)) is not None:
                own += [(weight, weight.data) for weight in optimizer.weights]
                for weight, copy in zip(optimizer.weights, average, strict=True):
                    weight.data = copy
    try:
        yield
    finally:
        for weight, data in own:
            weight.data = data


def _before_forward(module: Any, _: Any) -> None:
    if module not in _optimizers or not (module in _computing or not torch.is_grad_enabled()):
        return
    calls, context = _computing.setdefault(module, []), contextlib.ExitStack()
    if not calls:  # not a call of the module by itself
        context.enter_context(_averages(module))
    calls.append(context)


def _after_forward(module: Any, *_: Any) -> None:
    if calls := _computing.get(module):
        calls.pop().close()
        if not calls:
            del _computing[module]


# Dynamo would trace the hooks of a compiled model. They are functions, so models can be copied and pickled.
_before_forward._torchdynamo_disable = _after_forward._torchdynamo_disable = True  # type: ignore[attr-defined]


@functools.cache
def _watch_state_dict() -> None:
    state_dict = torch.nn.Module.state_dict

    @functools.wraps(state_dict)
    def of_average(self: Any, *arguments: Any, **named: Any) -> Any:
        part = named.get("destination") is not None  # torch collects the parts of a model
        with contextlib.nullcontext() if part or self not in _optimizers else _averages(self, kept=True):
            return state_dict(self, *arguments, **named)

    torch.nn.Module.state_dict = of_average
