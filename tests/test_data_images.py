"""Folders of images: arrays against Pillow by hand, every kind of bad file, kills, full disks, damaged folders."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import LIMIT_S, fails
from PIL import Image

from hvdtrain.data.images import ImagesConfig, prepare
from hvdtrain.data.pixels import pixels
from hvdtrain.data.prepared import open_images
from hvdtrain.system.exits import BAD_CONFIG, BAD_DATA, CANNOT_WRITE, NO_PERMISSION

ROOT = os.geteuid() == 0
RUN = """
import json, signal, sys
from hvdtrain.data import images

images.CHUNK_BYTES, done, hold_at = 100_000, 0, float(sys.argv[2])

class Held(images.Progress):
    "After so many images the work stands still, until a signal comes."
    def advance(self, n, note):
        global done
        super().advance(n, note)
        done += n
        if done >= hold_at > done - n:
            print("held", flush=True)
            signal.sigwait({signal.SIGUSR1})

images.Progress = Held
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # one that comes early is not lost
try:
    print(json.dumps(images.prepare(images.ImagesConfig(**json.loads(sys.argv[1])))))
except images.Failure as failure:
    sys.exit(f"Failure: {failure} {failure.code}")
"""


def photo(seed: int = 0, size: tuple[int, int] = (60, 44)) -> Image.Image:
    """Smooth colours with some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return Image.fromarray((np.asarray(smooth) * 0.95 + rng.integers(0, 12, (size[1], size[0], 3))).astype(np.uint8))


def tree(folder: Path, classes: int = 3, each: int = 5, ending: str = "png") -> Path:
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(each):
            photo(100 * label + number).save(folder / f"class{label}" / f"{number}.{ending}")
    return folder


def config(folder: Path, **changes: Any) -> ImagesConfig:
    usual = {"source": str(folder / "in"), "destination": str(folder / "out"), "size": "20x16", "workers": 1}
    return ImagesConfig(**{**usual, "split": "60/20/20", **changes})


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# Conversion.


@pytest.mark.parametrize(("gray", "dtype"), [(True, "uint8"), (False, "float16"), (True, "float32")])
def test_the_arrays_are_what_pillow_makes_by_hand(tmp_path: Path, gray: bool, dtype: str) -> None:
    source = tree(tmp_path / "in", ending="jpg")
    prepare(config(tmp_path, gray=gray, dtype=dtype, dry_run=True))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    prepare(config(tmp_path, gray=gray, dtype=dtype))
    dataset = open_images(tmp_path / "out")
    assert dataset.image_shape == (16, 20, 1 if gray else 3) and dataset.classes == ("class0", "class1", "class2")
    by_hand: dict[bytes, int] = {}
    for path in source.rglob("*.jpg"):
        small = Image.open(path).convert("L" if gray else "RGB").resize((20, 16), Image.Resampling.BILINEAR)
        row = np.asarray(small) if dtype == "uint8" else (np.asarray(small) / 255).astype(dtype)
        by_hand[row.tobytes()] = int(path.parent.name[-1])
    parts = (dataset.train, dataset.validation, dataset.test)
    ours = {row.tobytes(): label for part in parts for row, label in zip(part.samples, part.labels, strict=True)}
    assert ours == by_hand
    assert [np.bincount(part.labels).tolist() for part in parts] == [[3, 3, 3], [1, 1, 1], [1, 1, 1]]


