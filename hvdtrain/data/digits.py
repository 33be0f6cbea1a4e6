"""The default data set: 1,797 handwritten digits as 8x8 gray images in 10 classes, shipped with hvdtrain.

They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning
Repository, 1998, doi:10.24432/C50P49).
"""

from __future__ import annotations

import gzip
import hashlib
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data import SHIPPED, Dataset, cut, drawn_lots, stratify
from hvdtrain.system.exits import BAD_CONFIG, Failure

DEFAULT_SIZE = (32, 32)
SHARES = (Fraction(80, 100), Fraction(7, 100), Fraction(13, 100))  # 2 % for validation would be only 36 samples


def load(image_size: tuple[int, int] = DEFAULT_SIZE) -> Dataset:
    """The digits as float32 in 0..1, resized to `image_size` (width, height) with Pillow's bilinear filter.

    The split is stratified: 80 % train, 7 % validation, 13 % test (1,437, 126 and 234 samples). It does not depend on
    the run's seed, so accuracies of different runs are comparable.
    """
    lines = gzip.decompress((SHIPPED / "digits.csv.gz").read_bytes()).splitlines()
    table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    labels, grids = table[:, -1], (table[:, :-1] / 16).astype(np.float32).reshape(-1, 8, 8)  # pixels are 0..16
    order, counts = stratify(labels, drawn_lots(len(labels)), 10, SHARES)
    labels, samples = labels[order], _resize(grids[order], image_size)
    digest = hashlib.sha256(samples.data)
    for array in (labels, counts):
        digest.update(np.ascontiguousarray(array).data)
    return Dataset(
        name="digits",
        classes=tuple("0123456789"),
        fingerprint=digest.hexdigest(),
        **cut(samples, labels, counts),
    )


def _resize(grids: NDArray[np.float32], image_size: tuple[int, int]) -> NDArray[np.float32]:
    width, height = image_size
    try:
        samples = np.empty((len(grids), height, width, 1), np.float32)
    except MemoryError as error:
        raise Failure(f"--image-size {width}x{height}: {error}; hint: give a smaller size", BAD_CONFIG) from None
    for sample, grid in zip(samples, grids, strict=True):
        sample[..., 0] = np.asarray(Image.fromarray(grid).resize(image_size, Image.Resampling.BILINEAR))
    return samples
