"""`python -m hvdtrain.captioning` as users start it: on drawn scenes, and on a folder of photographs like Flickr8k."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import document, here, launch, trainings
from PIL import Image
from runs import cut_off, read_run
from sklearn.datasets import load_sample_image
from test_resnet_train import assert_same_arrays, newest_arrays

from hvdtrain import cli
from hvdtrain.captions import shapes
from hvdtrain.captions.shapes import Group, Scene
from hvdtrain.inference.runs import open_run

FRAMEWORKS = ("torch", "tensorflow")
CUT = 15
"""Step of the checkpoint from which runs resume, of 24 in two epochs"""
TINY = ["--encoder", "small", "--hidden", "32", "--embedding", "32", "--beam", "2"]
PLACES = ("at the top", "above the middle", "in the middle", "below the middle", "at the bottom")
SIDES = ("far left", "left", "centre", "right", "far right")


def captioning(ranks: int, *flags: str, launcher: str = "mpirun") -> subprocess.CompletedProcess[str]:
    return launch(ranks, ["-m", "hvdtrain.captioning", *flags], launcher)


def hvdtrain(*words: str) -> None:
    assert cli.command([*words]) == 0


def lay_out(folder: Path, places: Sequence[str], sides: Sequence[str]) -> None:
    """Pieces of scikit-learn's two photographs, with sentences on where they are from, laid out as Flickr8k is."""
    (folder / "Images").mkdir(parents=True)
    lines, names = [], []
    for subject in ("china", "flower"):
        photograph = Image.fromarray(load_sample_image(f"{subject}.jpg"))
        for row, place in enumerate(places):
            for column, side in enumerate(sides):
                left, top = column * 90, row * 60
                name = f"{subject}{row}{column}.jpg"
                photograph.crop((left, top, left + 240, top + 180)).save(folder / "Images" / name)
                names.append(name)
                sentences = (
                    f"A piece of the {subject} {place} , {side} .",
                    f"The {subject} , {side} and {place} .",
                    f"It is the {subject} photograph {place} on the {side} .",
                    f"{place} there is the {side} of the {subject} .",
                    f"The {side} of a photograph of the {subject} , {place} .",
                )
                lines += [f"{name}#{number}\t{sentence}" for number, sentence in enumerate(sentences)]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    for part, chosen in (("train", names[::2] + names[1::4]), ("dev", names[3::8]), ("test", names[7::8])):
        (folder / f"Flickr_8k.{part}Images.txt").write_text("\n".join(chosen) + "\n")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """50 of them, prepared at 32x32."""
    folder = tmp_path_factory.mktemp("flickr")
    lay_out(folder / "source", PLACES, SIDES)
    made = str(folder / "small")
    hvdtrain("data", "captions", str(folder / "source"), made, "--size", "32x32", "--min-count", "1")
    return made


def test_ranks_and_frameworks_learn_the_same(small: str, tmp_path: Path) -> None:
    """The loss is the mean per word over all ranks, although captions differ in length.

    A run that stopped within an epoch and resumed with another number of ranks learns the same.
    """
    flags = ["--data", small, *TINY, "--dropout", "0", "--global-batch-size", "16", "--epochs", "2", "--lr", "0.01"]
    flags += ["--checkpoint-steps", "9", "--keep-checkpoints", "9", "--strategy", "hierarchical"]
    alone, two, tensorflow = (tmp_path / name for name in ("alone", "two", "tensorflow"))
    then_two, then_alone = tmp_path / "alone then two", tmp_path / "two then alone"
    here("captioning", *flags, "--framework", "torch", "--run-dir", str(alone))
    cut_off(alone, then_two, 18)
    todo = [{"flags": [*flags, "--framework", "torch", "--run-dir", str(two)]}, {"flags": ["--resume", str(then_two)]}]
    assert trainings(2, todo, workload="captioning")[0] == [0, 0]
    cut_off(two, then_alone, 18)
    here("captioning", "--resume", str(then_alone))
    document(captioning(2, *flags, "--framework", "tensorflow", "--json", "--run-dir", str(tensorflow)))
    losses = [step.loss for step in read_run(alone)["step"]]
    assert losses[-1] < 0.9 * losses[0]
    timed = [step for step in read_run(alone)["step"] if not step.warmup]
    spent_s = sum(step.data_s + step.compute_s for step in timed)
    assert 0 < read_run(alone)["summary"][0].samples_per_s * spent_s <= 16 * len(timed), "captions, not words"
    for folder, tolerance in ((two, 2e-4), (tensorflow, 2e-3)):
        np.testing.assert_allclose([step.loss for step in read_run(folder)["step"]], losses, rtol=tolerance)
        words = [[step.samples for step in read_run(folder, rank)["step"]] for rank in range(2)]
        assert any(one != other for one, other in zip(*words, strict=True)), "the ranks' weights differ"
    for folder, whole, ranks in ((then_two, alone, 2), (then_alone, two, 1)):
        resumed_with_other_ranks(folder, whole, ranks)