def test_colours_and_depths_become_eight_bits(tmp_path: Path) -> None:
    """Luma is ITU-R 601, ink becomes light, 16-bit gray is scaled, and 16-bit colour keeps its high byte."""
    path, weights = str(tmp_path / "p.tif"), [0.299, 0.587, 0.114]
    rgb = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(path)
    assert np.abs(pixels(path, (32, 32, 1))[..., 0] - rgb @ weights).max() <= 0.51
    Image.new("CMYK", (16, 16), (10, 200, 30, 40)).save(path)
    expected = [(255 - ink) * (255 - 40) / 255 for ink in (10, 200, 30)]
    assert np.abs(pixels(path, (4, 4, 3)) - expected).max() < 3
    assert np.abs(pixels(path, (4, 4, 1)) - np.dot(expected, weights)).max() < 3
    gray = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    Image.fromarray(gray).save(path)
    assert np.abs(pixels(path, (64, 64, 1))[..., 0] - gray / 257).max() <= 0.5
    wide = np.random.default_rng(0).integers(0, 65536, (8, 8, 3)).astype(">u2")
    lines = b"".join(b"\0" + line.tobytes() for line in wide)
    (tmp_path / "p.png").write_bytes(png(8, 8, depth=16, colour=2, data=lines))
    assert np.array_equal(pixels(str(tmp_path / "p.png"), (8, 8, 3)), wide >> 8)


def test_exif_orientation_turns_the_image_upright(tmp_path: Path) -> None:
    upright, exif = photo(), Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the file is to be rotated by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "p.png", exif=exif)
    assert np.array_equal(pixels(str(tmp_path / "p.png"), (44, 60, 3)), np.asarray(upright))


# Where it goes.


def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    tree(tmp_path / "in", each=20)
    outputs = {}
    for name, changes in {"a": {}, "b": {"workers": 2}, "c": {"seed": 1}}.items():
        prepare(config(tmp_path, destination=str(tmp_path / name), **changes))
        outputs[name] = contents(tmp_path / name)
    assert outputs["a"] == outputs["b"] and outputs["a"]["samples.npy"] != outputs["c"]["samples.npy"]
    assert set(outputs["a"]) == {"samples.npy", "labels.npy", "index.json"}
    labels = open_images(tmp_path / "a").train.labels
    assert len(np.unique(labels[:10])) > 1, "classes are mixed"


@pytest.mark.parametrize(
    "wrong",
    [{"size": "20"}, {"size": "0x5"}, {"split": "85/15"}, {"split": "0/50/50"}, {"dtype": "int8"}, {"workers": -1}],
)
def test_invalid_options_name_the_flag(tmp_path: Path, wrong: dict[str, Any]) -> None:
    fails(lambda: config(tmp_path, **wrong), BAD_CONFIG, f"--{next(iter(wrong)).replace('_', '-')} ")


# --- bad samples --------------------------------------------------------------------------------------------------


def png(width: int, height: int, *, depth: int = 8, colour: int = 0, data: bytes = b"") -> bytes:
    """A PNG file that Pillow would not write."""

    def piece(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)

    head = width.to_bytes(4) + height.to_bytes(4) + bytes([depth, colour, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", head) + piece(b"IDAT", zlib.compress(data)) + piece(b"IEND", b"")


def truncated(path: Path) -> None:
    photo().save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:-300])


def leaving_link(path: Path) -> None:
    outside = path.parents[2] / "outside.png"
    photo().save(outside)
    path.symlink_to(outside)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncated, "truncated"),
    "zero bytes": (lambda path: path.touch(), "empty file"),
    "no image": (lambda path: path.write_text("class,label\n"), "not a JPEG, PNG"),
    "PostScript": (lambda path: photo().save(path, "EPS"), "not a JPEG, PNG"),
    "one pixel": (lambda path: Image.new("L", (1, 1)).save(path, "PNG"), "1x1 pixels are too small"),
    "bomb": (lambda path: path.write_bytes(png(12_000, 12_000)), "decompression bomb"),
    "32 bits": (lambda path: Image.new("F", (8, 8)).save(path, "TIFF"), "32 bits"),
    "link out of the tree": (leaving_link, "leaves the tree"),
    "link to nothing": (lambda path: path.symlink_to(path.parent / "none"), "a link to no file"),
    "pipe": (os.mkfifo, "not a plain file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_sample_is_named_or_skipped(tmp_path: Path, kind: str) -> None:
    make, reason = BAD[kind]
    make(tree(tmp_path / "in") / "class1" / "bad.img")
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, "class1/bad.img", reason, "--on-bad-sample skip")
    assert not (tmp_path / "out").exists()
    summary = prepare(config(tmp_path, on_bad_sample="skip"))
    ((bad,),) = [summary["bad_samples"]]
    assert bad["file"] == "class1/bad.img" and reason in bad["reason"]
    assert summary["samples"] == 15 and summary["source"]["files"] == 16
    (tmp_path / "in" / "class1" / "bad.img").unlink()
    prepare(config(tmp_path, destination=str(tmp_path / "clean")))
    skipped, clean = contents(tmp_path / "out"), contents(tmp_path / "clean")
    assert skipped["samples.npy"] == clean["samples.npy"] and skipped["labels.npy"] == clean["labels.npy"]


