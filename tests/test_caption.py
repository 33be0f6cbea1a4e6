"""The caption command on a run's folder made of real parts: checkpoint, manifest, vocabulary, pictures on disk."""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import alone, failing
from PIL import Image

from hvdtrain import records
from hvdtrain.captioning import Captions
from hvdtrain.captions import command as captions
from hvdtrain.captions import frozen
from hvdtrain.captions.dataset import CaptionDataset
from hvdtrain.captions.generation import write
from hvdtrain.captions.load import load
from hvdtrain.comm.world import World
from hvdtrain.data.pixels import pixels
from hvdtrain.models.captioner import CaptionerSpec, initial_state
from hvdtrain.models.vgg16 import random_weights
from hvdtrain.records.arrays_file import Arrays
from hvdtrain.system.exits import BAD_DATA, CANNOT_WRITE, OK, USAGE, Failure
from hvdtrain.training import trained
from hvdtrain.training.checkpoint import Checkpoints

BEST, LAST = 1, 2  # seeds of the parameters in the two checkpoints


@functools.cache
def shapes() -> CaptionDataset:
    return load("shapes")


def weights(spec: CaptionerSpec, seed: int) -> Arrays:
    """Parameters that write of different pictures different captions of many lengths."""
    state: Arrays = dict(initial_state(spec, seed))
    for name, factor in {"words.weight": 12, "embedding.weight": 12, "image.weight": 3}.items():
        if name in state:
            state[name] *= np.float32(factor)
    return state


def make_run(folder: Path, spec: CaptionerSpec, **model: Any) -> Path:
    """As hvdtrain.captioning leaves it: a best checkpoint and a later one that is not."""
    dataset = shapes()
    group = World("torch")
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
    """A folder of scenes as files of several formats, a text beside them, and one JPEG cut off."""
    folder = tmp_path / "photos"
    folder.mkdir()
    scenes = shapes().test.inputs[40:44]
    for name, scene in zip(["a.png", "b.bmp", "c <b>&amp;.PNG", "d.webp"], scenes, strict=True):
        Image.fromarray(scene).resize((200, 100)).save(folder / name, lossless=True)
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden").mkdir()
    return folder


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
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


@pytest.mark.parametrize("beam", [1, 4])
def test_a_split_is_captioned_with_the_best_checkpoint(
    run: Path, spec: CaptionerSpec, told: Callable[..., tuple[int, Any, str]], beam: int
) -> None:
    split = shapes().validation
    code, document, _ = told("--run", run, "--split", "validation", "--limit", 9, "--beam", beam)
    assert code == OK
    assert document["schema"] == "hvdtrain/captions/1"
    assert document["problems"] == []
    found = [each["caption"] for each in document["captions"]]
    assert found == expected(spec, split.inputs[:9], beam)
    assert found != expected(spec, split.inputs[:9], beam, LAST)
    assert len(set(found)) > 3, "the model is too dull to tell right from wrong"
    assert [each["picture"] for each in document["captions"]] == list(split.names[:9])
    assert [tuple(each["references"]) for each in document["captions"]] == list(split.references[:9])


def test_either_framework_writes_the_same(run: Path, told: Callable[..., tuple[int, Any, str]]) -> None:
    flags = ["--run", str(run), "--split", "test", "--limit", "12"]
    _, torch, _ = told(*flags, "--framework", "torch")
    _, tensorflow, _ = told(*flags, "--framework", "tensorflow")
    assert tensorflow == torch | {"framework": "tensorflow"}
    assert torch["framework"] == "torch"
    assert len(torch["captions"]) == 12


def test_a_folder_stands_for_the_pictures_in_it(
    run: Path, spec: CaptionerSpec, photos: Path, told: Callable[..., tuple[int, Any, str]]
) -> None:
    names = ["a.png", "b.bmp", "c <b>&amp;.PNG", "d.webp"]
    code, document, _ = told(photos, photos / "b.bmp", "--run", run, "--beam", 2)
    assert code == OK
    assert [Path(each["picture"]).name for each in document["captions"]] == [*names, "b.bmp"]
    seen = np.stack([pixels(str(photos / name), (64, 64, 3)) for name in [*names, "b.bmp"]])
    assert [each["caption"] for each in document["captions"]] == expected(spec, seen, 2)
    assert not any(each["references"] for each in document["captions"])


