"""Features of a frozen encoder: computed once by all ranks together, the same whoever computes, kept and read again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, document, launch

from hvdtrain.captions.features import extract
from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.world import connect
from hvdtrain.data.prepared import cache_folder
from hvdtrain.models.vgg16 import FEATURES
from hvdtrain.system.exits import IO_ERROR, Failure

PROGRAM = runpy.run_path(str(PROGRAMS / "features.py"), run_name="read")
IMAGES = 40
KEY = {"encoder": "whole"}


def expected(count: int) -> np.ndarray:
    return np.asarray(PROGRAM["Encoder"]()(PROGRAM["images"](count, 0)))


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Communicator:
    """A world of one rank with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return connect("torch")


def made(world: Communicator, key: dict[str, Any] = KEY, seed: int = 0) -> tuple[np.ndarray, int]:
    """The features, and how many images an encoder saw for them."""
    encoders = []

    def encoder() -> Any:
        encoders.append(PROGRAM["Encoder"]())
        return encoders[-1]

    features = extract(PROGRAM["images"](IMAGES, seed), encoder, key=key, world=world)
    return features, sum(each.images for each in encoders)


def kept() -> list[Path]:
    return sorted(path for path in cache_folder("features").rglob("*") if path.is_file())


# ---------------------------------------------------------------------------------------------------------------------
# One rank.


def test_the_second_time_they_are_read_and_no_encoder_is_made(
    alone: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    features, images = made(alone)
    assert images == IMAGES
    np.testing.assert_array_equal(features, expected(IMAGES))
    assert not features.flags.writeable
    assert "images/s" in capsys.readouterr().err
    again, images = made(alone)
    assert images == 0
    assert [made(alone, seed=1)[1], made(alone, key={"encoder": "other"})[1]] == [IMAGES] * 2
    np.testing.assert_array_equal(again, features)
    assert len(kept()) == 3
    file = Path(re.findall(r"read from (.*)", capsys.readouterr().err)[0])
    np.testing.assert_array_equal(np.load(file, allow_pickle=False), features, err_msg="a .npy file for everyone")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def foreign(file: Path) -> None:
    with file.open("wb") as out:
        np.save(out, np.zeros((IMAGES, FEATURES), np.float32))


@pytest.mark.parametrize("damage", [cut, flip, foreign])
def test_what_is_not_sound_is_made_again(alone: Communicator, damage: Any) -> None:
    before = np.array(made(alone)[0])
    damage(kept()[0])
    features, images = made(alone)
    assert images == IMAGES
    np.testing.assert_array_equal(features, before)
    assert made(alone)[1] == 0


def test_an_encoder_that_fails_leaves_nothing_behind(alone: Communicator) -> None:
    def broken() -> Any:
        def encode(images: np.ndarray) -> np.ndarray:
            raise ZeroDivisionError

        return encode

    with pytest.raises(ZeroDivisionError):
        extract(PROGRAM["images"](IMAGES, 0), broken, key=KEY, world=alone)
    with pytest.raises(ValueError, match="the encoder returned float32"):
        extract(PROGRAM["images"](IMAGES, 0), lambda: lambda x: np.zeros((len(x), 3), np.float32), key=KEY, world=alone)
    assert kept() == []


def test_leftovers_of_a_killed_run_are_removed_after_a_day(alone: Communicator) -> None:
    made(alone)
    (file,) = kept()
    old, new = (file.with_name(f".{file.stem}.{token}.0.part") for token in ("old", "new"))
    other = file.with_name(".notes.txt.part")
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 90_000,) * 2)
    file.unlink()
    made(alone)
    assert kept() == sorted([file, new, other])


def test_a_full_disk_is_an_error(alone: Communicator) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(Failure, match="free some space") as failed:
            made(alone)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failed.value.code == IO_ERROR
    assert str(cache_folder("features")) in str(failed.value)
    assert kept() == []


# --- several ranks: a, b, ... are the disks of hosts ------------------------------------------------------------------


def test_three_ranks_compute_the_same_as_one_on_any_shared_disks(tmp_path: Path) -> None:
    a, b, c, d, e = (str(tmp_path / name) for name in "abcde")
    steps = [
        [a, a, a],  # one host
        [a, a, a],
        [b, b, c],  # two hosts
        [b, b, c],
        [b, d, c],  # a new host and two that have the file
        {"caches": [b, b, c], "cut": c},
        {"caches": [e, e, a], "cut": a},  # all are damaged
        {"caches": [b, b, c], "seeds": [0, 0, 1]},  # hosts with different images
    ]
    count = 1000  # several messages for a part
    report = document(launch(3, [str(PROGRAMS / "features.py"), json.dumps({"images": count, "steps": steps})]))
    whole = hashlib.sha256(expected(count).data).hexdigest()
    each = [[333], [333], [334]]
    nobody: list[list[int]] = [[], [], []]
    for step, images in zip(report["steps"], [each, nobody, each, nobody, nobody, nobody, each], strict=False):
        assert step["digest"] == [whole] * 3
        assert step["images"] == images
        assert step["left"] == [[".npy"]] * 3, "one file on each disk"
    last = report["steps"][-1]
    assert last["images"] == nobody
    for told in last["digest"]:
        assert told == f"65: host-of-{b} and host-of-{c} have different images; hint: copy the same data to all hosts"