def test_bad_samples_are_capped(tmp_path: Path) -> None:
    source = tree(tmp_path / "in")
    for number in range(4):
        (source / "class0" / f"bad{number}.png").touch()
    skip = {"on_bad_sample": "skip"}
    fails(lambda: prepare(config(tmp_path, **skip, max_bad_samples=3)), BAD_DATA, "4 bad samples", "class0/bad")
    assert len(prepare(config(tmp_path, **skip, max_bad_samples=4))["bad_samples"]) == 4


def test_folders_of_parts_are_the_split(tmp_path: Path) -> None:
    """Whatever --split says; also a class without validation images, and a bad sample."""
    for part, classes in (("Train", 3), ("valid", 2), ("test", 3)):
        tree(tmp_path / "in" / part, classes)
    (tmp_path / "in" / "test" / "class1" / "bad.png").touch()
    made = prepare(config(tmp_path, on_bad_sample="skip"))
    assert (made["classes"], made["split"]) == (["class0", "class1", "class2"], "the source's")
    assert made["counts"] == {"train": [5, 5, 5], "validation": [5, 5, 0], "test": [5, 5, 5]}
    prepare(config(tmp_path, source=str(tmp_path / "in" / "Train"), destination=str(tmp_path / "train"), split="1/0/0"))
    mixed, train = (np.load(tmp_path / name / "samples.npy")[:15] for name in ("out", "train"))
    assert sorted(row.tobytes() for row in mixed) == sorted(row.tobytes() for row in train)
    (tmp_path / "in" / "valid" / "class3").mkdir()
    photo().save(tmp_path / "in" / "valid" / "class3" / "0.png")
    again = config(tmp_path, destination=str(tmp_path / "again"))
    fails(lambda: prepare(again), BAD_DATA, "'class3' is not among the training images")
    (tmp_path / "in" / "val").mkdir()
    photo().save(tmp_path / "in" / "val" / "0.png")
    fails(lambda: prepare(again), BAD_DATA, "val contains no folders of classes")


PARTED: dict[str, list[int] | tuple[str, ...] | str] = {
    "Training/a Training/b Testing/a Testing/b": [4, 0, 4],
    "train/a train/b dev/a test/a test/b": [4, 2, 4],
    "seg_train/seg_train/a seg_train/seg_train/b seg_test/seg_test/a": [4, 0, 2],
    "training_set/images/a training_set/images/b test_set/images/a": [4, 0, 2],
    "train bus car": ("bus", "car", "train"),  # a class may have a part's name
    "test_tube/a test_tube beaker": ("beaker", "test_tube"),
    "a/2020/1 a/2021 b/2020": ("a", "b"),
    "a/images b/images c": ("a", "b", "c"),
    "train/a train/b test/a test/b pred": "pred is neither",
    "train/a train/b extra/a extra/b": "extra is neither",
    "train test other": "other is neither",
    "train test": "contains no folders of classes",
    "train/a train/b val/a valid/a": "val and valid are the same part",
    "first/a first/b second/a second/b": "several folders hold folders a and b",
    "a/train a/test b/train b/test": "several folders hold folders test and train",
}


