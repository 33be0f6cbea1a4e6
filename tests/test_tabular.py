"""`python -m hvdtrain.tabular` as users start it, and `hvdtrain predict` on files that a run has not seen."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROGRAMS, document, failing, here, launch
from runs import read_run
from sklearn import metrics as known
from sklearn.datasets import load_wine
from test_resnet_train import assert_same_arrays

from hvdtrain import cli
from hvdtrain.system.exits import Failure
from hvdtrain.training import loop

pytest.importorskip("torch")
pytest.importorskip("tensorflow")

FRAMEWORKS = ("torch", "tensorflow")
FLAGS = ["--data", "wine", "--epochs", "4", "--global-batch-size", "16", "--json"]
CUT = 21
"""Step of the checkpoint from which runs resume, of 32 in four epochs"""


def steps(folder: Path) -> list[float]:
    return [each.loss for each in read_run(folder)["step"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two hosts in each framework with allreduce: a whole one, and one that is resumed; both in one job."""
    folder = tmp_path_factory.mktemp("runs")
    for framework in FRAMEWORKS:
        here = folder / framework
        flags = [*FLAGS, "--framework", framework, "--checkpoint-steps", "7", "--keep-checkpoints", "9", "--run-dir"]
        todo: list[dict[str, Any]] = [{"flags": [*flags, str(here / "allreduce")]}]
        cut = {"folder": str(here / "allreduce"), "from_step": CUT}
        todo.append({"flags": [*flags, str(here / "cut"), "--resume"], **cut})
        arguments = [str(PROGRAMS / "strategy_runs.py"), framework, "1", json.dumps(todo), "tabular"]
        assert set(document(launch(2, arguments))["codes"]) == {0}
    return folder


def summary(folder: Path) -> Any:
    return read_run(folder)["summary"][-1]


@pytest.mark.slow
def test_one_process_two_ranks_and_both_frameworks_learn_the_same(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monitors end before inference is timed, since its energy does not belong to the run."""
    timed, sampled = loop.timed_inference, []

    def samples(*arguments: Any) -> Any:
        sampled.extend(file.read_bytes() for file in (tmp_path / "alone" / "monitors").iterdir())
        return timed(*arguments)

    monkeypatch.setattr(loop, "timed_inference", samples)
    more = ["--framework", "torch", "--monitor", "resources"]
    alone = here("tabular", *FLAGS, *more, "--run-dir", str(tmp_path / "alone"))
    assert sampled == [file.read_bytes() for file in (tmp_path / "alone" / "monitors").iterdir()] != []
    losses = steps(tmp_path / "alone")
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(steps(runs / "torch" / "allreduce"), losses, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(steps(runs / "tensorflow" / "allreduce"), losses, rtol=2e-3, atol=1e-4)
    for framework in FRAMEWORKS:
        assert summary(runs / framework / "allreduce").test_sums == alone["test_sums"]
    confusion = np.array(alone["test_sums"]["confusion"])
    assert confusion.sum(axis=1).tolist() == [9, 10, 8]
    assert alone["test_accuracy"] == np.trace(confusion) / confusion.sum() > 0.8


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.slow
def test_resumed_equals_uninterrupted(framework: str, runs: Path) -> None:
    whole, cut = runs / framework / "allreduce", runs / framework / "cut"
    (again,) = read_run(cut)["resumed"]
    assert again.step == CUT < summary(whole).steps
    assert any("adam_square" in name for name in assert_same_arrays(whole, cut))
    assert summary(cut).test_sums == summary(whole).test_sums
    assert (cut / "columns.json").read_bytes() == (whole / "columns.json").read_bytes()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wine data in another format with every fifth row twice, and files without or with bad classes."""
    folder, data = tmp_path_factory.mktemp("other"), load_wine()
    rows = [[*map(str, x), f"class_{y}"] for x, y in zip(data.data, data.target, strict=True)]
    text = "\r\n".join(";".join(row).replace(".", ",") for row in rows[::5] + rows)
    (folder / "other.csv").write_text(text)
    (folder / "bare.csv").write_text("\n".join(",".join(row[:-1]) for row in rows))
    (folder / "no_class.csv").write_text("\n".join(",".join([*row[:-1], "?" * (row in rows[::2])]) for row in rows))
    (folder / "unseen.csv").write_text("\n".join(map(",".join, [rows[0], [*rows[1][:-1], "class_7"]])))
    (folder / "narrow.csv").write_text("\n".join(",".join(row[2:]) for row in rows))
    return folder


@pytest.mark.slow
def test_scores_of_another_file_equal_scikit_learns_in_both_frameworks(
    runs: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {}
    for framework in FRAMEWORKS:
        words = ["predict", str(runs / "torch" / "allreduce"), str(other / "other.csv"), "--framework", framework]
        assert cli.command([*words, "--score", "--json"]) == 0
        printed = capsys.readouterr()
        assert "separated by semicolons, decimal commas, no header" in printed.err
        told[framework] = json.loads(printed.out)
        assert cli.command([*words, "--out", str(tmp_path / f"{framework}.csv")]) == 0
    rows, others = [list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())) for name in FRAMEWORKS]
    for mine, theirs in zip(rows, others, strict=True):
        assert (mine["line"], mine["class"]) == (theirs["line"], theirs["class"])
        assert float(mine["probability"]) == pytest.approx(float(theirs["probability"]), abs=2e-6)
    assert told["torch"]["confusion"] == told["tensorflow"]["confusion"]
    assert told["torch"]["loss"] == pytest.approx(told["tensorflow"]["loss"], rel=1e-5)
    truth = [line.rpartition(";")[2] for line in (other / "other.csv").read_text().splitlines()]
    found = [row["class"] for row in rows]
    assert [int(row["line"]) for row in rows] == list(range(1, len(truth) + 1))
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)
    scores, classes = told["torch"]["scores"], told["torch"]["classes"]
    assert told["torch"]["confusion"] == known.confusion_matrix(truth, found, labels=classes).tolist()
    assert scores["accuracy"] == known.accuracy_score(truth, found) > 0.8
    for average, ending in (("macro", ""), ("weighted", "_weighted")):
        expected = known.precision_recall_fscore_support(truth, found, average=average)[:3]
        assert [scores[f"{kind}{ending}"] for kind in ("precision", "recall", "f1")] == pytest.approx(expected)


