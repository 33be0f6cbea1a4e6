"""Metrics: scores of sums over ranks are one process's; the loop, records and tables go by the primary metric."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import PROGRAMS, document, failing, launch
from sklearn import metrics as known

from hvdtrain import records
from hvdtrain.records import metrics
from hvdtrain.records.metrics import Accuracy, Confusion, Regression
from hvdtrain.results.__main__ import main
from hvdtrain.results.read.frame import load
from hvdtrain.results.tables import accuracy, overview
from hvdtrain.system.exits import Failure
from hvdtrain.training.train_state import Position

DRAW = np.random.default_rng(7)


def totals(metric: metrics.Metric, parts: list[dict[str, np.ndarray]], samples: int) -> np.ndarray:
    """Of parts that ranks have summed by themselves."""
    sums = [np.sum([part[name] for part in parts], axis=0).ravel() for name in metric.sums]
    return np.concatenate([[3.0 * samples], *sums, [samples]])


def test_errors_of_a_regression_are_scikit_learns_however_it_is_cut() -> None:
    truth, found = DRAW.normal(400, 90, 211), DRAW.normal(400, 90, 211)
    parts = []
    for t, e in zip(np.split(truth, [7, 100]), np.split(found - truth, [7, 100]), strict=True):
        parts.append({"absolute": abs(e).sum(), "squared": (e**2).sum(), "signed": e.sum()})
        parts[-1] |= {"truth": t.sum(), "truth_squared": (t**2).sum()}
    loss, scores = Regression().means(totals(Regression(), parts, 211))
    assert loss == 3.0
    assert scores == pytest.approx(
        {
            "mae": known.mean_absolute_error(truth, found),
            "rmse": known.root_mean_squared_error(truth, found),
            "bias": np.mean(found - truth),
            "r2": known.r2_score(truth, found),
        }
    )
    constant = [{"absolute": 1.0, "squared": 1.0, "signed": 1.0, "truth": 4.0, "truth_squared": 8.0}]
    bias = Regression("W/m2").scores["bias"]
    assert bias.better(5, -80) and bias.better(-5, 80) and not bias.better(-5, 5), "better the nearer it is to 0"
    assert "r2" not in Regression().means(totals(Regression(), constant, 2))[1], "what is not defined is not there"


@pytest.mark.parametrize(
    ("classes", "answers"),
    [(4, 3), (4, 4), (3, 3)],
    ids=["a class is never the answer", "all are", "a class is not there"],
)
def test_a_confusion_matrix_gives_scikit_learns_precision_recall_and_f1(classes: int, answers: int) -> None:
    truth, found = DRAW.integers(0, classes, 150), DRAW.integers(0, answers, 150)
    metric = Confusion(("a", "b", "c", "d with a name that is long"))
    cuts = zip(np.split(truth, [60]), np.split(found, [60]), strict=True)
    parts = [{"confusion": known.confusion_matrix(t, f, labels=range(4))} for t, f in cuts]
    _, scores = metric.means(totals(metric, parts, 150))
    expected = {"accuracy": known.accuracy_score(truth, found)}
    for average, ending in (("macro", ""), ("weighted", "_weighted"), (None, "_class{}")):
        values = known.precision_recall_fscore_support(truth, found, average=average, zero_division=0)
        for kind, value in zip(("precision", "recall", "f1"), values[:3], strict=True):
            expected |= {f"{kind}{ending.format(place)}": each for place, each in enumerate(np.atleast_1d(value))}
    assert scores == pytest.approx(expected)
    absent = {f"{kind}_class{number}" for number in range(classes, 4) for kind in ("f1", "precision", "recall")}
    assert set(scores) == set(metric.scores) - absent
    of_classes, matrix = metric.report({"confusion": np.sum([part["confusion"] for part in parts], axis=0).tolist()})
    assert of_classes[1][2] == [
        "b",
        *(f"{scores[f'{kind}_class1']:.4f}" for kind in ("precision", "recall", "f1")),
        str((truth == 1).sum()),
    ]
    assert [row[1:] for row in matrix[1][1:]] == [list(map(str, row)) for row in sum(p["confusion"] for p in parts)]


def test_a_declaration_of_scores_is_read_back_and_an_invalid_one_is_rejected() -> None:
    for metric in (metrics.Accuracy(), Regression(), Confusion(("a", "b"))):
        value = json.loads(json.dumps(metric.as_json()))
        assert metrics.read(value) == (metric.primary, dict(metric.scores))
    for wrong in ({}, {"primary": "x", "scores": {}}, {**value, "primary": "f2"}, {**value, "scores": {"f1": {}}}):
        with pytest.raises(ValueError, match=r"score|primary"):
            metrics.read(wrong)
    with pytest.raises(Failure, match="returns the sums wrong, but its metric declares correct"):
        metrics.Accuracy().in_order({"wrong": 1})
    value = json.loads(json.dumps(metrics.Accuracy().as_json()))
    value["scores"]["accuracy"].pop("most")
    with pytest.raises(ValueError, match="missing most"):
        metrics.read(value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("acuracy=0.9", "did you mean accuracy"),
        ("accuracy=1.5", "from 0 to 1"),
        ("0.9", "SCORE=VALUE, e.g. accuracy=0.95"),
    ],
)
def test_a_target_that_cannot_be_reached_is_one_clear_line(asked: str, said: str) -> None:
    with failing(78, said):
        metrics.Accuracy().target(asked)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that train a regression, until its MAE is small enough."""
    pytest.importorskip("torch")
    run = tmp_path_factory.mktemp("line") / "run"
    flags = ["--epochs", "30", "--batch-size", "20", "--lr", "0.05", "--momentum", "0", "--target", "mae=0.4"]
    done = launch(2, [str(PROGRAMS / "regression.py"), *flags, "--run-dir", str(run), "--json"])
    summary = document(done)
    assert summary["test_mae"] == summary["test_scores"]["mae"] < 0.5
    assert "validation MAE" in done.stderr and "W/m2" in done.stderr
    return run


