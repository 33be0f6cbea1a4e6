"""The CNN of `solar.py` in PyTorch, and the loss of all networks there."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from hvdtrain.models.dropout_torch import dropped, generator
from hvdtrain.models.mlp_torch import squared_error
from hvdtrain.models.solar import CHANNELS, DENSE, KERNEL, POOL, CNNSpec, sides


def forecast_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the squared errors, and what `hvdtrain.solar.Forecast` adds up; outputs (N, 1), targets (N, 2): the
    reading that is to be found, and the last one that was seen."""
    truth, last = targets.unbind(1)
    loss, sums = squared_error(outputs, truth)
    return loss, sums | {"persistence": (last.double() - truth.double()).square().sum()}


class CNNTorch(nn.Module):
    """The network of `spec`. Its values are arbitrary until they are loaded; `state_dict()` has exactly the names and
    shapes of `solar.parameters`."""

    def __init__(self, spec: CNNSpec) -> None:
        super().__init__()
        self.spec = spec
        first, second = CHANNELS
        self.conv1 = skip_init(nn.Conv2d, 1, first, KERNEL)
        self.conv2 = skip_init(nn.Conv2d, first, second, KERNEL)
        self.dense1 = skip_init(nn.Linear, second * sides(spec)[2] ** 2, DENSE)
        self.dense2 = skip_init(nn.Linear, DENSE, 1)

    def forward(self, maps: Tensor, key: Tensor | None = None) -> Tensor:
        """(N, 1) float32 of maps (N, side, side). With a key (2,) int64 dropout draws from it: equal keys, equal
        masks; without one nothing is dropped."""
        random = None if key is None else generator(key)
        before, behind = self.spec.dropout
        x = F.relu_(self.conv1(maps.unsqueeze(1)))
        x = F.max_pool2d(F.relu_(self.conv2(x)), POOL)
        x = dropped(x.permute(0, 2, 3, 1).flatten(1), before, random)
        x = dropped(F.relu_(self.dense1(x)), behind, random)
        outputs: Tensor = self.dense2(x)
        return outputs.float()

    def loss(self, maps: Tensor, targets: Tensor, key: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of losses, and the measure's sums."""
        return forecast_error(self(maps, key if self.training else None), targets)