@pytest.mark.parametrize("folders", PARTED)
def test_folders_are_parts_or_classes_by_what_is_in_them_or_refused(tmp_path: Path, folders: str) -> None:
    for folder in folders.split():
        (tmp_path / "in" / folder).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            photo(number).save(tmp_path / "in" / folder / f"{number}.png")
    settings, expected = config(tmp_path, dry_run=True), PARTED[folders]
    if isinstance(expected, list):
        made = prepare(settings)
        assert made["classes"] == ["a", "b"] and made["split"] == "the source's"
        assert [sum(counts) for counts in made["counts"].values()] == expected
    elif isinstance(expected, tuple):
        assert tuple(prepare(settings)["classes"]) == expected
    else:
        fails(lambda: prepare(settings), BAD_DATA, expected, "hint")


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "in")
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "class1":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    fails(lambda: prepare(config(tmp_path)), NO_PERMISSION, "class1: Permission denied")


# Interruptions, full disks, other people's folders.


def start(settings: ImagesConfig, hold_at: float = np.inf, **more: Any) -> subprocess.Popen[str]:
    """Starts preparing in a process that pauses after this number of rows."""
    words = [sys.executable, "-c", RUN, json.dumps(vars(settings)), str(hold_at)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    if hold_at < np.inf:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_killed_process_leaves_nothing_that_matters(tmp_path: Path) -> None:
    tree(tmp_path / "in", each=40)
    changes = {"workers": 2, "size": "64x64"}
    process = start(config(tmp_path, **changes), 60)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "out").exists()
    assert not psutil.wait_procs(workers, timeout=LIMIT_S)[1], "workers end with their parent"
    prepare(config(tmp_path, **changes))
    prepare(config(tmp_path, **changes, destination=str(tmp_path / "whole")))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_a_second_process_is_rejected(tmp_path: Path) -> None:
    tree(tmp_path / "in", each=20)
    process = start(config(tmp_path, size="64x64"), 1)
    fails(lambda: prepare(config(tmp_path, size="64x64")), CANNOT_WRITE, "another process is working there")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert json.loads(out)["samples"] == 60


@pytest.mark.root
def test_another_users_unfinished_work_is_rejected(tmp_path: Path) -> None:
    tree(tmp_path / "in")
    (tmp_path / ".out.unfinished" / "result").mkdir(parents=True)
    os.chown(tmp_path / ".out.unfinished", 65534, 65534)
    fails(lambda: prepare(config(tmp_path)), CANNOT_WRITE, "belongs to another user", "choose another destination")


