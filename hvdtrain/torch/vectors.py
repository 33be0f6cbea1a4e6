"""The parameters of a script's optimizer, in the form that a strategy exchanges."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.arrays import Array, placed_like, to_host
from hvdtrain.frameworks.flat_torch import FlatGradients
from hvdtrain.strategies import Strategy
from hvdtrain.torch.overlap import Overlap

TAIL = 7
"""Numbers that follow the gradients: the loss (unknown here), `Overlap.is_steady`, `Overlap.changed`, whether this rank
has joined (`hvd.join`), `Parameters.buffers_changed`, the samples, and whether gradients were not finite. Before the
samples there may be flags."""
JOINED, BUFFERS = 3, 4
"""Indices in the tail"""


class Parameters:
    """Gradients and weights as vectors; see `strategies.Vectors`. All ranks have equal weight, as in Horovod's Average.

    After the first exchange `parameter.grad` is a view of the vector, which `zero_grad(set_to_none=False)` keeps. Other
    gradients are copied into the vector.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        update: Callable[[float], None],
        strategy: Strategy,
        *,
        ranks: int,
        divided: bool,
        careful: bool,
        overlap: type[Overlap] | None = Overlap,
        updates_unused: bool = True,
    ) -> None:
        """Allocates the vector. Collective.

        Args:
            named: The trained parameters.
            update: The optimizer's own step, with its learning rate times a factor.
            strategy: Exchanges the vector.
            ranks: The number of ranks.
            divided: Whether gradients are divided by the number of ranks, so that their sum is the mean.
            careful: Whether the strategy must not see gradients that are not finite.
            overlap: Decides when the strategy may exchange during backward; None: it may not.
            updates_unused: Whether parameters that no rank uses are updated too, with zeros as gradients.
        """
        self._update, self._strategy = update, strategy
        self._ranks, self._divided, self._careful = ranks, divided, careful
        self._parameters = list(named.values())
        self._flags = 0 if updates_unused else len(self._parameters)
        """How many numbers of the tail say whether a rank uses a parameter"""
        devices = {parameter.device for parameter in self._parameters}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self._flat = self._new_flat()
        self._spare: FlatGradients | None = None
        """Exchanged in turn with the vector, if gradients are views of the other one while they are sent"""
        self._sparse_dims: dict[int, int] = {}
        """Number of sparse dimensions of each gradient that is sparse but exchanged as a dense one, by index"""
        self._requested = self._exchanged = False
        """Whether the strategy asked for the vector in this step; whether the gradients came from it"""
        self.not_finite = False
        """Whether this rank's gradients are known to be not finite"""
        self._lost = False
        """Whether gradients that were sent in this step were not finite"""
        self.discards = self.must_repeat = False
        """Whether the sums are not used; whether the exchange has to be made again, because gradients have changed"""
        self.joined = False
        """Whether this rank has no more steps, and takes part with zeros"""
        self.buffers_changed = False
        """Whether this rank's buffers have changed since all ranks had the same"""
        self._buckets = strategy.buckets(late_tail=True) if overlap else ()
        self._overlap = overlap(self._buckets, self._parameters, self._send) if overlap and self._buckets else None

    def _new_flat(self) -> FlatGradients:
        flat = FlatGradients(self._parameters, TAIL + self._flags, self._device)
        flat.use(self._strategy)
        return flat

    def remove_hooks(self) -> None:
        if self._overlap:
            self._overlap.remove()

    def begin_pass(self) -> None:
        """See `Overlap.begin`."""
        if self._overlap:
            self._overlap.begin()

    def pause(self) -> None:
        """Send no gradients during the next backward pass."""
        if self._overlap:
            self._overlap.pause()

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether gradients of this step are sent during backward. Equal on all ranks."""
        return self._overlap is not None and self._overlap.active

    # --- for the strategy ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, number: int) -> None:
        bucket = self._buckets[number]
        if number == 0:
            self._lost = False
            if any(self._is_view(index) for index in range(len(self._parameters))):
                spare = self._spare or self._new_flat()
                self._flat, self._spare = spare, self._flat
        begin, end = self._collect(bucket)
        ready = self._flat.piece(begin, end)
        self._strategy.on_bucket_ready(number, self._flat.memory, ready)

    @torch.no_grad()
    def vector(self) -> Array:
        overlap, left = self._overlap, range(len(self._parameters))
        changed = steady = False
        if overlap is not None:
            changed, steady = overlap.active and overlap.changed(), overlap.is_steady()
            if overlap.sent:
                left = range(self._buckets[overlap.sent - 1].start)
        if len(left) == len(self._parameters):
            self._lost = False
        begin, end = self._collect(left)
        if wait := self._flat.piece(begin, end):
            wait()
        self._requested = True
        used = [each.grad is not None for each in self._parameters[: self._flags]]
        tail = np.array([0, steady, changed, 0, self.buffers_changed, *used, 1, self._lost], np.float32)
        if self.joined:
            self._flat.memory[:] = 0
            tail[:] = 0, 1, 0, 1, 0, *np.zeros(self._flags), 1, 0
        self._flat.memory[self._flat.size :] = placed_like(tail, self._flat.memory)
        return self._flat.memory

    def tail(self) -> np.ndarray:
        return np.array([0.0, 0.0, 0.0, self.joined, self.buffers_changed, *np.zeros(self._flags), 1.0, 0.0])

    def share(self) -> tuple[int, int]:
        return 1, self._ranks

    updates_parts = False

    def apply(self, lr: float, arrays: range | None = None) -> None:
        tail = to_host(self._flat.memory[self._flat.size :]) if self._requested else self.tail()
        if self._requested and self._overlap is not None:
            _, steady, changed, *_ = tail
            self._overlap.next_step(steady=bool(steady == self._ranks), changed=bool(changed))
            self.must_repeat = bool(changed) and not self.discards
        if self.must_repeat or self.discards or self.joined:
            self._requested = False
            return
        unused = np.flatnonzero(tail[BUFFERS + 1 : -2] == 0) if self._requested else ()
        self._return_gradients(infinite=tail[-1] > 0, unused=set(map(int, unused)))
        self._update(lr)

    @torch.no_grad()
    def weights(self, arrays: range | None = None) -> Array:
        span = self._flat.span(arrays)
        flat = torch.empty(span.stop - span.start, dtype=torch.float32, device=self._device)
        torch._foreach_copy_(self._flat.split(flat, arrays), self._some(arrays))
        return self._flat.as_given(flat)

    @torch.no_grad()
    def set_weights(self, weights: Array, arrays: range | None = None) -> None:
        pieces = self._flat.split(torch.as_tensor(weights, device=self._device), arrays)
        torch._foreach_copy_(self._some(arrays), pieces)

    def _some(self, arrays: range | None) -> list[torch.nn.Parameter]:
        return self._parameters[arrays.start : arrays.stop] if arrays else self._parameters

    @torch.no_grad()
    def shaped(self, weights: Array) -> list[torch.Tensor]:
        """Copies of weights in the parameters' shapes and types."""
        parts = self._flat.split(torch.as_tensor(weights, device=self._device))
        return [part.to(each.dtype, copy=True) for part, each in zip(parts, self._parameters, strict=True)]

    # --- gradients ----------------------------------------------------------------------------------------------

    def _is_view(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return (
            gradient is not None
            and not gradient.is_sparse
            and self._flat.views[index].data_ptr() == gradient.data_ptr()
        )

    def _collect(self, indices: range) -> tuple[int, int]:
        """Copies gradients into the vector and returns their place there.

        As in Horovod, a parameter without a gradient counts as zeros. If the strategy is `careful`, so do gradients
        that are not finite.
        """
        missing, views, gradients = [], [], []
        for index in indices:
            gradient, view = self._parameters[index].grad, self._flat.views[index]
            if gradient is None:
                missing.append(view)
            elif gradient.is_sparse:
                self._sparse_dims[index] = gradient.sparse_dim()
                views.append(view)
                gradients.append(gradient.to_dense())
            elif gradient.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(gradient)
        if missing:
            torch._foreach_zero_(missing)
        if views:
            torch._foreach_copy_(views, gradients)
        begin, end = self._flat.borders[indices.start], self._flat.borders[indices.stop]
        vector = self._flat.gradients[begin:end]
        lost = self.not_finite or (self._careful and not _finite(vector))
        self._lost |= lost
        if lost:
            vector.zero_()
        elif self._divided:
            vector.div_(self._ranks)
        return begin, end

    @torch.no_grad()
    def _return_gradients(self, *, infinite: bool, unused: Container[int]) -> None:
        """Gives the vector's gradients to the parameters, if the strategy has asked for the vector.

        `infinite`: some rank's gradients were not finite, so all ranks treat the sum as infinite. `unused`: indices of
        parameters that get none.
        """
        self._exchanged, self._requested = self._requested, False
        if not self._exchanged:
            return
        self._flat.take_gradients()
        if infinite:
            self._flat.gradients.fill_(torch.inf)
        for index, (parameter, view) in enumerate(zip(self._parameters, self._flat.views, strict=True)):
            if index in unused:
                parameter.grad = None
            elif index in self._sparse_dims:
                parameter.grad = view.to(parameter.dtype).to_sparse(self._sparse_dims[index])
            elif parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                gradient = view.detach().to(device=parameter.device, dtype=parameter.dtype)
                if gradient.stride() != parameter.stride():  # fused optimizers rely on equal strides (channels_last)
                    gradient = torch.empty_like(parameter).copy_(gradient)
                parameter.grad = gradient

    def lost(self) -> bool:
        """Whether the gradients are not finite: the exchanged ones, or this rank's own if nothing was exchanged."""
        return not _finite(self._flat.gradients) if self._exchanged else self.not_finite


def _finite(gradients: torch.Tensor) -> bool:
    # On a CPU, vector_norm(ord=inf) of 10^5 numbers or more takes three to six times as long.
    return not gradients.numel() or bool(torch.stack(torch.aminmax(gradients)).isfinite().all())


def by_name(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name, in the order of the optimizer's groups.

    Raises ValueError for the names that Horovod rejects too. Without `named` the names are Horovod's.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group]
    if named is None:
        names = {id(p): f"allreduce.noname.{i}.{j}" for i, group in enumerate(groups) for j, p in enumerate(group)}
    else:
        pairs = list(named)
        if any(not isinstance(pair, tuple) for pair in pairs):
            raise ValueError("named_parameters takes (name, parameter) pairs, as model.named_parameters() returns them")
        if duplicates := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise ValueError(f"named_parameters has duplicate names: {', '.join(duplicates)}")
        names = {id(parameter): name for name, parameter in pairs}
        if missing := [list(parameter.shape) for parameter in parameters if id(parameter) not in names]:
            raise ValueError(f"named_parameters has no names for the optimizer's parameters of shapes {missing}")
    return {names[id(parameter)]: parameter for parameter in parameters if parameter.requires_grad}


class Skipping(torch.optim.Optimizer):
    """An optimizer whose steps exchange, except in a context."""

    _should_synchronize = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make steps use the gradients that `synchronize` left, or else this rank's own."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True


def derived(optimizer: torch.optim.Optimizer, base: type) -> Any:
    """Return an optimizer of a class that has `base` before the optimizer's own, with the same groups and state."""
    cls: Any = type(type(optimizer).__name__, (base, type(optimizer)), {})
    new = cls.__new__(cls)
    new.__dict__.update(optimizer.__dict__)
    new.__dict__.pop("step", None)  # a scheduler may have wrapped it
    return new


def unscale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divides gradients by a loss scale."""
    inverse = scale.double().reciprocal().float()
    for gradient in gradients:
        gradient.mul_(inverse.to(gradient.device))


def evaluated(closure: Callable[[], Any] | None) -> list[Any]:
    """What the closure of a step returns; an empty list without one."""
    if closure is None:
        return []
    with torch.enable_grad():
        return [closure()]


@contextlib.contextmanager
def scaled(groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """Multiply the learning rates of parameter groups for a while. Groups without one stay as they are."""
    rates = [(group, group["lr"]) for group in groups if group.get("lr") is not None] if factor != 1 else []
    for group, lr in rates:
        group["lr"] = lr * factor
    try:
        yield
    finally:
        for group, lr in rates:
            group["lr"] = lr


def step_evaluated(step: Callable[..., Any], losses: list[Any], groups: list[dict[str, Any]]) -> None:
    """Makes an optimizer's own step, whose closure has been `evaluated`.

    Raises ValueError if it evaluates the closure at other weights, as SAM does: nobody exchanges those gradients.
    """
    if not losses or "closure" not in inspect.signature(step).parameters:
        step()
        return
    weights = [weight for group in groups for weight in group["params"]]
    before, repeated = torch._foreach_norm(weights), list(losses)

    def closure() -> Any:
        if not repeated or any(map(torch.ne, before, torch._foreach_norm(weights))):
            raise ValueError(
                "the optimizer evaluates its closure at other weights, and those gradients are not exchanged; hint: "
                "use one that needs the gradients of one point only, such as SGD or Adam"
            )
        return repeated.pop()

    step(closure=closure)


def has_unknown_gradients(groups: list[dict[str, Any]], known: Mapping[str, torch.nn.Parameter]) -> bool:
    """Whether a parameter outside `known` has a gradient."""
    ids = set(map(id, known.values()))
    parameters = (parameter for group in groups for parameter in group["params"])
    return any(parameter.grad is not None and id(parameter) not in ids for parameter in parameters)
