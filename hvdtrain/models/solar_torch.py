"""The CNN of `solar.py` in PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from hvdtrain.models.layers_torch import Named, dropped
from hvdtrain.models.mlp_torch import forecast_error
from hvdtrain.models.solar import POOL, CNNSpec, parameters


class CNNTorch(Named):
    """The network of `spec`: see `layers_torch.Named`. With `stage` it has only these layers (`solar.layers`)."""

    def __init__(self, spec: CNNSpec, stage: range | None = None) -> None:
        super().__init__(parameters(spec, stage))
        self.spec = spec
        layers = [self._convolved, self._first, self._second]
        self._layers = [layers[number] for number in stage or range(len(layers))]

    def forward(self, maps: Tensor, targets: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """(N, 1) float32 of maps (N, side, side); for a stage, its output for the previous stage's output. In training
        dropout is a function of the key (2,) int64."""
        x = maps
        for layer in self._layers:
            x = layer(x, key if self.training else None)
        return x.float()

    def _convolved(self, maps: Tensor, key: Tensor | None) -> Tensor:
        x = maps.unsqueeze(1)
        for layer in ("conv1", "conv2"):
            x = F.relu_(F.conv2d(x, *self._layer(layer)))
        return F.max_pool2d(x, POOL).permute(0, 2, 3, 1).flatten(1)

    def _first(self, x: Tensor, key: Tensor | None) -> Tensor:
        return F.relu_(F.linear(dropped(x, self.spec.dropout[0], key), *self._layer("dense1")))

    def _second(self, x: Tensor, key: Tensor | None) -> Tensor:
        return F.linear(dropped(x, self.spec.dropout[1], None if key is None else key + 1), *self._layer("dense2"))

    def loss(self, maps: Tensor, targets: Tensor, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of losses, and the metric's sums."""
        return forecast_error(self(maps, targets, key), targets)