def test_existing_folders_are_never_overwritten(tmp_path: Path) -> None:
    bad = tree(tmp_path / "in") / "class1" / "bad.png"
    bad.touch()
    fails(lambda: prepare(config(tmp_path)), BAD_DATA, "bad.png")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    prepare(config(tmp_path, on_bad_sample="skip"))
    before = contents(tmp_path / "out")
    fails(lambda: prepare(config(tmp_path)), CANNOT_WRITE, "out exists", "remove it")
    assert contents(tmp_path / "out") == before


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes acts like a full disk and needs no root."""
    tree(tmp_path / "in")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    process = start(config(tmp_path), preexec_fn=limit)
    _, said = process.communicate(timeout=LIMIT_S)
    assert said.splitlines()[-1].startswith("Failure: ") and "free some space" in said.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    tree(folder / "in")
    prepare(config(folder))
    return folder / "out"


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def pickled(folder: Path) -> None:
    size = (folder / "samples.npy").stat().st_size
    np.save(folder / "samples.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with (folder / "samples.npy").open("ab") as file:
        file.truncate(size)


def headless(folder: Path) -> None:
    with (folder / "samples.npy").open("r+b") as file:
        file.write(b"\x93NUMPY\x01\x00\x06\x00'''abc")  # an unterminated string


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda folder: (folder / "index.json").unlink(), "index.json does not exist"),
    "torn index": (lambda folder: (folder / "index.json").write_text('{"schema": '), "index.json is damaged"),
    "later schema": (lambda folder: change_index(folder, lambda i: i.update(schema="x/9")), "schema 'x/9'"),
    "other counts": (
        lambda folder: change_index(
            folder, lambda i: i["counts"]["train"].reverse() or i["counts"]["train"].__setitem__(0, 2)
        ),
        "its counts",
    ),
    "text as classes": (lambda folder: change_index(folder, lambda i: i.update(classes="abc")), "'abc'"),
    "a class twice": (
        lambda folder: change_index(folder, lambda i: i.update(classes=["a", "b", "a"])),
        "a class twice",
    ),
    "escapes": (lambda folder: change_index(folder, lambda i: i.update(classes=["a", "b", "\x1b[2J"])), r"\x1b[2J"),
    "other size": (lambda folder: change_index(folder, lambda i: i.update(width=10)), "samples.npy contains"),
    "endless": (lambda folder: change_index(folder, lambda i: i.update(samples=10**30)), "index.json is damaged"),
    "negative": (lambda folder: change_index(folder, lambda i: i["counts"]["test"].__setitem__(0, -1)), "-1"),
    "short samples": (lambda folder: os.truncate(folder / "samples.npy", 1000), "samples.npy has 1000 bytes"),
    "flipped label": (lambda folder: flip(folder / "labels.npy"), "labels.npy is damaged"),
    "pickle": (pickled, "samples.npy contains object"),
    "no head": (headless, "samples.npy is not an array (its header cannot be read)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folders_are_errors_with_the_file(prepared: Path, tmp_path: Path, kind: str) -> None:
    for path in prepared.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage, words = DAMAGE[kind]
    damage(tmp_path)
    fails(lambda: open_images(tmp_path), BAD_DATA, str(tmp_path), words)


def copied(prepared: Path, folder: Path) -> Path:
    for path in prepared.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / "samples.npy"


def test_a_host_verifies_once_and_again_when_the_file_changed(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    samples = copied(prepared, tmp_path)
    flip(samples)
    for _ in range(2):  # what failed is not remembered as good
        fails(lambda: open_images(tmp_path), BAD_DATA, "samples.npy is damaged")
    flip(samples)
    open_images(tmp_path)
    about = samples.stat()
    flip(samples)
    os.utime(samples, ns=(about.st_atime_ns, about.st_mtime_ns))  # a disk's error changes no time
    open_images(tmp_path)
    os.utime(samples)
    fails(lambda: open_images(tmp_path), BAD_DATA, "samples.npy is damaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(samples))  # without a cache it is verified each time
    fails(lambda: open_images(tmp_path), BAD_DATA, "samples.npy is damaged")


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float16"), (-0.5, "float16"), (1.01, "float32")])
def test_values_outside_0_to_1_are_refused(
    prepared: Path, tmp_path: Path, value: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right SHA-256: the index may be by the same author."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    samples = copied(prepared, tmp_path)
    images = np.load(samples).astype(dtype)
    np.save(samples, images)
    stated = {"bytes": samples.stat().st_size, "sha256": hashlib.sha256(samples.read_bytes()).hexdigest()}
    change_index(tmp_path, lambda index: index["files"].update({"samples.npy": stated}) or index.update(dtype=dtype))
    open_images(tmp_path)
    images[-1, -1, -1, -1] = value
    np.save(samples, images)
    stated["sha256"] = hashlib.sha256(samples.read_bytes()).hexdigest()
    change_index(tmp_path, lambda index: index["files"].update({"samples.npy": stated}))
    fails(lambda: open_images(tmp_path), BAD_DATA, "outside 0..1")
