"""What a strategy sees of a script's optimizer: its parameters' gradients and weights as vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

TAIL = 3
"""Numbers behind the gradients: loss (not known here), samples, and whether a rank's gradients were not finite"""


class Parameters:
    """See `strategies.Vectors`. Ranks weigh the same, as in Horovod's Average.

    A gradient is copied into the vector unless it is there: from the first exchange on `parameter.grad` is a view of
    it, which `zero_grad(set_to_none=False)` keeps. On a GPU the vector has a twin in host memory.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        update: Callable[[], None],
        *,
        ranks: int,
        divided: bool,
        careful: bool,
    ) -> None:
        """`named`: what is trained; `update`: the optimizer's own step. `divided`: gradients are divided by the number
        of ranks, so that their sum is the mean. `careful`: what is not finite must not reach the strategy."""
        self._update = update
        self._ranks, self._divided, self._careful = ranks, divided, careful
        self._parameters = list(named.values())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._size = sum(self._sizes)
        devices = {parameter.device for parameter in self._parameters}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self._whole = torch.zeros(self._size + TAIL, dtype=torch.float32, device=device)
        on_cpu = device.type == "cpu"
        self._host = self._whole if on_cpu else torch.zeros_like(self._whole, device="cpu", pin_memory=True)
        self._views = self._cut(self._whole)
        self._layouts: dict[int, int] = {}
        """Of gradients that are sparse, and travel dense: the number of sparse dimensions"""
        self._asked = self._came = False
        """Whether the gradients are in the vector; whether they came back from it"""
        self.not_finite = False
        """Whether this rank's gradients are known not to be"""

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        pieces = vector[: self._size].split(self._sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self._parameters, strict=True)]

    # --- for the strategy ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def vector(self) -> np.ndarray:
        gradients = self._whole[: self._size]
        self._gather()
        lost = self.not_finite or (self._careful and not self._finite())
        if lost:
            gradients.zero_()
        elif self._divided:
            gradients.div_(self._ranks)
        self._whole[self._size :] = torch.from_numpy(self._tail(lost))
        self._asked = True
        if self._host is not self._whole:
            self._host.copy_(self._whole)
        return np.asarray(self._host.numpy())

    def tail(self) -> np.ndarray:
        return self._tail(False)

    @staticmethod
    def _tail(lost: bool) -> np.ndarray:
        return np.array([0.0, 1.0, lost])

    def share(self) -> tuple[int, int]:
        return 1, self._ranks

    def apply(self, lr: float) -> None:
        self._hand_back()
        self._update()

    @torch.no_grad()
    def weights(self) -> np.ndarray:
        flat = torch.empty(self._size, dtype=torch.float32, device="cpu")
        torch._foreach_copy_(self._cut(flat), self._parameters)
        return np.asarray(flat.numpy())

    @torch.no_grad()
    def set_weights(self, weights: np.ndarray) -> None:
        torch._foreach_copy_(self._parameters, self._cut(torch.from_numpy(weights)))

    # --- gradients ----------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """The gradients into the vector; zeros for a parameter that has none, as in Horovod."""
        missing, views, gradients = [], [], []
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                missing.append(view)
            elif gradient.is_sparse:
                self._layouts[index] = gradient.sparse_dim()
                views.append(view)
                gradients.append(gradient.to_dense())
            elif gradient.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(gradient)
        if missing:
            torch._foreach_zero_(missing)
        if views:
            torch._foreach_copy_(views, gradients)

    @torch.no_grad()
    def _hand_back(self) -> None:
        """The vector's gradients to the parameters, if it was asked for."""
        self._came, self._asked = self._asked, False
        if not self._came:
            return
        if self._host is not self._whole:
            self._whole.copy_(self._host, non_blocking=True)
        if self._whole[-1] > 0:  # of a rank: all do alike, as if it had been added
            self._whole[: self._size].fill_(torch.inf)
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if index in self._layouts:
                parameter.grad = view.to(parameter.dtype).to_sparse(self._layouts[index])
            elif parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                gradient = view.detach().to(device=parameter.device, dtype=parameter.dtype)
                if gradient.stride() != parameter.stride():  # fused optimizers go by memory: channels_last, say
                    gradient = torch.empty_like(parameter).copy_(gradient)
                parameter.grad = gradient

    def lost(self) -> bool:
        """Whether the gradients are not finite: those that came from the exchange, or this rank's own."""
        return not self._finite() if self._came else self.not_finite

    def _finite(self) -> bool:
        gradients = self._whole[: self._size]
        return not self._size or math.isfinite(float(torch.linalg.vector_norm(gradients, ord=torch.inf)))


def unscale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divides gradients by a loss scale."""
    inverse = scale.double().reciprocal().float()
    for gradient in gradients:
        gradient.mul_(inverse.to(gradient.device))


def strangers(groups: list[dict[str, Any]], known: Mapping[str, torch.nn.Parameter]) -> bool:
    """Whether a parameter got a gradient that is none of the known ones."""
    ours = set(map(id, known.values()))
    return any(parameter.grad is not None and id(parameter) not in ours for g in groups for parameter in g["params"])
