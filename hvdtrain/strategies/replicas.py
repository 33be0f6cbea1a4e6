"""What a strategy sees of a model's replica: plain vectors, and what it gives back to the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one step, or settling, brought."""

    totals: np.ndarray | None = None
    """(metric.size,) float64 over all ranks, of all steps that have become known just now: the sum of losses, the sums
    of the run's metric, samples; None if there are none"""
    stop: bool = False
    """Whether a rank was asked to stop"""
    loss: float = 0.0
    """Mean loss per sample of the very step, over all ranks where they told each other, else over this rank"""
    sent_bytes: int = 0
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More fields of the step's record, by name"""

    @classmethod
    def of(cls, tail: np.ndarray, sent_bytes: int) -> Exchanged:
        """What the tail (see `Vectors.tail`) of a step tells once it is summed over ranks."""
        totals = tail[:-1].astype(np.float64)
        return cls(totals=totals, stop=bool(tail[-1] > 0), loss=totals[0] / totals[-1], sent_bytes=sent_bytes)


class Vectors(Protocol):
    """A replica as vectors of float32 in host memory. Arrays come one after the other, in the model's order."""

    def vector(self) -> np.ndarray:
        """The gradients of the last backward and behind them this rank's `tail`; to be changed in place. Where
        nothing is to be exchanged `tail` saves copying them."""

    def tail(self) -> np.ndarray:
        """(metric.size + 1,) of the last backward: totals, and behind them whether to stop (0 or 1). Over all ranks if
        the world's own step exchanged them, else this rank's."""

    def share(self) -> tuple[int, int]:
        """Samples of the last backward: this rank's, and those of all ranks."""

    def apply(self, lr: float) -> None:
        """Updates the weights with the gradients, as they are now in the vector if it was asked for, unless backward
        did it."""

    def weights(self) -> np.ndarray:
        """All trainable weights; may be the replica's own memory."""

    def set_weights(self, weights: np.ndarray) -> None: ...


class Factored(Vectors, Protocol):
    """A replica that can also leave gradients as the two matrices that they are the product of."""

    def factors(self) -> Mapping[int, tuple[np.ndarray, np.ndarray]]:
        """Of the last backward, by place among the arrays: (n, a) and (n, b), whose product `first.T @ second` is this
        rank's gradient of an array (a, b). Of those that the strategy wants `factored`, and are; in the `vector` they
        are left out. Equal on all ranks but for n."""

    def multiply(self, factors: Mapping[int, tuple[Sequence[np.ndarray], Sequence[np.ndarray]]]) -> None:
        """The gradients of those arrays become these products, each factor given as parts one below the other."""
