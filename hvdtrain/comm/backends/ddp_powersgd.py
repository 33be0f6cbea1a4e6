"""PyTorch's own powerSGD_hook, with the settings of this package and a state that survives a restart.

A gradient matrix M (n x m) is sent as P = M Q (n x r) and Q = M^T P (m x r); what the product misses is added to the
next step's gradient (error feedback). Vectors, and matrices that would not shrink to less than half, are sent whole. So
a step makes three sums: of what is sent whole, of all P, of all Q. The first START_STEP steps send everything whole,
while gradients change most.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

START_STEP = 2
"""PyTorch wants 2 at least (its buckets change after the first step) and advises a tenth of a run's steps"""
LEAST_COMPRESSION = 2
EPSILON = 1e-8
"""Keeps columns of zeros (weights behind a BatchNorm scale of 0) from becoming NaN when they are normalised"""

Shape = Sequence[int]


def compressed(shape: Shape, rank: int) -> tuple[int, int, int] | None:
    """(n, m, r) of a gradient of this shape, r being at most `rank`; None if it is sent whole."""
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rows, columns, rank)
    return (rows, columns, rank) if (rows + columns) * rank * LEAST_COMPRESSION < rows * columns else None


def elements_sent(shapes: Iterable[Shape], rank: int, step: int) -> int:
    """Numbers that step `step` of a run gives to its sums."""
    total = 0
    for shape in shapes:
        matrix = compressed(shape, rank) if step >= START_STEP else None
        total += (matrix[0] + matrix[1]) * matrix[2] if matrix else math.prod(shape)
    return total


class PowerSGD:
    """The hook and its state.

    PyTorch keeps errors and Q flat in the order of its one bucket, which changes after the first step of a process.
    Here they come and go by parameter, and are put in order whenever that has changed.
    """

    def __init__(self, parameters: Mapping[str, Any], rank: int) -> None:
        """`parameters`: the model's, by name; `rank`: of the factors."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._hook = powerSGD_hook
        self._cuts = {name: cut for name, shape in self._shapes.items() if (cut := compressed(shape, rank))}
        """Of each compressed parameter: rows, columns, rank"""
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
        """The compressed parameters as torch's hook puts them in a row: by shape, in the order of first appearance."""
        names = [name for name in self._order if name in self._cuts]
        shapes = [self._cuts[name][:2] for name in names]
        return sorted(names, key=lambda name: shapes.index(self._cuts[name][:2]))

    def _arrays(self) -> dict[str, np.ndarray]:
        """Errors and Q by parameter; nothing while no step was compressed."""
        if 0 not in self._torch_state.error_dict:
            return {}
        errors = _cut(self._torch_state.error_dict[0], self._order, lambda name: math.prod(self._shapes[name]))
        queue = self._torch_state.q_memory_dict[0]
        queues = _cut(queue, self._matrices(), lambda name: math.prod(self._cuts[name][1:]))
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
        size = sum(self._cuts[name][0] * self._cuts[name][2] for name in matrices)
        state.p_memory_dict[0] = torch.empty(size, device=like.device, dtype=like.dtype)

    def state(self) -> dict[str, np.ndarray]:
        return {"powersgd.step": np.array(self._torch_state.iter), **(self._loaded or self._arrays())}

    def load(self, state: dict[str, np.ndarray]) -> None:
        self._torch_state.iter = int(state["powersgd.step"])
        self._loaded = {name: array for name, array in state.items() if name.startswith(("error.", "q."))}
        self._order = []


def _cut(flat: Any, names: Sequence[str], size: Any) -> dict[str, np.ndarray]:
    array = flat.cpu().numpy()
    ends = np.cumsum([size(name) for name in names])
    return {name: array[end - size(name) : end].copy() for name, end in zip(names, ends, strict=True)}
