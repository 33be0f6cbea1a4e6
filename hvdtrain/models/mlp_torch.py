"""The multilayer perceptron in PyTorch: the layers of `mlp.py`, and its losses."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from hvdtrain.models.layers import regression_terms
from hvdtrain.models.layers_torch import Predicts
from hvdtrain.models.mlp import MLPSpec


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the cross-entropies of logits (N, classes), and the sums of `metrics.Confusion`; labels (N,) int64."""
    classes = logits.shape[1]
    counts = torch.bincount(labels * classes + logits.argmax(1), minlength=classes**2)
    return F.cross_entropy(logits, labels, reduction="sum"), {"confusion": counts}


def forecast_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the squared errors, and the sums of `hvdtrain.solar.Forecast`; outputs (N, 1), targets (N, 2): the reading
    to predict, and the last one of the window."""
    truth, last = targets.unbind(1)
    terms = regression_terms(outputs.detach()[:, 0].double(), truth.double())
    sums = {name: values.sum() for name, values in terms.items()}
    sums["persistence"] = (last.double() - truth.double()).square().sum()
    return F.mse_loss(outputs[:, 0], truth, reduction="sum"), sums


LOSSES = {"cross_entropy": cross_entropy, "forecast_error": forecast_error}


class MLPTorch(Predicts):
    """The network of `spec`, trained by a loss of `LOSSES`.

    `state_dict()` has exactly the names and shapes of `mlp.parameters`. Its values are undefined until they are loaded.
    """

    def __init__(self, spec: MLPSpec, loss: str, stage: range | None = None) -> None:
        """`stage`: only these layers (`mlp.layers`)."""
        super().__init__()
        sizes = list(itertools.pairwise(spec.sizes))
        numbers = stage or range(len(sizes))
        self.layers = nn.ModuleDict({str(number): skip_init(nn.Linear, *sizes[number]) for number in numbers})
        self._loss: Any = LOSSES[loss]

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        """(N, outputs) float32 of x (N, inputs); for a stage, its output for the previous stage's output."""
        for number, layer in self.layers.items():
            if number != "0":
                x = F.relu(x) if x.is_leaf else F.relu_(x)
            x = layer(x)
        return x.float()

    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of losses, and the metric's sums."""
        return self._loss(self(x), targets)
