"""`hvdtrain predict`: the outputs of evaluation, in both frameworks, whichever trained the run."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import failing, here
from PIL import Image
from test_checkpoint import Pipes, run
from test_solar_data import oahu
from twins import torch

from hvdtrain import cli, data
from hvdtrain.data.pixels import pixels
from hvdtrain.inference import runs as opening
from hvdtrain.inference import trained
from hvdtrain.solar import SolarConfig
from hvdtrain.solar import opened as opened_windows
from hvdtrain.system import exits
from hvdtrain.training.checkpoint import Checkpoints

pytestmark = pytest.mark.slow  # all tests share runs that take half a minute

FLAGS = ["--width", "0.0625", "--batch-size", "8", "--epochs", "1", "--warmup-epochs", "0", "--lr", "0.01"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog", "eel")):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            image = draw.integers(150, size=(20, 24, 3), dtype=np.uint8)
            image[..., label] += 100
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """Runs of images and of readings. `whole` has images stored as uint8 and was trained with TensorFlow, `half` has
    them as float16 and was trained with PyTorch."""
    folder, stored = tmp_path_factory.mktemp("runs"), photos.parent
    for name, dtype, framework in (("whole", "uint8", "tensorflow"), ("half", "float16", "torch")):
        kept = ["--size", "48x64", "--split", "50/20/30", "--dtype", dtype, "--workers", "1"]
        assert cli.command(["data", "images", str(photos), str(stored / name), *kept]) == 0
        flags = ["--data", str(stored / name), *FLAGS, "--framework", framework, "--run-dir", str(folder / name)]
        here("resnet", *flags)
    few = ["--epochs", "1", "--framework", "torch", "--run-dir"]
    here("solar", "--hidden", "16,8", "--batch-size", "9000", *few, str(folder / "pyramid"))
    readings = stored / "20100322.txt"
    readings.write_text(oahu(81, 600))
    assert cli.command(["data", "solar", str(readings), str(stored / "oahu")]) == 0
    here("solar", "--net", "cnn", "--data", str(stored / "oahu"), "--ahead", "10", *few, str(folder / "map"))
    return folder


# --- the run's own data and model: (raw inputs, outputs that evaluation computes from its own batches) ----------------


def first_batch(dataset: Any) -> tuple[np.ndarray, ...]:
    items = np.arange(min(9, len(dataset.test)))
    batch: tuple[np.ndarray, ...] = dataset.test.batch(items, items, None).arrays
    return batch


def raw_images(run: Path) -> np.ndarray:
    """Pixels of the test split's files: (v / 255) * 255 is within rounding of v."""
    dataset = data.load(trained.read_manifest(run).config["data"])
    return np.rint(first_batch(dataset)[0] * 255).astype(np.uint8)


def logits_of_images(run: Path, framework: str) -> list[np.ndarray]:
    opened = opening.open_run(run)
    return [opened.model(framework).outputs(first_batch(data.load(opened.manifest.config["data"]))[0])]


def windows(run: Path) -> Any:
    """The windows that a run was trained on."""
    config = trained.read_manifest(run).config
    fields = {field.name for field in dataclasses.fields(SolarConfig)}
    return opened_windows(SolarConfig(**{name: value for name, value in config.items() if name in fields}))


def raw_readings(run: Path) -> np.ndarray:
    return np.array(windows(run).test.views[windows(run).test.starts[:9]])


def forecasts(run: Path, framework: str) -> list[np.ndarray]:
    known = windows(run)
    scaled = opening.open_run(run).model(framework).outputs(first_batch(known)[0])
    return [scaled * known.about["deviation_w_m2"] + known.about["mean_w_m2"]]


