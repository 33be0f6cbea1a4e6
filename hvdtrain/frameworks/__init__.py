"""What the loop needs of a framework: one model replica on one device, the same for PyTorch and TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from hvdtrain.data import Batch
from hvdtrain.strategies import Vectors
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure


class Replica(Vectors, Protocol):
    """A model, its optimizer and its device. State goes in and out as arrays in PyTorch's layout, named neutrally."""

    device: str
    """For people and records: 'cpu', 'cuda:0' ..."""
    statistics: Mapping[str, float]
    """Which of `local_state` are running statistics, with their momentum: see `statistics_of`"""

    def backward(self, batch: Batch, lr: float, stop: bool) -> None:
        """Forward and backward of this rank's batch: the gradients, divided by the sample count of all ranks, or of
        this one for a strategy that is `local`.

        A framework whose graph holds an overlapped exchange updates each parameter in that graph, as soon as its
        gradient has arrived.
        """

    def waited_s(self) -> float | None:
        """Seconds that the last `backward` waited for an exchange inside it, with nothing else left to do: 0.0 where
        the exchange is waited for outside, None where it cannot be told apart.
        """

    def sent_bytes(self) -> tuple[int, int]:
        """Payload that the last `backward` sent to other stages of the model: over the network, and inside the host."""

    def observe(self, batch: Batch) -> None:
        """Forward as in training: running statistics see the batch, and nothing else is learnt."""

    def evaluate(self, batch: Batch) -> np.ndarray:
        """Of this rank's batch, (metric.size,) float64: the sum of losses, the metric's sums, and samples. Nothing is
        learnt from it. Zeros from a stage that is not the last."""

    def state(self) -> dict[str, np.ndarray]:
        """Parameters (`parameter.NAME`), equal on all ranks, and optimizer state (`momentum.NAME` ...), equal unless
        the strategy is `local`."""

    def load(self, state: dict[str, np.ndarray]) -> None: ...

    def local_state(self) -> dict[str, np.ndarray]:
        """What the model has besides parameters, running statistics say: each rank has its own."""

    def load_local(self, state: dict[str, np.ndarray]) -> None:
        """Takes all of what `local_state` gave, or some."""

    def synchronize(self) -> None:
        """Waits until the device has done all work given to it."""

    def profiler(self) -> Profiler:
        """The framework's own profiler, not yet started."""


class Profiler(Protocol):
    """Records what each operation of some steps costs. One may be running in a process."""

    def start(self, folder: Path) -> None:
        """Begins; what comes out will be in `folder`, which exists."""

    def step(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """Names what runs inside as step `number`."""

    def stop(self, name: str) -> Path:
        """Ends, writes a Chrome trace called `name` and TensorBoard's files; the path of the trace. Raises OSError."""


def statistics_of(model: Any, untrained: Collection[str]) -> Mapping[str, float]:
    """What a model's attribute `statistics` says: name -> momentum, the share of the newest batch, of the arrays that
    are running statistics (of BatchNorm, say). An evaluation takes their mean over ranks.

    `untrained`: names of its arrays of floating point that are not trained. Raises Failure (78) for a model that does
    not say which of them are statistics, or names others.
    """
    found: Mapping[str, float] | None = getattr(model, "statistics", None)
    if found is None and untrained:
        raise Failure(
            f"{type(model).__name__} has arrays that are not trained ({', '.join(sorted(untrained))}) and does not say "
            "which are running statistics: give it an attribute `statistics`, name -> momentum ({}: none are)",
            exits.BAD_CONFIG,
        )
    if others := sorted(set(found or ()) - set(untrained)):
        raise Failure(
            f"{type(model).__name__}.statistics names {', '.join(others)}: it has no such array of floating point "
            "that is not trained",
            exits.BAD_CONFIG,
        )
    return found or {}


def in_vector(framework: str, shapes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of arrays, given in PyTorch's layout, as they lie in a replica's vectors: TensorFlow keeps kernels (out,
    in, h, w) as (h, w, in, out)."""
    if framework == "torch":
        return list(shapes)
    return [(*shape[2:], *shape[1::-1]) if len(shape) == 4 else shape for shape in shapes]


def resolve(framework: Literal["torch", "tensorflow", "auto"]) -> Literal["torch", "tensorflow"]:
    """The framework to use; raises Failure (78) if it is not installed."""
    if framework == "auto":
        framework = "torch" if importlib.util.find_spec("torch") else "tensorflow"
    if importlib.util.find_spec(framework) is None:
        raise Failure(f"{framework} is not installed: run `make setup FRAMEWORKS={framework}`", exits.BAD_CONFIG)
    return framework
