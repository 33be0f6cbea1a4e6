"""`hvdtrain predict` of a captioning run, on a run folder with real checkpoints and vocabulary, and on image files."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import failing
from PIL import Image

from hvdtrain import records
from hvdtrain.captioning import Captions
from hvdtrain.captions import features
from hvdtrain.captions.dataset import CaptionDataset
from hvdtrain.captions.generation import write
from hvdtrain.captions.prepared import load
from hvdtrain.comm.world import connect
from hvdtrain.data.pixels import pixels
from hvdtrain.inference import command as captions
from hvdtrain.inference import trained
from hvdtrain.models.captioner import CaptionerSpec, initial_state
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system.exits import BAD_DATA, OK, USAGE, Failure
from hvdtrain.training.checkpoint import Checkpoints

BEST, LAST = 1, 2  # seeds of the parameters in the two checkpoints


@functools.cache
def shapes() -> CaptionDataset:
    return load("shapes")


def weights(spec: CaptionerSpec, seed: int) -> Arrays:
    """Parameters that write different captions of many lengths for different images."""
    state: Arrays = dict(initial_state(spec, seed))
    for name, factor in {"words.weight": 12, "embedding.weight": 12, "image.weight": 3}.items():
        if name in state:
            state[name] *= np.float32(factor)
    return state


def make_run(folder: Path, spec: CaptionerSpec, **model: Any) -> Path:
    """A run folder like that of hvdtrain.captioning, with a best checkpoint and a later one."""
    dataset = shapes()
    group = connect("torch")
    saved = Checkpoints(folder / "checkpoints", group, keep=2, identity={"workload": "captioning"})
    for step, seed in ((10, BEST), (20, LAST)):
        shared = {f"parameter.{name}": array for name, array in weights(spec, seed).items()}
        shared |= {f"momentum.{name}": array for name, array in weights(spec, 9).items()}
        saved.save(step, shared, {}, {}, best=seed == BEST)
    manifest = records.Manifest(
        workload="captioning",
        started_utc=records.utc_now(),
        argv=[],
        config={"data": "shapes", "weights": model.pop("weights", None)},
        plan={},
        data={},
        model={"name": "captioner", "spec": dataclasses.asdict(spec), **model},
        ranks=[],
        backend="none",
        metric=Captions().as_json(),
        versions={},
        git_commit=None,
    )
    records.write_document(folder / "manifest.json", records.as_json(manifest))
    (folder / "vocabulary.json").write_text(json.dumps(dataset.vocabulary.as_json()))
    return folder


@pytest.fixture(scope="module")
def words() -> int:
    return len(shapes().vocabulary)


@pytest.fixture(scope="module")
def spec(words: int) -> CaptionerSpec:
    return CaptionerSpec(vocabulary=words, encoder="small", embedding=24, hidden=32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, spec: CaptionerSpec) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), spec)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with scenes as files of several formats, a text file and a hidden folder."""
    folder = tmp_path / "photos"
    folder.mkdir()
    scenes = shapes().test.inputs[40:44]
    for name, scene in zip(["a.png", "b.bmp", "c <b>&amp;.PNG", "d.webp"], scenes, strict=True):
        Image.fromarray(scene).resize((200, 100)).save(folder / name, lossless=True)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    return folder


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Runs the command in this process with --json: exit code, document, standard error."""

    def command(*arguments: object) -> tuple[int, Any, str]:
        code = captions.main([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return command


def expected(spec: CaptionerSpec, seen: np.ndarray, beam: int, seed: int = BEST) -> list[str]:
    from hvdtrain.models.captioner_torch import CaptionerTorch

    model = CaptionerTorch(spec)
    trained.fill(model, weights(spec, seed), "torch")
    vocabulary = shapes().vocabulary
    return [vocabulary.decode(ids) for ids in write(model, seen, beam=beam)]


def test_a_split_is_captioned_with_the_best_checkpoint(
    run: Path, spec: CaptionerSpec, run_command: Callable[..., tuple[int, Any, str]]
) -> None:
    split, beam = shapes().validation, 4
    code, document, _ = run_command(run, "--split", "validation", "--beam", beam)
    assert code == OK
    assert document["schema"] == "hvdtrain/predictions/2"
    assert document["problems"] == []
    found = [caption["caption"] for caption in document["predictions"]]
    assert found == expected(spec, split.inputs[:24], beam)
    assert found != expected(spec, split.inputs[:24], beam, LAST)
    assert len(set(found)) > 3, "the model's captions must differ"
    assert [caption["image"] for caption in document["predictions"]] == list(split.names[:24])
    assert [tuple(caption["references"]) for caption in document["predictions"]] == list(split.references[:24])


def test_both_frameworks_write_the_same_captions(run: Path, run_command: Callable[..., tuple[int, Any, str]]) -> None:
    flags = [str(run), "--split", "test"]
    _, torch, _ = run_command(*flags, "--framework", "torch")
    _, tensorflow, _ = run_command(*flags, "--framework", "tensorflow")
    assert tensorflow == torch | {"framework": "tensorflow"}
    assert torch["framework"] == "torch"
    assert len(torch["predictions"]) == 24


def test_a_folder_stands_for_the_images_in_it(
    run: Path, spec: CaptionerSpec, photos: Path, run_command: Callable[..., tuple[int, Any, str]]
) -> None:
    names = ["a.png", "b.bmp", "c <b>&amp;.PNG", "d.webp"]
    code, document, _ = run_command(run, photos, photos / "b.bmp", "--beam", 2)
    assert code == OK
    assert [Path(caption["image"]).name for caption in document["predictions"]] == [*names, "b.bmp"]
    seen = np.stack([pixels(str(photos / name), (64, 64, 3)) for name in [*names, "b.bmp"]])
    assert [caption["caption"] for caption in document["predictions"]] == expected(spec, seen, 2)
    assert not any(caption["references"] for caption in document["predictions"])


def test_bad_images_are_reported_and_the_others_captioned(
    run: Path, photos: Path, run_command: Callable[..., tuple[int, Any, str]]
) -> None:
    whole = (photos / "a.png").read_bytes()
    (photos / "e.png").write_bytes(whole[: len(whole) // 2])
    (photos / "f.jpg").write_bytes(b"")
    (photos / "g.gif").write_text("<html>")
    os.mkfifo(photos / "pipe")
    empty = photos / "empty"
    empty.mkdir()
    code, document, err = run_command(run, photos, photos / "gone.jpg", photos / "pipe", empty)
    assert code == BAD_DATA
    assert len(document["predictions"]) == 4
    problems = {Path(problem["image"]).name: problem["problem"] for problem in document["problems"]}
    assert set(problems) == {"e.png", "f.jpg", "g.gif", "gone.jpg", "pipe", "empty"}
    assert "No such file" in problems["gone.jpg"]
    assert "not a plain file" in problems["pipe"]
    for name in problems:
        assert len([line for line in err.splitlines() if f"{name}: " in line]) == 1
    code, document, _ = run_command(run, photos / "gone.jpg")
    assert (code, document["predictions"]) == (BAD_DATA, [])


def test_vgg16_needs_the_weights_that_it_was_trained_with(tmp_path: Path, words: int, photos: Path) -> None:
    spec = CaptionerSpec(vocabulary=words, encoder="vgg16", image_size=(224, 224), embedding=24, hidden=32)
    run = make_run(tmp_path / "run", spec, encoder="0" * 64, weights=features.RANDOM)
    arguments = [str(run), str(photos / "a.png")]
    with failing(BAD_DATA, "does not contain the weights that the run was trained with"):
        captions.main(arguments)
    with failing(BAD_DATA, r"moved\.safetensors: No such file"):
        captions.main([*arguments, "--weights", str(tmp_path / "moved.safetensors")])


# --- what a user can get wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["RUN"],
        ["RUN", "photo.jpg", "--split", "test"],
        ["RUN", "photo.jpg", "--beam", "0"],
        ["RUN", "photo.jpg", "--score"],
    ],
)
def test_wrong_usage_is_an_error(flags: list[str], run: Path) -> None:
    with failing(USAGE, r"\(see hvdtrain predict --help\)$"):
        captions.main([str(run), *flags[1:]])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "does not exist": shutil.rmtree,
    "saved by another version": lambda run: (run / "manifest.json").write_text(
        (run / "manifest.json").read_text().replace('"hidden"', '"width"')
    ),
    "vocabulary.json: No such file": lambda run: (run / "vocabulary.json").unlink(),
    "vocabulary.json": lambda run: (run / "vocabulary.json").write_text("{}"),
    "no valid checkpoint": lambda run: shutil.rmtree(run / "checkpoints"),
    "do not belong to the same model": lambda run: (run / "manifest.json").write_text(
        (run / "manifest.json").read_text().replace('"hidden": 32', '"hidden": 33')
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_run_is_an_error(run: Path, tmp_path: Path, photos: Path, message: str) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    DAMAGE[message](copy)
    with pytest.raises(Failure, match=re.escape(message)) as failure:
        captions.main([str(copy), str(photos)])
    assert str(copy) in str(failure.value)
    assert failure.value.code in (BAD_DATA, 74)


def test_a_damaged_best_checkpoint_is_not_used(
    run: Path, tmp_path: Path, spec: CaptionerSpec, run_command: Any
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    file = copy / "checkpoints" / "step-00000010" / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    _, document, _ = run_command(copy, "--split", "test")
    found = [caption["caption"] for caption in document["predictions"]]
    assert found == expected(spec, shapes().test.inputs[:24], 3, LAST)
