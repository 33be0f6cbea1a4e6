"""What a strategy sees of a model's replica: plain vectors, and what it gives back to the loop."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

TOTALS = 4
"""Behind the gradients of a vector: the step's sum of losses, correct samples, samples, and ranks asked to stop"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one step, or settling, brought."""

    totals: np.ndarray | None = None
    """(TOTALS,) over all ranks, of all steps that have become known just now; None if there are none"""
    loss: float = 0.0
    """Mean loss per sample of the very step, over all ranks where they told each other, else over this rank"""
    sent_bytes: int = 0
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More fields of the step's record, by name"""


class Vectors(Protocol):
    """A replica as vectors of float32 in host memory. Arrays come one after the other, in the model's order."""

    def vector(self) -> np.ndarray:
        """The gradients of the last backward and behind them this rank's TOTALS; to be changed in place. Where
        nothing is to be exchanged `totals` saves copying them."""
        ...

    def totals(self) -> np.ndarray:
        """(TOTALS,) of the last backward: over all ranks if the world's own step exchanged them, else this rank's."""
        ...

    def share(self) -> tuple[int, int]:
        """Samples of the last backward: this rank's, and those of all ranks."""
        ...

    def apply(self, lr: float) -> None:
        """Updates the weights with the gradients, as they are now in the vector if it was asked for, unless backward
        did it."""
        ...

    def weights(self) -> np.ndarray:
        """All trainable weights; may be the replica's own memory."""
        ...

    def set_weights(self, weights: np.ndarray) -> None: ...