def resumed_with_other_ranks(cut: Path, whole: Path, ranks: int) -> None:
    """Compares a run that stopped after step 18, within its second epoch, and resumed with other ranks, with `whole`:
    every caption is seen once, and the weights are equal up to the order of sums, within 1e-4."""
    found = read_run(cut)["summary"][-1]
    assert (found.global_batch, found.steps, found.ranks) == (16, 24, ranks)
    epochs, expected = ({each.epoch: each for each in read_run(folder)["epoch"]} for folder in (cut, whole))
    for number, epoch in epochs.items():
        assert epoch.samples == expected[number].samples, "words of all captions, once"
        assert epoch.train_loss == pytest.approx(expected[number].train_loss, rel=1e-4)
    one, other = newest_arrays(whole), newest_arrays(cut)
    shared = [name for name in one if name.startswith("shared.safetensors/parameter.")]
    assert shared
    for name in shared:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-3, atol=1e-4, err_msg=name)


STRATEGIES: dict[str, list[str]] = {
    "allreduce": [],
    "local-sgd": ["--strategy", "local-sgd:every=4+powersgd"],
    "async-ps": ["--strategy", "async-ps", "--optimizer", "sgd", "--lr", "0.05"],
    "shares": ["--strategy", "hierarchical", "--shares", "3:1"],
    "native": ["--strategy", "native"],
}


@pytest.fixture(scope="module")
def runs(small: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two hosts, one per strategy, and one with allreduce that is resumed; all in one job."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--data", small, *TINY, "--global-batch-size", "16", "--epochs", "2", "--framework", "torch", "--json"]
    flags += ["--checkpoint-steps", "5", "--keep-checkpoints", "9", "--run-dir"]
    todo = [{"flags": [*flags, str(folder / name), *more]} for name, more in STRATEGIES.items()]
    cut: dict[str, Any] = {"folder": str(folder / "allreduce"), "from_step": CUT}
    todo.append(cut | {"flags": [*flags, str(folder / "cut"), "--resume"]})
    assert set(trainings(2, todo, workload="captioning")[0]) == {0}
    return folder


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow
def test_resumed_equals_uninterrupted(framework: str, small: str, runs: Path, tmp_path: Path) -> None:
    whole, cut = runs / "allreduce", runs / "cut"
    if framework == "tensorflow":
        whole, cut = tmp_path / "whole", tmp_path / "cut"
        flags = ["--data", small, *TINY, "--framework", framework, "--batch-size", "16", "--epochs", "2"]
        flags += ["--checkpoint-steps", "5", "--keep-checkpoints", "9", "--run-dir"]
        here("captioning", *flags, str(whole))
        cut_off(whole, cut, CUT)
        here("captioning", *flags, str(cut), "--resume")
    expected, resumed = (read_run(folder)["summary"][-1] for folder in (whole, cut))
    (again,) = read_run(cut)["resumed"]
    assert expected.steps // 2 < again.step == CUT < expected.steps, "in the midst of the second epoch"
    assert any("adam_square" in name for name in assert_same_arrays(whole, cut))
    for field in ("test_scores", "tested_step", "test_loss"):
        assert getattr(resumed, field) == getattr(expected, field)
    assert resumed.validation_scores[-1] == expected.validation_scores[-1]


