"""The interface between a strategy, a model replica and the training loop."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from hvdtrain.comm.arrays import Array, to_host

STOP, CHOOSE = 1.0, 2.0**-30
"""What a rank may request of all ranks: to stop, and to choose the strategy again.

The last number of a tail is their sum over ranks and steps. In float32, a sum of CHOOSE never exceeds 2**-6."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Result of `Strategy.step` or `Strategy.synchronize`."""

    totals: np.ndarray | None = None
    """Sums over all ranks and over all steps whose sums have just arrived, float64 of shape (metric.size,).

    They are the sum of losses, the sums of the metric, and the number of samples. None if none have arrived."""
    stop: bool = False
    """Whether any rank was asked to stop"""
    choose: bool = False
    """Whether any rank requests that all choose the strategy again; False if they stop"""
    loss: float = 0.0
    """Mean loss per sample of this step: over all ranks if it is known, otherwise over this rank"""
    sent_bytes: int = 0
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of the step's record, by name"""

    @classmethod
    def of(cls, tail: Array, sent_bytes: int) -> Exchanged:
        """Read a tail (see `Vectors.tail`) that was summed over ranks."""
        numbers = to_host(tail).astype(np.float64)
        totals, requests = numbers[:-1], float(numbers[-1])
        return cls(
            totals=totals,
            stop=requests >= STOP / 2,  # a backend may round
            choose=0 < requests < STOP / 2,
            loss=totals[0] / totals[-1],
            sent_bytes=sent_bytes,
        )


class Vectors(Protocol):
    """A replica as flat float32 vectors, in which arrays follow each other in the model's order.

    They are NumPy arrays, or tensors on the replica's device if the strategy `takes_tensors`.
    """

    def vector(self) -> Array:
        """Return the gradients of the last backward pass followed by this rank's `tail`, to be changed in place.

        If nothing is exchanged, `tail` avoids copying the gradients.
        """

    def tail(self) -> np.ndarray:
        """Return the totals of the last backward pass and the rank's requests (`STOP`), shape (metric.size + 1,).

        They are sums over all ranks if the backend's own step exchanged them, otherwise this rank's.
        """

    def share(self) -> tuple[int, int]:
        """Return the samples of the last backward pass: this rank's number and the number over all ranks."""

    updates_parts: bool
    """Whether `apply` can update some arrays before others"""

    def apply(self, lr: float, arrays: range | None = None) -> None:
        """Update the weights with the gradients, unless backward has done so. `arrays`: only these. `lr`: as in `step`.

        If `vector` was called, the gradients are those that the vector holds now.
        """

    def weights(self, arrays: range | None = None) -> Array:
        """Return all trainable weights, or those of some arrays; this may be the replica's own memory."""

    def set_weights(self, weights: Array, arrays: range | None = None) -> None:
        """Copy these weights into the replica, or into some of its arrays. The caller changes them later."""
