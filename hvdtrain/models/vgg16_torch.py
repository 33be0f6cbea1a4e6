"""VGG16's features in PyTorch: walks the plan of `vgg16.py`. Also reads the state dict in which weights come."""

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

from hvdtrain.models.vgg16 import LAYERS, LINEAR, POOL, PREPROCESSING
from hvdtrain.system.exits import BAD_DATA, Failure


class Vgg16Torch:
    """The frozen network of `arrays` (neutral names and shapes). No module: nothing in it can be trained by accident.

    `preprocessing` is a name of `vgg16.PREPROCESSING`, `device` what `frameworks.pytorch.prepare` returns.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], preprocessing: str, device: str = "cpu") -> None:
        self.device = device
        about = PREPROCESSING[preprocessing]
        self._reverse = about.reverse
        self._scale, self._shift = (torch.tensor(row, device=device) for row in (about.scale, about.shift))
        self._arrays = {name: _tensor(array, device) for name, array in arrays.items()}

    def __call__(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features (n, 4096) float32 of images (n, 224, 224, 3) uint8, RGB."""
        with torch.inference_mode(), torch.autocast(torch.device(self.device).type, enabled=False):
            return self._features(torch.tensor(images, device=self.device)).cpu().numpy()

    def _features(self, images: Tensor) -> Tensor:
        x = images.flip(3) if self._reverse else images
        x = x.to(torch.float32).mul_(self._scale).add_(self._shift)
        x = x.permute(0, 3, 1, 2)  # a view, no copy: PyTorch's channels-last
        for layer in LAYERS:
            if layer == POOL:
                x = F.max_pool2d(x, 2)
            else:
                x = F.relu_(F.conv2d(x, *self._layer(layer), padding=1))
        x = x.flatten(1)  # channels first, whatever the order in memory
        for layer in LINEAR:
            x = F.relu_(F.linear(x, *self._layer(layer)))
        return x

    def _layer(self, name: str) -> tuple[Tensor, Tensor]:
        return self._arrays[f"{name}.weight"], self._arrays[f"{name}.bias"]


def _tensor(array: NDArray[Any], device: str) -> Tensor:
    """Kernels in channels-last, as the activations are: on a CPU that is 1.4 times as fast as channels-first."""
    order = torch.channels_last if array.ndim == 4 else torch.contiguous_format
    with warnings.catch_warnings():  # of arrays that are read-only: nothing here writes to them
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).to(device=device, memory_format=order)


def read_state_dict(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors in a file of `torch.save`, as float32 arrays; nothing but tensors is unpickled.

    Raises Failure (BAD_DATA), which names the file, if it holds anything else or is damaged.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, by what is wrong with the pickle
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Failure(f"{path}: PyTorch reads no state dict from it ({reason:.120})", BAD_DATA) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        hint = "save model.state_dict() and give that"
        raise Failure(f"{path}: holds {type(found).__name__} that is no state dict of tensors: {hint}", BAD_DATA)
    return {str(name): value.detach().to(torch.float32).numpy() for name, value in found.items()}
