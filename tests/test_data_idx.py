"""Images in IDX files: Fashion-MNIST where Debian's package is installed, and files that are wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import failing, here
from PIL import Image

from hvdtrain import data
from hvdtrain.data import idx
from hvdtrain.system.exits import BAD_DATA

PACKAGED = pytest.mark.skipif(not idx.FASHION.is_dir(), reason="needs Debian's dataset-fashion-mnist (apt-get install)")


def packed(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 + 12 images, 6 wide and 4 high, of 3 classes; the test part is not packed."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 12)):
        images = packed(draw.integers(0, 256, (count, 4, 6), np.uint8))
        labels = packed((np.arange(count) % 3).astype(np.uint8))
        for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if part == "train":
                (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (tmp_path / name).write_bytes(content)
    return tmp_path


def test_images_come_as_they_are_or_resized_and_validation_is_a_tenth_of_each_class(folder: Path) -> None:
    dataset = data.load(f"idx:{folder}")
    assert (dataset.image_shape, dataset.classes) == ((4, 6, 1), ("0", "1", "2"))
    assert [len(dataset.train), len(dataset.validation), len(dataset.test)] == [54, 6, 12]
    original = np.frombuffer(gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8)
    original = original.reshape(60, 4, 6)
    seen = []
    for part in (dataset.train, dataset.validation):
        rows = np.arange(len(part))
        images, labels = part.batch(rows, rows, None).arrays
        assert part.rows is not None
        np.testing.assert_allclose(images[..., 0], original[part.rows] / 255, rtol=1e-6)
        np.testing.assert_array_equal(labels, part.rows % 3)
        assert np.bincount(labels).tolist() == [len(part) // 3] * 3
        seen += part.rows.tolist()
    assert sorted(seen) == list(range(60))
    larger = data.load(f"idx:{folder}", (9, 8))
    assert larger.image_shape == (8, 9, 1)
    assert larger.train.samples.nbytes == 60 * 24, "resized when they are needed"
    images = larger.train.batch(np.arange(3), np.arange(3), None).arrays[0]
    assert larger.train.rows is not None
    image = Image.fromarray(original[larger.train.rows[2]]).resize((9, 8), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(images[2, ..., 0], np.asarray(image) / 255, rtol=1e-6)
    known = {dataset.fingerprint, larger.fingerprint, data.load(f"idx:{folder}", (6, 4)).fingerprint}
    for file in folder.iterdir():  # another last pixel or class
        content, packed = file.read_bytes(), file.suffix == ".gz"
        whole = gzip.decompress(content) if packed else content
        whole = whole[:-1] + bytes([whole[-1] ^ 1])
        file.write_bytes(gzip.compress(whole) if packed else whole)
        known.add(data.load(f"idx:{folder}").fingerprint)
        file.write_bytes(content)
    assert len(known) == 3 + 4


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("train-images-idx3-ubyte.gz", lambda content: content[:200], "damaged or truncated"),
        ("t10k-images-idx3-ubyte", lambda content: content[:-1], "shorter than the 288 bytes"),
        ("t10k-images-idx3-ubyte", lambda content: b"\0\0\x0d" + content[3:], "not an IDX file of bytes with 3 axes"),
        ("t10k-images-idx3-ubyte", lambda content: content[:4] + b"\xff" * 12, "limit of 4 GiB"),
        ("t10k-labels-idx1-ubyte", lambda content: packed(np.zeros(11, np.uint8)), "12 images and 11 labels for t10k"),
        ("t10k-images-idx3-ubyte", lambda content: packed(np.zeros((12, 6, 6), np.uint8)), "test images of 6x6"),
        ("t10k-images-idx3-ubyte", None, "ubyte\\.gz do not exist"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_named(folder: Path, name: str, change: object, told: str) -> None:
    path = folder / name
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    with failing(BAD_DATA, told) as error:
        data.load(f"idx:{folder}")
    assert str(folder) in str(error.value)


@PACKAGED
def test_fashion_mnist_is_whole_and_learnt_from(tmp_path: Path) -> None:
    """All of it is loaded, and some of it, in files of the same form, trained on."""
    dataset = data.load("fashion-mnist")
    assert dataset.train.rows is not None
    assert np.bincount(dataset.train.labels[dataset.train.rows]).tolist() == [5400] * 10
    assert np.bincount(dataset.test.labels).tolist() == [1000] * 10
    for part, split, count in (("train", dataset.train, 2000), ("t10k", dataset.test, 300)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(packed(split.samples[:count, ..., 0]))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(packed(split.labels[:count].astype(np.uint8)))
    flags = ["--data", f"idx:{tmp_path}", "--width", "0.125", "--image-size", "16", "--epochs", "1"]
    flags += ["--warmup-epochs", "0", "--framework", "torch", "--run-dir", str(tmp_path / "run")]
    told = here("resnet", *flags)
    assert told["steps"] == 1800 // 32 + 1
    assert told["test_accuracy"] > 0.35
