"""Horovod's optimizer on the TCP backend: it exchanges gradients by calls, one for each parameter.

It serves the arguments that strategies do not support: compression=, process_set=, op=, and float64 parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hvdtrain.horovod_api.arithmetic import Op
from hvdtrain.horovod_api.functions import Average
from hvdtrain.horovod_api.process_sets import global_process_set
from hvdtrain.torch import collectives
from hvdtrain.torch.collectives import FRONT
from hvdtrain.torch.vectors import Skipping, by_name, derived


class Calling(Skipping):
    """Base class that makes an optimizer's steps exchange."""

    _named: dict[str, torch.nn.Parameter]
    _compression: Any
    _op: Op
    _factor: float
    _sparse_as_dense: bool
    _process_set: Any
    _synchronized = False

    def synchronize(self) -> None:
        """Reduce the gradients over all ranks. Collective. A parameter without a gradient counts as zeros."""
        if not self._process_set.included():
            return
        finishing = [(parameter, self._start(name, parameter)) for name, parameter in self._named.items()]
        for parameter, finish in finishing:
            parameter.grad = finish()
        self._synchronized = True

    def _start(self, name: str, parameter: torch.nn.Parameter) -> Any:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if gradient.is_sparse and not self._sparse_as_dense:
            return collectives.sparse_allreduce_async(gradient, f"gradient.{name}", self._op, self._process_set)
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        compressed, ctx = self._compression.compress(dense.contiguous())
        scales: dict[str, Any] = {"prescale_factor": 1 / self._factor, "postscale_factor": self._factor}
        handle = collectives.allreduce_async(
            compressed, name=f"gradient.{name}", op=self._op, process_set=self._process_set, **scales
        )

        def finish() -> Tensor:
            result: Tensor = self._compression.decompress(collectives.synchronize(handle), ctx)
            return result if result.stride() == parameter.stride() else torch.empty_like(parameter).copy_(result)

        return finish

    def step(self, closure: Any = None) -> Any:
        """Exchange, then make the wrapped optimizer's step. Collective."""
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return super().step(closure)


@FRONT.or_own
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = collectives.Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Return an optimizer of the same class that exchanges. `backward_passes_per_step` and groups have no effect,
    because the exchange happens in `step`.

    Raises ValueError for names that Horovod rejects, and for a factor without op=Average.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor requires op=hvd.Average")
    named = by_name(optimizer, named_parameters)
    new = derived(optimizer, Calling)
    new._named, new._compression, new._op, new._process_set = named, compression, op, process_set
    new._factor, new._sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    return new