@pytest.mark.parametrize("name", ["whole", "half"])
def test_predict_equals_evaluation_in_both_frameworks(
    name: str, runs: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For every file of the data set; `half` rounds pixels as its preparation did."""
    documents = []
    for framework in ("torch", "tensorflow"):
        words = ["predict", str(runs / name), *(str(photos / label) for label in ("cat", "dog", "eel"))]
        assert cli.command([*words, "--framework", framework, "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    for one, other in zip(*(document["predictions"] for document in documents), strict=True):
        assert (one["image"], one["class"]) == (other["image"], other["class"])
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
    opened = opening.open_run(runs / name)
    dataset = data.load(opened.manifest.config["data"])
    shape = opened.facts.image_shape
    by_pixels = {pixels(each["image"], shape).tobytes(): each for each in documents[0]["predictions"]}
    shares = torch.from_numpy(logits_of_images(runs / name, "torch")[0]).double().softmax(1).numpy()
    for image, row in zip(raw_images(runs / name), shares, strict=True):
        found = by_pixels[image.tobytes()]
        assert (found["class"], found["probability"]) == (
            dataset.classes[row.argmax()],
            pytest.approx(row.max(), abs=1e-6),
        )


@pytest.mark.parametrize("name", ["pyramid", "map"])
def test_forecasts_of_a_file_equal_those_of_evaluation(name: str, runs: Path, tmp_path: Path) -> None:
    rows, out = raw_readings(runs / name), tmp_path / "forecasts.csv"
    np.savetxt(tmp_path / "readings.csv", rows, delimiter=",")
    assert cli.command(["predict", str(runs / name), str(tmp_path / "readings.csv"), "--out", str(out)]) == 0
    lines = list(csv.DictReader(out.read_text().splitlines()))
    assert [int(line["line"]) for line in lines] == list(range(1, len(rows) + 1))
    found = [float(line["forecast_w_m2"]) for line in lines]
    np.testing.assert_allclose(found, forecasts(runs / name, "torch")[0][:, 0], rtol=1e-4, atol=1e-3)
    np.savetxt(tmp_path / "readings.csv", rows[:, 1:], delimiter=",")
    with failing(exits.BAD_DATA, "but the model needs"):
        cli.command(["predict", str(runs / name), str(tmp_path / "readings.csv")])


def test_predict_reports_bad_images_and_prints_the_others(
    runs: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad\x1b.png").write_text("no image")
    images = [str(photos / "cat" / "1.png"), str(tmp_path / "bad\x1b.png")]
    assert cli.command(["predict", str(runs / "half"), *images]) == exits.BAD_DATA
    out, err = capsys.readouterr()
    head, row = out.splitlines()
    assert head.split() == ["image", "class", "probability"]
    assert row.split()[0] == images[0] and row.split()[1] in ("cat", "dog", "eel")
    assert 1 / 3 < float(row.split()[2]) <= 1
    assert err.count("\n") == 1 and r"bad\x1b.png: not a JPEG" in err


@pytest.mark.parametrize("consumed", [0, 48])
def test_running_statistics_are_those_of_evaluation(consumed: int, tmp_path: Path) -> None:
    """After an evaluation (0 samples of the next epoch) all ranks have their mean, so one rank's file is enough. In an
    epoch each rank has its own."""

    def save(group: Pipes) -> None:
        own = {"buffer.mean": np.full(3, group.rank if consumed else 0.5, np.float32), "strategy.x": np.ones(9)}
        saved = Checkpoints(tmp_path, group, keep=1, identity={})
        saved.save(7, {"parameter.weight": np.ones(2, np.float32)}, own, {"consumed": consumed})

    run(2, save)
    found = trained.best_arrays(tmp_path, statistics=True)
    assert found.keys() == {"weight", "mean"} and found["mean"].tolist() == [0.5] * 3
    (tmp_path / "step-00000007" / "rank0001.safetensors").unlink()
    if consumed:
        with failing(exits.BAD_DATA, r"rank0001\.safetensors is on another host"):
            trained.best_arrays(tmp_path, statistics=True)
    else:
        assert trained.best_arrays(tmp_path, statistics=True)["mean"].tolist() == [0.5] * 3
