"""The bundled default: 1,797 real handwritten digits, 8x8 gray, 10 classes, no download.

The test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning Repository,
1998, doi:10.24432/C50P49) as scikit-learn ships it. Its file is read without importing scikit-learn, which would cost
every rank more than a second at its start.
"""

from __future__ import annotations

import gzip
import hashlib
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data import Dataset, cut, drawn_lots, packaged, stratify
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, Failure

DEFAULT_SIZE = (32, 32)
SHARES = (Fraction(80, 100), Fraction(7, 100), Fraction(13, 100))  # 2 % for validation would be 36 samples
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


def load(image_size: tuple[int, int] = DEFAULT_SIZE) -> Dataset:
    """The digits as float32 in 0..1, resized to `image_size` (width, height) by Pillow's bilinear filter.

    The split is stratified, 80 % train, 7 % validation, 13 % test (1,437, 126 and 234 samples), and fixed: no seed of
    a run changes it, so accuracies of different runs compare. Raises Failure (BAD_DATA) if the file is not there.
    """
    table = np.loadtxt(_read().splitlines(), delimiter=",", dtype=np.int64)
    labels, grids = table[:, -1], (table[:, :-1] / 16).astype(np.float32).reshape(-1, 8, 8)  # ink is 0..16
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


def _read() -> bytes:
    path = packaged("sklearn", "datasets/data/digits.csv.gz")
    if path is None:
        raise Failure("the digits come with scikit-learn, which is not installed: pip install scikit-learn", BAD_DATA)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise Failure(f"{path} is not the file we know: reinstall scikit-learn", BAD_DATA)
    return gzip.decompress(data)


def _resize(grids: NDArray[np.float32], image_size: tuple[int, int]) -> NDArray[np.float32]:
    width, height = image_size
    try:
        samples = np.empty((len(grids), height, width, 1), np.float32)
    except MemoryError as error:
        raise Failure(f"--image-size {width}x{height}: {error}; hint: give a smaller size", BAD_CONFIG) from None
    for sample, grid in zip(samples, grids, strict=True):
        sample[..., 0] = np.asarray(Image.fromarray(grid).resize(image_size, Image.Resampling.BILINEAR))
    return samples
