"""The interface of a model replica on one device, implemented for PyTorch and for TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from hvdtrain.comm.arrays import Array
from hvdtrain.data import Batch
from hvdtrain.strategies import Strategy, Vectors
from hvdtrain.system import exits, install
from hvdtrain.system.exits import Failure

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of an iteration of Muon, X <- (a + b A + c A^2) X with A = X X^T (Jordan et al., 2024)"""
ITERATIONS = 3
SMALLEST_SQUARE = 1e-14
"""Least squared norm of a matrix that Muon divides by"""


def by_muon(name: str, dimensions: int) -> bool:
    """Whether Muon orthogonalises a weight. A row of an embedding has a gradient only if its word is in the batch."""
    return dimensions > 1 and "embed" not in name


class Replica(Vectors, Protocol):
    """A model, its optimizer and its device. State consists of arrays in PyTorch's layout, named alike in both."""

    device: str
    """Name for people and records: 'cpu', 'cuda:0' ..."""
    reports: bool
    """Whether `backward` reports buckets of gradients to the strategy, so that their exchange starts"""
    statistics: Mapping[str, float]
    """Momentum of each array of `local_state` that is a running statistic, see `statistics_of`"""

    def use(self, strategy: Strategy) -> None:
        """Exchange by another strategy from the next `backward` on. Weights and optimizer state stay. Collective.

        Neither strategy may exchange in the framework's own step (`Capabilities.in_backward`).
        """

    def backward(self, batch: Batch, lr: float, stop: float) -> None:
        """Compute the gradients of this rank's batch. `stop`: the rank's requests, see `strategies.STOP`.

        They are divided by the sample count of all ranks, or by this rank's if the strategy has `local_updates`. A
        framework whose graph contains the exchange also updates each parameter as soon as its gradient has arrived.
        """

    def waited_s(self) -> float | None:
        """Return the seconds in which the last `backward` did nothing but wait for an exchange.

        0.0 if it contains no exchange; None if waiting cannot be separated from computing.
        """

    def sent_bytes(self) -> tuple[int, int]:
        """Return the payload sent to other stages by the last `backward`: over the network, and within the host."""

    def observe(self, batch: Batch) -> None:
        """Run forward in training mode, which only updates running statistics."""

    def evaluate(self, batch: Batch) -> np.ndarray:
        """Return the sum of losses, the metric's sums and the number of samples, float64 of shape (metric.size,).

        A stage that is not the last returns zeros.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Return the parameters (`parameter.NAME`) and the optimizer's state (`momentum.NAME` ...).

        With --ema the state includes the moving average of the weights (`average.NAME`). Parameters and averages are
        equal on all ranks. The optimizer's state is too, unless the strategy has `local_updates`.
        """

    def load(self, state: dict[str, np.ndarray]) -> None: ...

    def local_state(self) -> dict[str, np.ndarray]:
        """Return the model's other arrays, such as running statistics, which differ between ranks."""

    def load_local(self, state: dict[str, np.ndarray]) -> None:
        """Load some or all arrays of `local_state`."""

    def average(self, decay: float, weights: Array | None) -> None:
        """Update the moving average of the weights: average = decay * average + (1 - decay) * weights.

        `weights`: as in `set_weights`; None for the replica's own. `load` starts the average at the weights, unless the
        state has an average.
        """

    def swap_average(self) -> None:
        """Exchange the weights with their moving average. A second call restores both."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def now(self) -> Any:
        """Mark the present point in the device's work, without waiting for it."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds that the device took from one mark to another. Waits until it has reached the second."""

    def profiler(self) -> Profiler:
        """Return the framework's profiler, not yet started."""


class Profiler(Protocol):
    """Records the cost of each operation of some steps. A process can run one at a time."""

    def start(self, folder: Path) -> None:
        """Start to record; the results are written to `folder`, which exists."""

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Name the code inside as step `number`."""

    def stop(self, name: str) -> Path:
        """Write TensorBoard's files and a Chrome trace called `name`. Returns the trace's path. Raises OSError."""


def statistics_of(model: Any, untrained: Collection[str]) -> Mapping[str, float]:
    """Return a model's attribute `statistics`: name -> momentum of its running statistics.

    The momentum is the share of the newest batch. Evaluations use the statistics' mean over ranks.

    Args:
        model: Any model.
        untrained: Names of its floating-point arrays that are not trained.

    Raises:
        Failure: With code 78 if the model has such arrays but no attribute, or the attribute has other names.
    """
    statistics: Mapping[str, float] | None = getattr(model, "statistics", None)
    kind = type(model).__name__
    if statistics is None and untrained:
        raise Failure(
            f"{kind} does not declare whether its untrained arrays ({', '.join(sorted(untrained))}) are running "
            "statistics; hint: add an attribute `statistics`, name -> momentum, or {} if none are",
            exits.BAD_CONFIG,
        )
    if unknown := sorted(set(statistics or ()) - set(untrained)):
        raise Failure(
            f"{kind}.statistics names {', '.join(unknown)}, but no untrained floating-point array has this name",
            exits.BAD_CONFIG,
        )
    return statistics or {}


def in_vector(framework: str, shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Convert shapes from PyTorch's layout to the layout in a replica's vectors.

    TensorFlow stores kernels (out, in, h, w) as (h, w, in, out).
    """
    if framework == "torch":
        return list(shapes)
    return [(*shape[2:], *shape[1::-1]) if len(shape) == 4 else shape for shape in shapes]


def resolve(framework: Literal["torch", "tensorflow", "auto"]) -> Literal["torch", "tensorflow"]:
    """Return the framework to use. Raises Failure (78) if it is not installed."""
    if framework == "auto":
        framework = "torch" if importlib.util.find_spec("torch") else "tensorflow"
    if importlib.util.find_spec(framework) is None:
        raise Failure(f"{framework} is not installed; hint: {install.package(framework)}", exits.BAD_CONFIG)
    return framework
