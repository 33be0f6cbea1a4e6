"""VGG16's features in PyTorch: follows the plan of `vgg16.py`. Also reads state dicts of published weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.models.vgg16 import LAYERS, LINEAR, POOL, SCALE, SHIFT
from hvdtrain.system.exits import BAD_DATA, Failure


class Vgg16Torch:
    """The frozen network with these `arrays` (PyTorch's names and shapes): not a module, so it cannot be trained.

    `device` is a result of `frameworks.pytorch.prepare`.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: str = "cpu") -> None:
        self.device = device
        self._scale, self._shift = (torch.tensor(row, device=device) for row in (SCALE, SHIFT))
        self._arrays = {name: _tensor(array, device) for name, array in arrays.items()}

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features (n, 4096) float32 of images (n, 224, 224, 3) uint8, RGB."""
        with torch.inference_mode(), torch.autocast(torch.device(self.device).type, enabled=False):
            return self.features(torch.tensor(images, device=self.device)).cpu().numpy()

    def features(self, images: Tensor) -> Tensor:
        """Features (n, 4096) float32 of images (n, 224, 224, 3) uint8, RGB, on the network's device."""
        x = images.to(torch.float32).mul_(self._scale).add_(self._shift)
        x = x.permute(0, 3, 1, 2)  # a view in PyTorch's channels-last format
        for layer in LAYERS:
            if layer == POOL:
                x = F.max_pool2d(x, 2)
            else:
                x = F.relu_(F.conv2d(x, *self._layer(layer), padding=1))
        x = x.flatten(1)  # channels first, whatever the memory format
        for layer in LINEAR:
            x = F.relu_(F.linear(x, *self._layer(layer)))
        return x

    def _layer(self, name: str) -> tuple[Tensor, Tensor]:
        return self._arrays[f"{name}.weight"], self._arrays[f"{name}.bias"]


def _tensor(array: NDArray[Any], device: str) -> Tensor:
    """A tensor; kernels are channels-last like the activations, which is 1.4 times as fast on a CPU."""
    order = torch.channels_last if array.ndim == 4 else torch.contiguous_format
    with warnings.catch_warnings():  # about read-only arrays, which are not written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).to(device=device, memory_format=order)


def read_state_dict(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors in a file of `torch.save`, as float32 arrays; only tensors are unpickled.

    Raises Failure (BAD_DATA), naming the file, if it contains anything else or is damaged.
    """
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the type depends on the kind of damage
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Failure(f"{path}: PyTorch cannot read a state dict from it ({reason:.120})", BAD_DATA) from None
    if not isinstance(contents, dict) or not all(isinstance(value, Tensor) for value in contents.values()):
        message = f"{path} contains {type(contents).__name__}, not a state dict of tensors"
        raise Failure(f"{message}; hint: save model.state_dict() instead", BAD_DATA)
    return {str(name): value.detach().to(torch.float32).numpy() for name, value in contents.items()}
