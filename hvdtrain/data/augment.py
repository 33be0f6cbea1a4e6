"""Random flips and crops of training images (`--augment flip,crop`).

How an image changes is a function of seed, epoch and its index in the split. The result is the same in both frameworks,
for any number of ranks, and after a resume.

`flip` mirrors half of the images left to right. `crop` pads the four sides with zeros by an eighth of the height or
width, and cuts out an image of the original size at a random position. For images of 32x32 that is the usual recipe for
CIFAR, a padding of 4 (He et al., "Deep residual learning for image recognition", 2016).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.exits import BAD_CONFIG, Failure

KINDS = ("flip", "crop")
STREAM = 0xA06
"""Keeps this stream of random numbers apart from the sampling order, which also derives from seed and epoch"""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """The kinds of change to make."""

    flip: bool
    crop: bool

    @classmethod
    def parse(cls, text: str) -> Augment:
        """Read `flip`, `crop` or `flip,crop`. Raises Failure (78) for anything else."""
        kinds = text.split(",")
        if not set(kinds) <= set(KINDS):
            raise Failure(f"--augment {text} is unknown; hint: give flip, crop or flip,crop", BAD_CONFIG)
        return cls(flip="flip" in kinds, crop="crop" in kinds)

    @staticmethod
    def draws(seed: int, epoch: int, samples: int) -> NDArray[np.uint64]:
        """Draw the random numbers of an epoch: 32 bits for the flip and for each offset, of shape (samples, 3)."""
        stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch], spawn_key=(STREAM,))))
        return stream.integers(2**32, size=(samples, 3), dtype=np.uint64)

    def change(self, images: NDArray[np.float32], draws: NDArray[np.uint64]) -> None:
        """Change images (n, height, width, channels) in place, each by its row of `draws`.

        An image at a time stays in the processor's cache, and needs no second batch.
        """
        height, width = images.shape[1:3]
        flips = (draws[:, 0] >> 31) * self.flip
        downs, rights = (
            (draws[:, 1 + axis] * (2 * pad + 1) >> 32).astype(np.int64) - pad
            for axis, pad in enumerate((side + 4) // 8 * self.crop for side in (height, width))
        )
        for image, flip, down, right in zip(images, flips.tolist(), downs.tolist(), rights.tolist(), strict=True):
            if not (flip or down or right):
                continue
            source = image[:, ::-1] if flip else image
            rows, columns = slice(max(0, -down), height - max(0, down)), slice(max(0, -right), width - max(0, right))
            image[rows, columns] = source[
                rows.start + down : rows.stop + down, columns.start + right : columns.stop + right
            ]
            image[: rows.start], image[rows.stop :] = 0, 0
            image[:, : columns.start], image[:, columns.stop :] = 0, 0