def test_bad_pictures_are_named_and_the_others_captioned(
    run: Path, photos: Path, told: Callable[..., tuple[int, Any, str]]
) -> None:
    whole = (photos / "a.png").read_bytes()
    (photos / "e.png").write_bytes(whole[: len(whole) // 2])
    (photos / "f.jpg").write_bytes(b"")
    (photos / "g.gif").write_text("<html>")
    os.mkfifo(photos / "pipe")
    empty = photos / "empty"
    empty.mkdir()
    code, document, err = told(photos, photos / "gone.jpg", photos / "pipe", empty, "--run", run)
    assert code == BAD_DATA
    assert len(document["captions"]) == 4
    problems = {Path(each["picture"]).name: each["problem"] for each in document["problems"]}
    assert set(problems) == {"e.png", "f.jpg", "g.gif", "gone.jpg", "pipe", "empty"}
    assert "No such file" in problems["gone.jpg"]
    assert "not a plain file" in problems["pipe"]
    for name in problems:
        assert len([line for line in err.splitlines() if f"{name}: " in line]) == 1
    code, document, _ = told(photos / "gone.jpg", "--run", run, "--html")
    assert (code, document["captions"], document["html"]) == (BAD_DATA, [], None)


class Sheet(HTMLParser):
    """What a browser would see: pictures, texts, and everything that refers to anything."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pictures: list[tuple[bytes, str]] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.tags.append(tag)
        if tag == "img":
            kind, _, data = (about["src"] or "").partition(",")
            assert kind == "data:image/jpeg;base64"
            self.pictures.append((base64.b64decode(data), about["alt"] or ""))
        self.references += [value or "" for name, value in attrs if name in ("href", "src") and tag != "img"]

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def test_the_contact_sheet_holds_everything_in_itself_and_escapes_it(
    run: Path, photos: Path, told: Callable[..., tuple[int, Any, str]]
) -> None:
    code, document, err = told(photos, "--run", run, "--html")
    assert code == OK
    assert document["html"] == str(run / "captions.html")
    assert f"contact sheet: {run / 'captions.html'}" in err
    page = (run / "captions.html").read_text()
    sheet = Sheet(page)
    assert sheet.references == []
    assert not re.search(r"https?://|url\(|@import", page)
    assert not {"script", "link", "b", "iframe"} & set(sheet.tags)
    assert "c <b>&amp;.PNG" in sheet.text
    for (jpeg, alt), each in zip(sheet.pictures, document["captions"], strict=True):
        with Image.open(io.BytesIO(jpeg)) as image:
            assert image.format == "JPEG"
            assert image.size == (200, 100), "the proportions of the file, not of the model's input"
        assert alt == each["caption"]


def test_the_contact_sheet_of_a_split_shows_references(run: Path, told: Callable[..., tuple[int, Any, str]]) -> None:
    _, document, _ = told("--run", run, "--split", "test", "--limit", 3, "--html")
    sheet = Sheet((run / "captions.html").read_text())
    assert len(sheet.pictures) == 3
    for each in document["captions"]:
        assert all(sentence in sheet.text for sentence in each["references"])


def test_turned_photographs_are_upright_in_the_sheet(
    run: Path, tmp_path: Path, told: Callable[..., tuple[int, Any, str]]
) -> None:
    photo, exif = Image.new("RGB", (800, 400), "red"), Image.Exif()
    exif[0x0112] = 6
    photo.save(tmp_path / "turned.jpg", exif=exif)
    told(tmp_path / "turned.jpg", "--run", run, "--html")
    ((jpeg, _),) = Sheet((run / "captions.html").read_text()).pictures
    with Image.open(io.BytesIO(jpeg)) as image:
        assert image.size == (160, 320)


def test_a_table_has_a_line_for_each_picture(run: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert captions.main([str(photos), "--run", str(run)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["picture", "caption"]
    assert [line.startswith(str(photos)) for line in lines[1:]] == [True] * 4
    column = lines[0].index("caption")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)


def test_vgg16_needs_the_weights_that_it_was_trained_with(
    tmp_path: Path, words: int, photos: Path, told: Callable[..., tuple[int, Any, str]]
) -> None:
    from safetensors.numpy import save_file

    from hvdtrain.models import vgg16_weights
    from hvdtrain.models.vgg16_torch import Vgg16Torch

    arrays = random_weights(0)  # those that --weights random stands for
    save_file(arrays, tmp_path / "published.safetensors")
    config = vgg16_weights.Vgg16Config(
        source=str(tmp_path / "published.safetensors"), destination=str(tmp_path / "vgg16.safetensors")
    )
    vgg16_weights.import_weights(config)
    (tmp_path / "published.safetensors").unlink()
    _, preprocessing, digest = vgg16_weights.open_weights(tmp_path / "vgg16.safetensors")
    spec = CaptionerSpec(vocabulary=words, encoder="vgg16", image_size=(224, 224), embedding=24, hidden=32)
    run = make_run(tmp_path / "run", spec, encoder=digest, weights=str(tmp_path / "vgg16.safetensors"))
    files = [photos / "a.png", photos / "b.bmp"]
    seen = np.stack([pixels(str(path), (224, 224, 3)) for path in files])
    wanted = expected(spec, Vgg16Torch(arrays, preprocessing)(seen), 3)
    _, document, _ = told(*files, "--run", run)
    assert [each["caption"] for each in document["captions"]] == wanted
    (tmp_path / "vgg16.safetensors").rename(tmp_path / "moved.safetensors")
    with failing(BAD_DATA, r"vgg16\.safetensors"):
        captions.main([str(files[0]), "--run", str(run)])
    other = make_run(tmp_path / "other", spec, encoder=frozen.RANDOM, weights=frozen.RANDOM)
    assert [each["caption"] for each in told(*files, "--run", other)[1]["captions"]] == wanted
    with pytest.raises(Failure, match="not the weights"):
        captions.main([str(files[0]), "--run", str(other), "--weights", str(tmp_path / "moved.safetensors")])


def test_without_an_encoder_all_pictures_have_one_caption(
    tmp_path: Path, words: int, photos: Path, told: Callable[..., tuple[int, Any, str]]
) -> None:
    spec = CaptionerSpec(vocabulary=words, encoder="none", embedding=24, hidden=32)
    _, document, _ = told(photos, "--run", make_run(tmp_path / "run", spec))
    assert len({each["caption"] for each in document["captions"]}) == 1


# --- what a user can get wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--run", "RUN"],
        ["photo.jpg", "--run", "RUN", "--split", "test"],
        ["photo.jpg"],
        ["photo.jpg", "--run", "RUN", "--beam", "0"],
        ["--run", "RUN", "--split", "test", "--limit", "none"],
    ],
)
def test_wrong_usage_is_refused(flags: list[str]) -> None:
    with failing(USAGE, r"\(see hvdtrain caption --help\)$"):
        captions.main(flags)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no such folder": shutil.rmtree,
    "manifest.json": lambda run: (run / "manifest.json").unlink(),
    "no manifest of a run of hvdtrain.captioning": lambda run: (run / "manifest.json").write_text(
        (run / "manifest.json").read_text().replace('"workload": "captioning"', '"workload": "resnet"')
    ),
    "not of this version": lambda run: (run / "manifest.json").write_text(
        (run / "manifest.json").read_text().replace('"hidden"', '"width"')
    ),
    "vocabulary.json: No such file": lambda run: (run / "vocabulary.json").unlink(),
    "vocabulary.json: no JSON": lambda run: (run / "vocabulary.json").write_text('{"schema"'),
    "vocabulary.json": lambda run: (run / "vocabulary.json").write_text("{}"),
    "no valid checkpoint": lambda run: shutil.rmtree(run / "checkpoints"),
    "not of one model": lambda run: (run / "manifest.json").write_text(
        (run / "manifest.json").read_text().replace('"hidden": 32', '"hidden": 33')
    ),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_damaged_run_is_named(run: Path, tmp_path: Path, photos: Path, said: str) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    DAMAGE[said](copy)
    with pytest.raises(Failure, match=re.escape(said)) as failure:
        captions.main([str(photos), "--run", str(copy)])
    assert str(copy) in str(failure.value)
    assert failure.value.code in (BAD_DATA, 74)
    assert "\n" not in str(failure.value)


def test_a_damaged_best_checkpoint_is_not_used(run: Path, tmp_path: Path, spec: CaptionerSpec, told: Any) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    file = copy / "checkpoints" / "step-00000010" / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    _, document, _ = told("--run", copy, "--split", "test", "--limit", 5)
    found = [each["caption"] for each in document["captions"]]
    assert found == expected(spec, shapes().test.inputs[:5], 3, LAST)


def test_a_sheet_that_cannot_be_written_is_told(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("captions.html")))
    (copy / "captions.html").mkdir()
    with failing(CANNOT_WRITE, r"captions\.html"):
        captions.main(["--run", str(copy), "--split", "test", "--limit", "2", "--html"])
    assert sorted(path.name for path in copy.iterdir()) == [
        "captions.html",
        "checkpoints",
        "manifest.json",
        "vocabulary.json",
    ]


def test_help_starts_with_the_purpose_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        captions.main(["--help"])
    assert ended.value.code == OK
    text = capsys.readouterr().out
    assert text.startswith("Caption pictures with a model that a run has trained")
    assert text.index("examples:") < text.index("options:")
    assert alone("captioning", "caption", "--help").stdout == text
