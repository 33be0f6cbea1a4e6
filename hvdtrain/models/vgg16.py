"""Description of VGG16 up to its second fully connected layer: layer plan, array shapes, preprocessing.

Simonyan, Zisserman (ICLR 2015, arXiv:1409.1556), configuration D, without the layer that classifies ImageNet:

    images (N, 224, 224, 3) uint8, RGB
      5 stages   of 2, 2, 3, 3, 3 convolutions 3x3 / 1, each with ReLU; a stage ends with 2x2 max pooling / 2
      flatten    512 x 7 x 7, channels first
      2 layers   fully connected, 4096 each, each with ReLU
    features (N, 4096) float32, none negative

The network is frozen, so nothing of it is exchanged between ranks. Names and shapes are torchvision's (`vgg16`):
convolutions (out, in, height, width), linear (out, in).
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

from hvdtrain.models.layers import Arrays, Shapes, uniform

IMAGE_SIZE = (224, 224)
"""(height, width) of the images; other sizes do not fit the first fully connected layer."""

FEATURES = 4096
"""Number of features per image: outputs of the second fully connected layer."""

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and number of convolutions of each stage."""

POOL = "pool"
"""In `LAYERS`: 2x2 max pooling with stride 2."""

LINEAR = ("classifier.0", "classifier.3")
"""The two fully connected layers, in order (torchvision counts ReLU and dropout as layers too)."""


def _layers() -> tuple[str, ...]:
    names, number = [], 0
    for _, convolutions in STAGES:
        for _ in range(convolutions):
            names.append(f"features.{number}")
            number += 2  # the ReLU after it has its own number
        names.append(POOL)
        number += 1
    return tuple(names)


LAYERS = _layers()
"""Operations before flattening, in order: names of convolutions, and `POOL`."""


_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet in 0..1, RGB
SCALE = tuple(1 / (255 * deviation) for deviation in _DEVIATION)
SHIFT = tuple(-mean / deviation for mean, deviation in zip(_MEAN, _DEVIATION, strict=True))
"""torchvision's preprocessing of values 0..255, per channel: x * SCALE + SHIFT"""


def parameters() -> Shapes:
    """Name and shape of every array, in torchvision's order."""
    shapes: Shapes = {}
    convolutions = (name for name in LAYERS if name != POOL)
    inputs = 3
    for name, outputs in zip(convolutions, chain.from_iterable([c] * n for c, n in STAGES), strict=True):
        shapes |= {f"{name}.weight": (outputs, inputs, 3, 3), f"{name}.bias": (outputs,)}
        inputs = outputs
    inputs *= math.prod(side // 2 ** len(STAGES) for side in IMAGE_SIZE)
    for name in LINEAR:
        shapes |= {f"{name}.weight": (FEATURES, inputs), f"{name}.bias": (FEATURES,)}
        inputs = FEATURES
    return shapes


def random_weights(seed: int) -> Arrays:
    """Random weights, float32, a pure function of `seed`, for tests without a download.

    They are uniform with He's variance, 2 / inputs (arXiv:1502.01852), which keeps the scale of activations through all
    ReLUs; biases are 0. Raises Failure (BAD_CONFIG) for a negative seed.
    """
    return {
        name: np.zeros(shape, np.float32)
        if len(shape) == 1
        else uniform(seed, name, shape, math.sqrt(6 / math.prod(shape[1:])))
        for name, shape in parameters().items()
    }