@pytest.mark.slow
def test_predictions_need_no_classes_and_other_columns_are_errors(runs: Path, other: Path, tmp_path: Path) -> None:
    run, out = str(runs / "tensorflow" / "allreduce"), tmp_path / "out.csv"

    def ask(name: str, *more: str) -> int:
        return cli.command(["predict", run, str(other / name), "--framework", "torch", *more])

    told = []
    (tmp_path / "link.csv").symlink_to(out)
    for name in ("bare.csv", "no_class.csv"):
        assert ask(name, "--out", str(tmp_path / "link.csv")) == 0
        told.append(out.read_text())
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 1 + 178
    os.mkfifo(tmp_path / "pipe")
    for words, code, told in [
        (("bare.csv", "--score"), 65, "bare.csv:1: 13 columns, but the run was trained on 13 features and a class"),
        (("unseen.csv", "--score"), 65, "unseen.csv:2:14: class 'class_7' was not in the training data"),
        (("narrow.csv", "--out", str(out)), 65, "12 columns, but the run was trained on 13 features"),
        (("bare.csv", "--out", str(out / "out.csv")), 73, "Not a directory"),
        (("bare.csv", "--out", str(tmp_path / "pipe")), 73, "not a plain file"),
        (("no_class.csv", "--score"), 65, "no_class.csv:1:14: the class is missing"),
    ]:
        with failing(code, told.replace("(", r"\(")):
            ask(*words)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "run").mkdir()
    for name in ("manifest.json", "columns.json", "checkpoints"):
        (tmp_path / "run" / name).symlink_to(Path(run) / name)
    (tmp_path / "run" / "columns.json").unlink()
    (tmp_path / "run" / "columns.json").write_text('{"schema": "x"}')
    with pytest.raises(Failure, match="does not describe columns"):
        cli.command(["predict", str(tmp_path / "run"), str(other / "other.csv"), "--score"])


def test_a_class_that_the_terminal_cannot_show_is_replaced(tmp_path: Path) -> None:
    rows = [f"{number},{'狗' if number % 2 else '猫'}" for number in range(80)]
    (tmp_path / "animals.csv").write_text("\n".join(["size,kind", *rows]))
    flags = ["--data", str(tmp_path / "animals.csv"), "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    done = launch(0, ["-m", "hvdtrain.tabular", *flags], extra={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout.count("?") > 1) == (0, True), done.stderr
