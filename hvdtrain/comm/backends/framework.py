"""How a backend takes part in a framework's own training step. The base classes exchange nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class TorchStep:
    """A training step of one rank in PyTorch that exchanges nothing during backward. Backends extend it."""

    loss_factor = 1.0
    """Factor applied to the loss before backward, to undo a division by the exchange"""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def loss(self, *arrays: Any) -> Any:
        """Return the summed loss of this rank's batch and the sums of the metric, by name."""
        return self.model.loss(*arrays)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def waited_s(self) -> float | None:
        """Seconds that `backward` waited for the exchange after its last gradient; None if unknown."""
        return 0.0

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Context for the optimizer's update, entered when the exchange of gradients is complete."""
        return contextlib.nullcontext()


class FrameworkExchange:
    """For strategies whose `Capabilities.in_backward` is set, several ranks need a backend's own class."""

    def wait(self) -> None:
        """Wait for the reductions that backward started."""

    # --- PyTorch ---------------------------------------------------------------------------------------------------

    def start_sum(self, tensor: Any, name: str) -> Any:
        """Start summing a tensor over ranks, in place. Returns a handle for `finish_sum`."""
        return tensor

    def finish_sum(self, handle: Any) -> Any:
        """Wait for the sum and return the tensor."""
        return handle

    def overlapped(self, model: Any, optimizer: Any, settings: Any) -> TorchStep:
        """A step whose backward starts the reduction of each gradient once it is ready.

        `settings`: the strategy's.
        """
        return TorchStep(model, optimizer)

    # --- TensorFlow: all but `scope` are called while a graph is traced ----------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which variables are created."""
        return contextlib.nullcontext()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` where its variables are read and updated."""
        return function(*arguments)

    def graph_sum(self, tensor: Any, name: str) -> Any:
        """The sum of a tensor over ranks."""
        return tensor

    def summed_gradients(self, tape: Any, loss: Any, weights: list[Any]) -> list[Any]:
        """Gradients of `loss`, summed over ranks."""
        return list(tape.gradient(loss, weights))
