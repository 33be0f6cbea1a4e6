"""The CNN of `solar.py` in PyTorch, and the loss of all networks there."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from hvdtrain.models.layers_torch import dropped
from hvdtrain.models.mlp_torch import squared_error
from hvdtrain.models.solar import POOL, CNNSpec, parameters


def forecast_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the squared errors, and what `hvdtrain.solar.Forecast` adds up; outputs (N, 1), targets (N, 2): the
    reading that is to be found, and the last one that was seen."""
    truth, last = targets.unbind(1)
    loss, sums = squared_error(outputs, truth)
    return loss, sums | {"persistence": (last.double() - truth.double()).square().sum()}


class CNNTorch(nn.Module):
    """The network of `spec`. Its values are arbitrary until they are loaded; `state_dict()` has exactly the names and
    shapes of `solar.parameters`. With `part` it is those layers (`solar.layers`) alone."""

    def __init__(self, spec: CNNSpec, part: range | None = None) -> None:
        super().__init__()
        self.spec = spec
        for name, shape in parameters(spec, part).items():
            layer, _, leaf = name.partition(".")
            if leaf == "weight":
                outputs, inputs, *kernel = shape
                more = {"kernel_size": kernel[0]} if kernel else {}
                self.add_module(layer, skip_init(nn.Conv2d if kernel else nn.Linear, inputs, outputs, **more))
        layers = [self._convolved, self._first, self._second]
        self._layers = [layers[number] for number in part or range(len(layers))]

    def forward(self, maps: Tensor, targets: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """(N, 1) float32 of maps (N, side, side); of a part, what its layers make of what those before made. With a key
        (2,) int64 dropout draws from it in training: equal keys, equal masks."""
        x = maps
        for layer in self._layers:
            x = layer(x, key if self.training else None)
        return x.float()

    def _convolved(self, maps: Tensor, key: Tensor | None) -> Tensor:
        x = F.relu_(self.conv1(maps.unsqueeze(1)))
        return F.max_pool2d(F.relu_(self.conv2(x)), POOL).permute(0, 2, 3, 1).flatten(1)

    def _first(self, x: Tensor, key: Tensor | None) -> Tensor:
        return F.relu_(self.dense1(dropped(x, self.spec.dropout[0], key)))

    def _second(self, x: Tensor, key: Tensor | None) -> Tensor:
        return self.dense2(dropped(x, self.spec.dropout[1], None if key is None else key + 1))

    def loss(self, maps: Tensor, targets: Tensor, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of losses, and the measure's sums."""
        return forecast_error(self(maps, targets, key), targets)
