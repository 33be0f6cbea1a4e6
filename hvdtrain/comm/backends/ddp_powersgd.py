"""PyTorch's own powerSGD_hook, with the settings of this package and a state that can be saved and loaded.

A gradient matrix M (n x m) is sent as P = M Q (n x r) and Q = M^T P (m x r). The difference between M and the product
is added to the next step's gradient (error feedback). Vectors are sent whole, as are matrices that would not shrink to
less than half. So a step performs three all-reduces: of everything sent whole, of all P, and of all Q. The first
START_STEP steps, in which gradients change most, send everything whole.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

START_STEP = 2
"""PyTorch needs at least 2, because its buckets change after the first step; it recommends a tenth of all steps"""
LEAST_COMPRESSION = 2
EPSILON = 1e-8
"""Avoids NaN when columns of zeros are normalised (weights before a BatchNorm scale of 0)"""

Shape = Sequence[int]


def compressed(shape: Shape, rank: int) -> tuple[int, int, int] | None:
    """(n, m, r) for a gradient of this shape, with r at most `rank`; None if it is sent whole."""
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, rank)
    return (rows, columns, rank) if (rows + columns) * rank * LEAST_COMPRESSION < rows * columns else None


def elements_sent(shapes: Iterable[Shape], rank: int, step: int) -> int:
    """How many numbers the all-reduces of step `step` sum."""
    total = 0
    for shape in shapes:
        matrix = compressed(shape, rank) if step >= START_STEP else None
        total += (matrix[0] + matrix[1]) * matrix[2] if matrix else math.prod(shape)
    return total


class PowerSGD:
    """The hook and its state.

    PyTorch keeps errors and Q flat, in the order of its only bucket, which changes after the first step of a process.
    `state` and `load` keep them by parameter; `hook` restores PyTorch's order whenever it has changed.
    """

    def __init__(self, parameters: Mapping[str, Any], rank: int) -> None:
        """`parameters`: the model's, by name. `rank`: of P and Q."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._hook = powerSGD_hook
        self._matrix_shapes = {
            name: matrix for name, shape in self._shapes.items() if (matrix := compressed(shape, rank))
        }
        """(rows, columns, rank) of each compressed parameter"""
        self._torch_state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=START_STEP,
            min_compression_rate=LEAST_COMPRESSION,
            orthogonalization_epsilon=EPSILON,
        )
        self._order: list[str] = []
        self._loaded: dict[str, np.ndarray] = {}

    def hook(self, bucket: Any) -> Any:
        order = [self._names[id(parameter)] for parameter in bucket.parameters()]
        if order != self._order:
            arrays = self._loaded or self._arrays()
            self._order, self._loaded = order, {}
            if arrays:
                self._restore(arrays, bucket.buffer())
        return self._hook(self._torch_state, bucket)

    def _matrices(self) -> list[str]:
        """The compressed parameters in the order of torch's hook: by shape, in order of first appearance."""
        names = [name for name in self._order if name in self._matrix_shapes]
        shapes = [self._matrix_shapes[name][:2] for name in names]
        return sorted(names, key=lambda name: shapes.index(self._matrix_shapes[name][:2]))

    def _arrays(self) -> dict[str, np.ndarray]:
        """Errors and Q by parameter; empty before the first compressed step."""
        if 0 not in self._torch_state.error_dict:
            return {}
        errors = _split(self._torch_state.error_dict[0], self._order, lambda name: math.prod(self._shapes[name]))
        queue = self._torch_state.q_memory_dict[0]
        queues = _split(queue, self._matrices(), lambda name: math.prod(self._matrix_shapes[name][1:]))
        return {f"error.{name}": array for name, array in errors.items()} | {
            f"q.{name}": array for name, array in queues.items()
        }

    def _restore(self, arrays: Mapping[str, np.ndarray], like: Any) -> None:
        import torch

        def joined(names: Iterable[str], kind: str) -> Any:
            flat = np.concatenate([np.empty(0, np.float32), *(arrays[f"{kind}.{name}"].ravel() for name in names)])
            return torch.from_numpy(flat).to(device=like.device, dtype=like.dtype)

        matrices, state = self._matrices(), self._torch_state
        state.error_dict[0] = joined(self._order, "error")
        state.q_memory_dict[0] = joined(matrices, "q")
        size = sum(self._matrix_shapes[name][0] * self._matrix_shapes[name][2] for name in matrices)
        state.p_memory_dict[0] = torch.empty(size, device=like.device, dtype=like.dtype)

    def state(self) -> dict[str, np.ndarray]:
        return {"powersgd.step": np.array(self._torch_state.iter), **(self._loaded or self._arrays())}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._torch_state.iter = int(state["powersgd.step"])
        self._loaded = {name: array for name, array in state.items() if name.startswith(("error.", "q."))}
        self._order = []


def _split(flat: Any, names: Sequence[str], size: Any) -> dict[str, np.ndarray]:
    array = flat.cpu().numpy()
    ends = np.cumsum([size(name) for name in names])
    return {name: array[end - size(name) : end].copy() for name, end in zip(names, ends, strict=True)}