def test_captions_need_the_image_and_the_best_epoch_is_tested(tmp_path: Path) -> None:
    """Images of two squares in six colours. Without the image, two words of five can only be guessed."""
    draw, source, prepared = np.random.default_rng(1), tmp_path / "source", str(tmp_path / "prepared")
    scenes = [
        Scene(
            first=Group(count=1, size="large", shape="square", colour=colours[0]),
            second=Group(count=1, size="large", shape="square", colour=colours[1]),
            stacked=False,
        )
        for colours in draw.choice(list(shapes.COLOURS), (400, 2)).tolist()
    ]
    source.mkdir()
    with (source / "captions.txt").open("w") as file:
        table = csv.writer(file)
        table.writerow(["image", "caption"])
        for number, (scene, image) in enumerate(zip(scenes, shapes.draw(scenes, draw), strict=True)):
            Image.fromarray(image).save(source / f"{number}.png")
            table.writerow([f"{number}.png", f"{scene.first.colour} square beside {scene.second.colour} square"])
    size = ["--size", "32x32", "--split", "70/15/15", "--min-count", "1"]
    hvdtrain("data", "captions", str(source), prepared, *size)
    flags = ["--data", prepared, "--epochs", "12", "--hidden", "64", "--embedding", "32", "--dropout", "0.2"]
    flags += ["--batch-size", "16", "--lr", "0.01", "--framework", "torch", "--beam", "1", "--seed", "1"]
    seeing = here("captioning", *flags, "--run-dir", str(tmp_path / "seeing"))
    blind = here("captioning", *flags, "--encoder", "none", "--run-dir", str(tmp_path / "blind"))
    assert set(seeing["test_scores"]) == {"accuracy", "bleu1", "bleu2", "bleu3", "bleu4"}
    assert seeing["test_scores"]["bleu4"] > 0.7
    assert blind["test_scores"]["bleu4"] < 0.4
    for summary in (seeing, blind):
        scores = [scores["bleu4"] for scores in summary["validation_scores"]]
        best = max(range(12), key=lambda epoch: (scores[epoch], epoch))
        assert summary["tested_step"] == (best + 1) * summary["steps"] // 12


@pytest.mark.slow
def test_two_stages_equal_one_process(small: str, tmp_path: Path) -> None:
    """Bit for bit, with dropout and captions of unequal length; `caption` reads their checkpoint."""
    flags = ["--data", small, *TINY, "--global-batch-size", "60", "--micro-batches", "3", "--epochs", "2"]
    flags += ["--framework", "torch", "--run-dir"]
    one = here("captioning", *flags, str(tmp_path / "one"))
    two = document(captioning(2, *flags, str(tmp_path / "two"), "--json", "--stages", "2", "--cut-at", "words"))
    losses = [[step.loss for step in read_run(tmp_path / name)["step"]] for name in ("one", "two")]
    assert losses[0] == losses[1]
    for field in ("test_loss", "test_scores", "validation_scores"):
        assert two[field] == one[field]
    expected, found = (open_run(tmp_path / name).arrays for name in ("one", "two"))
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains(strategy: str, runs: Path) -> None:
    found = read_run(runs / strategy)
    epochs = found["epoch"]
    assert epochs[1].train_loss < epochs[0].train_loss
    names = {f"{beam}bleu{order}" for beam in ("", "beam_") for order in (1, 2, 3, 4)}
    assert set(found["summary"][-1].test_scores) == {"accuracy", *names}


@pytest.mark.slow
def test_photographs_from_end_to_end_with_vgg16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands of a Flickr8k user, with random weights; test_vgg16_weights.py imports published ones."""
    photographs = tmp_path / "flickr"
    lay_out(photographs, PLACES[:2], SIDES[:3])
    run, cache = tmp_path / "run", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    hvdtrain("data", "captions", str(photographs), str(tmp_path / "prepared"), "--on-bad-sample", "skip")
    flags = ["--data", str(tmp_path / "prepared"), "--weights", "random"]
    flags += ["--hidden", "32", "--embedding", "32", "--epochs", "4", "--batch-size", "8", "--framework", "torch"]
    first = launch(2, ["-m", "hvdtrain.captioning", *flags, "--json", "--run-dir", str(run)], extra=cache)
    summary = document(first)
    assert "features of 12 images: made" in first.stderr
    assert summary["parameters"] < 300_000, "the encoder is not the model's to train"
    assert not any("encoder" in name or "features." in name for name in newest_arrays(run))
    sent = summary["bytes_sent"] / summary["steps"]
    assert sent < 4 * summary["parameters"] * 1.1 + 1000, "and is never sent"
    monkeypatch.setenv("XDG_CACHE_HOME", cache["XDG_CACHE_HOME"])
    here("captioning", *flags, "--epochs", "1", "--run-dir", str(tmp_path / "again"))
    assert "features of 12 images: read" in capsys.readouterr().err
    images = sorted(str(path) for path in (photographs / "Images").iterdir())[:3]
    assert cli.command(["predict", str(run), *images, "--json", "--framework", "tensorflow"]) == 0
    assert len(json.loads(capsys.readouterr().out)["predictions"]) == 3
    hvdtrain("results", "accuracy", str(run))
