"""Import of VGG16's weights as torchvision publishes them; other files are errors."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from conftest import failing

from hvdtrain.models.vgg16 import parameters, random_weights
from hvdtrain.models.vgg16_weights import Vgg16Config, convert, import_weights, open_weights, read_head
from hvdtrain.system.exits import BAD_DATA, CANNOT_WRITE, Failure

HERE = Path("weights")


def constants() -> dict[str, np.ndarray]:
    """Arrays of the right shapes that take no room; the n-th holds n."""
    return {name: np.broadcast_to(np.float32(n), shape) for n, (name, shape) in enumerate(parameters().items())}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Our file, imported from one of random weights."""
    folder = tmp_path_factory.mktemp("vgg16")
    torch.save({name: torch.from_numpy(array) for name, array in random_weights(5).items()}, folder / "vgg16.pth")
    made = import_weights(Vgg16Config(source=str(folder / "vgg16.pth"), destination=str(folder / "vgg16.safetensors")))
    (folder / "vgg16.pth").unlink()
    assert made["values"] == 134_260_544
    yield folder / "vgg16.safetensors"
    (folder / "vgg16.safetensors").unlink()


def test_the_file_holds_the_published_arrays(imported: Path) -> None:
    arrays, head = open_weights(imported), read_head(imported)
    assert all(np.array_equal(arrays[name], array) for name, array in random_weights(5).items())
    assert (len(arrays), head["source"], len(head["source_sha256"])) == (30, "vgg16.pth", 64)
    assert [entry.name for entry in imported.parent.iterdir()] == [imported.name], "nothing unfinished is left"


def test_a_damaged_file_is_noticed(imported: Path) -> None:
    path = imported
    size = path.stat().st_size
    with path.open("rb+") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(bytes([byte[0] ^ 1]))
    with failing(BAD_DATA, r"vgg16\.safetensors is damaged"):
        open_weights(path)
    with path.open("rb+") as file:
        file.seek(size // 2)
        file.write(byte)


def test_a_file_that_is_cut_off_or_foreign_is_refused(tmp_path: Path) -> None:
    foreign, cut = tmp_path / "foreign.safetensors", tmp_path / "cut.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, foreign)
    about = {"schema": "hvdtrain.vgg16/1", "preprocessing": "torchvision", "digest": "0" * 64}
    safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, cut, about)
    cut.write_bytes(cut.read_bytes()[:-4])
    safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, tmp_path / "keras", about | {"preprocessing": "caffe"})
    safetensors.torch.save_file({"x": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "bf16", about)
    listed = json.dumps({"__metadata__": about | {"preprocessing": ["torchvision"]}}).encode()
    (tmp_path / "listed").write_bytes(len(listed).to_bytes(8, "little") + listed)
    for path, words in [
        (foreign, "was not made by this version"),
        (tmp_path / "listed", "was not made by this version"),
        (tmp_path / "keras", "was not made by this version"),
        (tmp_path / "bf16", "is damaged"),
        (tmp_path / "absent", "No such file"),
        (cut, "is damaged"),
    ]:
        with pytest.raises(Failure, match=words) as failed:
            open_weights(path)
        assert str(path) in str(failed.value)
        assert failed.value.code == BAD_DATA


def test_torchvisions_state_dict_in_both_formats_of_torch_save(tmp_path: Path) -> None:
    """Tensors that are one number expanded, so that the files are small."""
    tensors = {name: torch.tensor(float(n)).expand(shape) for n, (name, shape) in enumerate(parameters().items())}
    tensors |= {"classifier.6.weight": torch.tensor(0.5).expand(1000, 4096), "classifier.6.bias": torch.zeros(1000)}
    made = []
    for legacy in (False, True):
        torch.save(tensors, tmp_path / "vgg16.pth", _use_new_zipfile_serialization=not legacy)
        config = Vgg16Config(source=str(tmp_path / "vgg16.pth"), destination=str(tmp_path / "new"), dry_run=True)
        made.append(import_weights(config))
        assert (made[-1]["preprocessing"], made[-1]["arrays"]) == ("torchvision", 30)
    assert not (tmp_path / "new").exists()
    assert made[0]["digest"] == made[1]["digest"], "the weights' own, not their file's"
    assert made[0]["source_sha256"] != made[1]["source_sha256"]


def changed(**arrays: np.ndarray | None) -> dict[str, np.ndarray]:
    found = constants() | {name.replace("_", "."): array for name, array in arrays.items()}
    return {name: array for name, array in found.items() if array is not None}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (changed(features_5_weight=None), "features.5.weight is missing"),
        (changed(features_5_bias=np.zeros(64)), r"features.5.bias has shape \(64,\), not \(128,\)"),
        (changed(classifier_3_bias=np.full(4096, np.nan)), "classifier.3.bias contains infinite values or NaN"),
        ({n: a for n, a in constants().items() if n.startswith("f")}, r"\('notop'\).* get the file with the top"),
        ({}, "features.0.weight is missing"),
    ],
)
def test_weights_of_another_network_are_named_and_refused(found: dict[str, np.ndarray], words: str) -> None:
    with failing(BAD_DATA, f"^weights.*{words}"):
        convert(found, HERE)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def test_nothing_but_tensors_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bomb").write_bytes(pickle.dumps(Bomb()))
    torch.save({"features.0.weight": Bomb()}, "bomb.pth")
    for source in ("bomb", "bomb.pth"):
        with failing(BAD_DATA, f"^{source}") as failed:
            import_weights(Vgg16Config(source=source, destination="new"))
        assert "\n" not in str(failed.value)
    assert not Path("exploded").exists()


def test_what_exists_is_not_overwritten_and_a_bad_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    tensors = {name: torch.tensor(0.0).expand(shape) for name, shape in parameters().items()}
    torch.save(tensors, tmp_path / "vgg16.pth")
    for place in ("file", "file/new"):
        with failing(CANNOT_WRITE, place):
            import_weights(Vgg16Config(source=str(tmp_path / "vgg16.pth"), destination=str(tmp_path / place)))
    assert (tmp_path / "file").read_text() == "mine"
