"""VGG16 as a frozen encoder: its published numbers, and twins that are one network."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.models.layers import Arrays
from hvdtrain.models.vgg16 import STAGES, parameters
from hvdtrain.models.vgg16_tf import Vgg16TF
from hvdtrain.models.vgg16_torch import Vgg16Torch


def smooth_images(count: int, seed: int = 0) -> np.ndarray:
    """Smooth images: noise alone would look the same to every channel."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 14, 14, 3), dtype=np.uint8)
    return coarse.repeat(16, axis=1).repeat(16, axis=2)


def narrow(seed: int = 0) -> Arrays:
    """The network with a sixteenth of the channels (but the three of the images), and biases that are not zero."""
    draw = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, shape in parameters().items():
        thin = tuple(size if size in (3, 7) else size // 16 for size in shape)
        deviation = np.sqrt(2 / np.prod(thin[1:])) if len(thin) > 1 else 0.1
        arrays[name] = draw.normal(0, deviation, thin).astype(np.float32)
    return arrays


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference, as a share of the largest feature."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def by_hand(arrays: Arrays) -> torch.nn.Module:
    """The same network, laid out as torchvision's source says, without the last layer."""
    layers: list[torch.nn.Module] = []
    inputs, first = 3, arrays["features.0.bias"].size
    for channels, convolutions in STAGES:
        for _ in range(convolutions):
            outputs = channels * first // 64
            layers += [torch.nn.Conv2d(inputs, outputs, 3, padding=1), torch.nn.ReLU()]
            inputs = outputs
        layers.append(torch.nn.MaxPool2d(2))
    width = arrays["classifier.0.bias"].size
    model = torch.nn.ModuleDict(
        {
            "features": torch.nn.Sequential(*layers),
            "classifier": torch.nn.Sequential(
                torch.nn.Linear(inputs * 49, width),
                torch.nn.ReLU(),
                torch.nn.Dropout(),
                torch.nn.Linear(width, width),
                torch.nn.ReLU(),
            ),
        }
    )
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()}, strict=True)
    return model.eval()


@torch.no_grad()
def features_by_hand(arrays: Arrays, images: np.ndarray) -> np.ndarray:
    model = by_hand(arrays)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    x = torch.tensor((images / 255 - mean) / deviation, dtype=torch.float32).permute(0, 3, 1, 2)
    return model["classifier"](model["features"](x).flatten(1)).numpy()


# ---------------------------------------------------------------------------------------------------------------------
# The network.


def test_published_numbers() -> None:
    last_layer = 4096 * 1000 + 1000
    assert sum(int(np.prod(shape)) for shape in parameters().values()) == 138_357_544 - last_layer
    assert len(parameters()) == 2 * 15
    assert parameters()["features.28.weight"] == (512, 512, 3, 3)
    assert parameters()["classifier.0.weight"] == (4096, 512 * 7 * 7)


def test_the_twins_are_one_network() -> None:
    arrays, images = narrow(), smooth_images(5)
    one, other = Vgg16Torch(arrays), Vgg16TF(arrays)
    assert distance(one(images), other(images)) < 1e-3
    assert distance(one(images), features_by_hand(arrays, images)) < 1e-4
    for array in (*arrays.values(), images):  # as memory maps are
        array.flags.writeable = False
    for twin in (one, other):
        assert twin.device == "cpu"
        alone = np.concatenate([twin(images[i : i + 1]) for i in range(5)])
        assert distance(alone, twin(images)) < 1e-4, "each image alone"
        assert (twin(images) >= 0).all()
