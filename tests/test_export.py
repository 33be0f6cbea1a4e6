"""`hvdtrain export` and `hvdtrain predict`: every format, loaded without hvdtrain, gives the outputs of the
run's own model, whichever framework trained it."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT_S, PROGRAMS, failing, finished, here
from PIL import Image
from safetensors import safe_open
from test_caption import make_run, shapes
from test_checkpoint import Pipes, run
from test_solar_data import oahu
from twins import torch

from hvdtrain import cli, data, models
from hvdtrain.captions.generation import write
from hvdtrain.data import tabular
from hvdtrain.data.pixels import pixels
from hvdtrain.data.solar import SIDE
from hvdtrain.export import arrays, source, torch_program
from hvdtrain.inference import runs as opening
from hvdtrain.inference import trained
from hvdtrain.models import solar as nets
from hvdtrain.models.captioner import CaptionerSpec
from hvdtrain.solar import SolarConfig
from hvdtrain.solar import opened as opened_windows
from hvdtrain.system import exits
from hvdtrain.training.checkpoint import Checkpoints

pytest.importorskip("onnxruntime", reason="pip install 'hvdtrain[export]'")
pytestmark = pytest.mark.slow  # all tests share runs that take a minute

WORDS = 4
"""Words of captions here: a model's graph has a part for each word, and 34 take a minute to convert"""
ENDINGS = {"torch": "pt2", "onnx": "onnx"}
FORMATS = {
    "whole": ("onnx",),
    "half": ("torch",),
    "pyramid": ("torch",),
    "map": ("onnx",),
}
"""Of the runs that are not exported in every format"""
PAUSED = """
import signal
from hvdtrain import cli
from hvdtrain.export import arrays

def paused(source, path):
    path.write_text("half")
    print("writing", flush=True)
    signal.pause()

arrays.save_arrays = paused
cli.main()
"""
LIMITS = {"torch": 1e-6, "onnx": 1e-4}
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
    """Runs of all workloads. `whole` has images stored as uint8 and was trained with TensorFlow, `half` as float16
    with PyTorch."""
    folder, stored = tmp_path_factory.mktemp("runs"), photos.parent
    for name, dtype, framework in (("whole", "uint8", "tensorflow"), ("half", "float16", "torch")):
        kept = ["--size", "48x64", "--split", "50/20/30", "--dtype", dtype, "--workers", "1"]
        assert cli.command(["data", "images", str(photos), str(stored / name), *kept]) == 0
        flags = ["--data", str(stored / name), *FLAGS, "--framework", framework, "--run-dir", str(folder / name)]
        here("resnet", *flags)
    here("tabular", "--data", "wine", "--epochs", "2", "--framework", "tensorflow", "--run-dir", str(folder / "wine"))
    few = ["--epochs", "1", "--framework", "torch", "--run-dir"]
    here("solar", "--hidden", "16,8", "--batch-size", "9000", *few, str(folder / "pyramid"))
    readings = stored / "20100322.txt"
    readings.write_text(oahu(81, 600))
    assert cli.command(["data", "solar", str(readings), str(stored / "oahu")]) == 0
    here("solar", "--net", "cnn", "--data", str(stored / "oahu"), "--ahead", "10", *few, str(folder / "map"))
    make_run(
        folder / "captions", CaptionerSpec(vocabulary=len(shapes().vocabulary), encoder="small", embedding=8, hidden=16)
    )
    return folder


