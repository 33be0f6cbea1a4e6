"""The frozen encoder: VGG16 with the weights of a file, in either framework."""

from __future__ import annotations

from typing import cast

from hvdtrain.captions.features import Encoder
from hvdtrain.models import network, vgg16, vgg16_weights
from hvdtrain.system.exits import BAD_CONFIG, Failure

RANDOM = "random"
"""Instead of a file: random weights, for testing"""


def digest(weights: str, image_size: tuple[int, int]) -> str:
    """A digest of the weights and their preprocessing. Raises Failure: 65 for a missing or foreign file, 78 for an
    image size (width, height) that VGG16 does not support."""
    if image_size != vgg16.IMAGE_SIZE:
        wanted, size = ("{}x{}".format(*pair) for pair in (vgg16.IMAGE_SIZE, image_size))
        raise Failure(
            f"--encoder vgg16 needs images of {wanted}, not {size}; hint: prepare them with "
            f"`hvdtrain data captions ... --size {wanted}`, or use --encoder small",
            BAD_CONFIG,
        )
    return RANDOM if weights == RANDOM else vgg16_weights.read_head(weights)["digest"]


def encoder(weights: str, framework: str, device: str = "cpu") -> Encoder:
    """Features (n, 4096) float32 of images (n, 224, 224, 3) uint8. Raises Failure (65) for a damaged file."""
    if weights == RANDOM:
        arrays, preprocessing = vgg16.random_weights(0), "torchvision"
    else:
        arrays, preprocessing, _ = vgg16_weights.open_weights(weights)
    return cast(Encoder, network("vgg16.Vgg16", framework, arrays, preprocessing, device))