def test_the_loop_goes_by_a_primary_metric_that_is_better_when_lower(line: Path) -> None:
    found = list(records.read(line / "metrics" / "rank0000.jsonl"))
    epochs = [each for each in found if isinstance(each, records.Epoch)]
    values = [each.validation_scores["mae"] for each in epochs]
    assert values[-1] <= 0.4 < min(values[:-1]), "it stops after the first epoch that is as good"
    assert len(epochs) < 30
    for epoch in epochs:
        assert set(epoch.train_scores) == set(epoch.validation_scores) == set(Regression().scores)
    best = [each.step for each in found if isinstance(each, records.Saved) and each.best]
    lowest = [each.step for n, each in enumerate(epochs) if values[n] <= min(values[:n], default=np.inf)]
    assert best == lowest


def test_of_equal_epochs_the_longest_trained_is_the_best() -> None:
    at, found = Position(), []
    for epoch, value in enumerate((0.0, 0.0, 0.5, 0.25, 0.5)):
        at.learn(np.array([1.0, 1.0, 1.0]))
        found.append(at.end_epoch(epoch, Accuracy(), {"accuracy": value}, validation_loss=None, validation_s=0.0)[1])
    assert found == [True, True, True, False, True]


def test_results_show_and_judge_it_so(line: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load([line])
    assert not loaded.problems
    row = loaded.runs.iloc[0]
    assert row["primary_metric"] == "mae"
    assert row["best_validation_score"] == row["best_validation_mae"] <= 0.4
    assert "test MAE (W/m2)" in [column.heading for column in overview.overview(loaded).columns]
    assert accuracy.table(loaded, 0.4).rows[0]["reached"] == "1 of 1"
    assert accuracy.table(loaded, 0.001).rows[0]["reached"] == "0 of 1"
    for value, reached in ((0.5, "1 of 1"), (0.001, "0 of 1")):
        assert main(["accuracy", str(line), "--target", f"rmse={value}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["rows"][0]["reached"] == reached
    with pytest.raises(Failure, match=r"no score 'rms', did you mean rmse.; these runs have bias, mae, r2, rmse"):
        main(["report", str(line), "--target", "rms=1", "-o", str(line / "r.html")])
    assert main(["show", str(line)]) == 0
    assert "R2" in capsys.readouterr().out
    assert main(["plot", "accuracy-time", str(line), "-o", str(line / "f.svg")]) == 0
    assert (line / "f.svg").stat().st_size


def test_a_score_beyond_its_bounds_is_refused(line: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "metrics").mkdir(parents=True)
    for name in ("manifest.json", "COMPLETE"):
        (copy / name).write_text((line / name).read_text())
    text = (line / "metrics" / "rank0000.jsonl").read_text()
    (copy / "metrics" / "rank0000.jsonl").write_text(
        text.replace('"validation_scores":{"mae":', '"validation_scores":{"mae":-', 1)
    )
    loaded = load([copy])
    assert loaded.runs.iloc[0]["state"] == "refused"
    assert "must be of 0 W/m2 or more" in loaded.problems[0].what