@pytest.fixture(scope="module")
def exported(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported runs with raw inputs, and the outputs of each library: see programs/exported.py."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        for module in (source, torch_program):
            patch.setattr(module, "WORDS_LIMIT", WORDS)
        for name, (raw, _) in KNOWN.items():
            np.save(folder / f"{name}.npy", raw(runs / name))
            for to in FORMATS.get(name, ENDINGS):
                out = folder / f"{name}.{ENDINGS[to]}"
                assert cli.command(["export", str(runs / name), "--to", to, "-o", str(out)]) == 0
    done = finished([sys.executable, "-P", PROGRAMS / "exported.py", folder], cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
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


def table(run: Path) -> Any:
    return tabular.load(trained.read_manifest(run).config["data"])


def raw_rows(run: Path) -> np.ndarray:
    split = table(run).test
    return np.array(split.features[split.rows[:9]])


def logits_of_rows(run: Path, framework: str) -> list[np.ndarray]:
    return [opening.open_run(run).model(framework).outputs(first_batch(table(run))[0])]


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


def scenes(run: Path) -> np.ndarray:
    return np.array(shapes().test.inputs[:9])


def greedy(run: Path, framework: str) -> list[np.ndarray]:
    writer = opening.open_run(run).model(framework)
    found = np.zeros((9, WORDS), np.int64)
    ended = write(writer, scenes(run), beam=1, words_limit=40)
    for row, words in zip(found, ended, strict=True):
        whole = [*words, 2][:WORDS]
        row[: len(whole)] = whole
    return [found]


Raw = Callable[[Path], np.ndarray]
KNOWN: dict[str, tuple[Raw, Callable[[Path, str], list[np.ndarray]]]] = {
    "whole": (raw_images, logits_of_images),
    "half": (raw_images, logits_of_images),
    "wine": (raw_rows, logits_of_rows),
    "pyramid": (raw_readings, forecasts),
    "map": (raw_readings, forecasts),
    "captions": (scenes, greedy),
}


@pytest.mark.parametrize("name", KNOWN)
def test_every_format_gives_the_outputs_of_evaluation(name: str, runs: Path, exported: Path) -> None:
    """Loaded in a process that cannot import hvdtrain; both frameworks' own models give the same outputs too."""
    own = {framework: KNOWN[name][1](runs / name, framework) for framework in ("torch", "tensorflow")}
    for library in FORMATS.get(name, ENDINGS):
        limit = LIMITS[library]
        with np.load(exported / f"{name}.{ENDINGS[library]}.npz") as found:
            for number, output in enumerate(own["torch"]):
                actual = found[f"arr_{number}"]
                assert actual.dtype == output.dtype and actual.shape == output.shape
                np.testing.assert_allclose(actual, output, rtol=limit, atol=limit * np.abs(output).max())
            about = json.loads(str(found["about"]))
            assert about["schema"] == "hvdtrain/model/1" and about["preprocessing"]["inside_the_model"]
    for one, other in zip(*own.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_logits_of_captions_are_alike_in_all_formats(exported: Path) -> None:
    """The highest logit of each word, which is the logit of the word that was written."""
    loaded = [np.load(exported / f"captions.{ending}.npz") for ending in ENDINGS.values()]
    words, logits = loaded[0]["arr_0"], loaded[0]["arr_1"]
    for other in loaded[1:]:
        np.testing.assert_allclose(other["arr_1"], logits, rtol=1e-4, atol=1e-4 * np.abs(logits).max())
    possible = logits.copy()
    possible[..., [0, 1, 3]] = -np.inf
    assert (possible.argmax(-1) == words)[words != 0].all() and len(np.unique(words)) > 3


def test_stacked_readings_are_a_window_per_row() -> None:
    """The CNN of a single station, from 99 consecutive readings."""
    spec = nets.CNNSpec()
    readings = np.random.default_rng(0).uniform(0, 900, (2, 2 * SIDE - 1)).astype(np.float32)
    about = {"mean": 300.0, "deviation": 200.0, "look": "stack"}
    made = source.Source(
        workload="solar",
        spec=spec,
        arrays=nets.initial_state(spec, 1),
        input=source.Tensor(name="readings", shape=(2 * SIDE - 1,), dtype="float32", meaning=""),
        outputs=(),
        preprocessing=about,
        labels={},
        made={},
    )
    network = models.network("solar.CNN", "torch", spec)
    trained.fill(network, made.arrays, "torch")
    stacked = np.lib.stride_tricks.sliding_window_view((readings - np.float32(300)) / np.float32(200), SIDE, axis=1)
    with torch.no_grad():
        known = network.eval()(torch.from_numpy(stacked.copy())).numpy() * 200 + 300
        np.testing.assert_allclose(torch_program.model(made)(torch.from_numpy(readings)), known, rtol=1e-6)


def test_safetensors_hold_the_state_of_pytorch_s_model(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert cli.command(["export", str(runs / "whole"), "--to", "safetensors", "-o", str(out)]) == 0
    opened = opening.open_run(runs / "whole")
    with safe_open(out, "pt") as file:
        model = models.network("resnet.ResNet", "torch", opened.spec)
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        about = json.loads(file.metadata()["hvdtrain"])
    raw = raw_images(runs / "whole")
    assert about["preprocessing"] == {"inside_the_model": False, "operation": "pixels / 255", "scale": 1 / 255}
    found = model.outputs(raw.astype(np.float32) * np.float32(about["preprocessing"]["scale"]))
    np.testing.assert_allclose(found, logits_of_images(runs / "whole", "torch")[0], atol=1e-6)
    assert about["classes"] == ["cat", "dog", "eel"] and about["spec"] == dataclasses.asdict(opened.spec)


def test_json_says_what_was_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(runs / "half"), "--to", "safetensors", "-o"]
    assert cli.command([*words, str(tmp_path / "one"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["format"], document["classes"]) == (
        "hvdtrain/export/1",
        "safetensors",
        ["cat", "dog", "eel"],
    )
    assert document["bytes"] == (tmp_path / "one").stat().st_size
    assert (document["input"]["shape"], document["input"]["dtype"]) == (["batch", 64, 48, 3], "uint8")
    assert cli.command([*words, str(tmp_path / "two")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "images uint8 (batch, 64, 48, 3) -> logits float32 (batch, 3), 3 classes" in line


def test_a_failed_export_changes_nothing(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")

    def export(run: str, to: str, out: Path) -> Callable[[], object]:
        return lambda: cli.command(["export", str(runs / run), "--to", to, "-o", str(out)])

    os.mkfifo(tmp_path / "pipe")
    for call, code, text in [
        (export("whole", "torch", tmp_path / "kept"), exits.CANNOT_WRITE, "kept exists; hint: remove it"),
        (export("whole", "torch", tmp_path / "link"), exits.CANNOT_WRITE, "link exists"),
        (export("whole", "onnx", tmp_path / "pipe"), exits.CANNOT_WRITE, "pipe exists"),
        (export("whole", "torch", tmp_path / "kept" / "x"), exits.CANNOT_WRITE, "Not a directory"),
        (export("none", "torch", tmp_path / "x"), exits.BAD_DATA, "does not exist"),
    ]:
        with failing(code, text):
            call()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    with failing(exits.UNREACHABLE, r"needs the package onnxscript; hint: pip install 'hvdtrain\[export\]'"):
        export("whole", "onnx", tmp_path / "x")()
    monkeypatch.undo()
    written = arrays.save_arrays

    def full(*arguments: Any) -> None:
        written(*arguments)
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(arrays, "save_arrays", full)
    with failing(exits.IO_ERROR, "No space left on device; hint: free some space"):
        export("pyramid", "safetensors", tmp_path / "x")()
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "link", "pipe"}
    assert (tmp_path / "kept").read_text() == "mine"
    words = [sys.executable, "-c", PAUSED, "export", str(runs / "wine"), "--to", "safetensors", "-o", tmp_path / "x"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        process.terminate()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "link", "pipe"}


def test_models_that_cannot_be_exported_are_one_line(runs: Path, tmp_path: Path) -> None:
    spec = CaptionerSpec(vocabulary=len(shapes().vocabulary), encoder="none", embedding=8, hidden=16)
    make_run(tmp_path / "words", spec)
    with failing(exits.BAD_CONFIG, "its model uses no images"):
        source.open_run(tmp_path / "words")
    for name in ("half", "map"):
        shutil.copytree(runs / name, tmp_path / name)

    def forged(name: str, part: str | None, values: Any) -> None:
        document = json.loads((runs / name / "manifest.json").read_text())
        (document if part is None else document[part]).update(values)
        (tmp_path / name / "manifest.json").write_text(json.dumps(document))
        source.open_run(tmp_path / name)

    with failing(exits.BAD_CONFIG, "is a run of 'mine', whose model hvdtrain does not know"):
        forged("half", None, {"workload": "mine"})
    for name, part, values in [
        ("half", "data", {"image_shape": [40000, 40000, 3]}),
        ("half", "data", {"image_shape": [-1, 64, 3]}),
        ("half", "data", {"image_shape": "abc"}),
        ("half", "data", {"pixel_dtype": "__class__"}),
        ("half", "data", {"class_names": [0, 1, 2]}),
        ("half", "data", {"class_names": "abc"}),
        ("half", "data", {"class_names": None}),
        ("half", "model", {"spec": {"width": "x"}}),
        ("half", "model", {"spec": {"width": 1e9}}),
        ("half", "model", {"spec": None}),
        ("map", "data", {"look": "__class__"}),
        ("map", "data", {"places": []}),
        ("map", "data", {"places": [["x", 0]]}),
        ("map", "data", {"deviation_w_m2": 0}),
        ("map", "data", {"step_s": "1"}),
        ("map", "config", {"ahead": [10]}),
    ]:
        with failing(exits.BAD_DATA, f"{name}/manifest.json: "):
            forged(name, part, values)


# --- predict ----------------------------------------------------------------------------------------------------------


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
