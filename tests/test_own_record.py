"""A script's run folder: what it told and what was measured, read by `hvdtrain results` like a workload's."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, launch
from runs import read_run

from hvdtrain import records
from hvdtrain.comm.world import World
from hvdtrain.horovod_api import record, shown
from hvdtrain.results.__main__ import main
from hvdtrain.results.read import frame as results
from hvdtrain.strategies import parse
from hvdtrain.system.arguments import without_secrets
from hvdtrain.system.exits import Failure

STREAMS = "local-sgd:every=2,staleness=1+powersgd:rank=1"
SCRIPT = str(PROGRAMS / "own_recorded.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one script on one and on two ranks, one that tells nothing and one that fails."""
    folder = tmp_path_factory.mktemp("own")
    jobs = [
        ("one", 1, "allreduce", ["--api-token", "hunter2"]),
        ("two", 2, "allreduce", ["--api-token", "hunter2"]),
        ("quiet", 2, STREAMS, ["--quiet", "--seed", "3"]),
        ("failed", 1, "allreduce", ["--fail"]),
        ("ended", 1, "hierarchical", ["--exit", "3"]),
    ]

    def begun(job: tuple[str, int, str, list[str]]) -> Any:
        name, ranks, strategy, flags = job
        variables = {"HVDTRAIN_RUN_DIR": str(folder / name), "HVDTRAIN_STRATEGY": strategy}
        return launch(ranks, [SCRIPT, *flags], extra=variables)

    with ThreadPoolExecutor(3) as pool:
        for (name, *_), done in zip(jobs, pool.map(begun, jobs), strict=True):
            assert done.returncode == {"failed": 1, "ended": 3}.get(name, 0), done.stderr[-3000:]
            assert (f"run folder {folder / name}: 16 steps" in done.stderr) == (done.returncode == 0)
    return folder


def test_the_folder_has_what_was_measured_and_told(made: Path) -> None:
    manifest = records.read_document(made / "two" / "manifest.json", records.Manifest)
    assert (manifest.workload, manifest.config["strategy"]) == ("own_recorded", "allreduce")
    assert "hunter2" not in (made / "two" / "manifest.json").read_text()
    assert (len(manifest.ranks), manifest.model["parameters"], manifest.metric["headline"]) == (2, 650, "accuracy")
    for rank in range(2):
        steps = read_run(made / "two", rank)["step"]
        assert [step.step for step in steps] == list(range(16))
        assert [step.epoch for step in steps] == [0] * 8 + [1] * 8
        assert {(step.samples, step.data_s) for step in steps} == {(32, None)}
        assert {step.bytes_sent for step in steps} == {2600 + 24}  # of both optimizers
        assert all(later.loss < before.loss for before, later in itertools.pairwise(steps))
        assert all(step.communication_s is not None and step.compute_s > 0 for step in steps)
        assert [step.lr for step in steps] == [0.5] * 8 + [0.05] * 8
    epochs = read_run(made / "two")["epoch"]
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    assert all(epoch.train_scores == epoch.validation_scores for epoch in epochs)
    for rank in range(2):
        exchanged = [step.step for step in read_run(made / "quiet", rank)["step"] if step.bytes_sent]
        assert exchanged == [2, 4, 6, 7, 10, 12, 14, 15], "synchronize_weights() belongs to the step before it"
    (summary,) = read_run(made / "two")["summary"]
    assert (summary.steps, summary.global_batch, summary.ranks, summary.bytes_sent) == (16, 64, 2, 16 * 2624)
    assert set(summary.step_shares) == {"compute", "exchange", "exchange_least"}
    assert not (made / "failed" / "COMPLETE").exists()


def test_results_show_scripts_like_workloads(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = results.load([made]).runs.set_index("run")
    assert dict(runs["state"]) == {
        name: "unfinished" if name in ("failed", "ended") else "complete" for name in runs.index
    }
    assert len(runs) == 5
    assert runs.loc["two", "samples_per_s"] > 0
    assert (runs.loc["two", "rank_batch"], runs.loc["quiet", "seed"]) == (32, 3)
    assert runs.loc["two", "step_s"] == pytest.approx(runs.loc["two", "compute_s"] + runs.loc["two", "communication_s"])
    assert (runs.loc["quiet", "strategy"], runs.loc["quiet", "backend"]) == (STREAMS, "streams")
    assert 0 < runs.loc["quiet", "bytes_per_step"] < runs.loc["two", "bytes_per_step"]
    assert runs.loc["one", "bytes_per_step"] == 0, "there is nobody to send to"
    missing = ["data_s", "test_s", "checkpoint_s", "test_score", "train_samples"]
    assert runs[missing].isna().all(axis=None)
    assert runs.loc["quiet", ["samples_per_s", "global_batch", "epochs", "primary_metric"]].isna().all()
    for command in ("list", "table", "scaling", "phases", "strategies", "accuracy", "energy"):
        assert main([command, str(made)]) == 0
        assert "nan" not in capsys.readouterr().out, command
    assert main(["report", str(made), "-o", str(made / "report.html")]) == 0
    assert main(["scaling", str(made / "quiet"), str(made / "one"), "--format", "json"]) == 0
    capsys.readouterr()


def test_nothing_is_recorded_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVDTRAIN_RECORD", "0")
    monkeypatch.chdir(tmp_path)
    world = World("torch", carrier="streams")
    about = {"parameters": 1, "device": "cpu", "threads": 1, "gather": world.gather_bytes}
    assert record.begin(world, parse("hierarchical"), **about) is None
    record.log(loss=1.0)
    record.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_starts_again_has_a_folder_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = str(tmp_path / "run")
    assert shown.free(None, again=True) is None
    for name in ("run", "run-2", "run-3"):
        assert shown.free(f"{first}/", again=True).rstrip("/") == str(tmp_path / name)
        assert shown.free(first, again=False) == first, "which is refused if it holds a run"
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert shown.free(first, again=False) == str(tmp_path / "run-4")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"loss": "low"}, "takes a number"),
        ({"epoch": 1.5}, "whole number"),
        ({"Accuracy": 1}, "lower-case"),
        ({"score": 1}, "not 'score'"),
    ],
)
def test_what_is_no_number_or_name_is_refused(told: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        record.log(**told)


def test_scores_declare_what_they_can_be() -> None:
    assert shown.score("accuracy", 0.5).share
    assert not shown.score("accuracy", 93.5).share
    assert not shown.score("rmse", 0.5).higher_is_better
    assert shown.finite(math.nan) is None
    argv = ["a.py", "--token=x", "--password", "y", "--seed=4", "--lr", "1"]
    words = without_secrets(argv)
    assert words == ["a.py", "--token=***", "--password", "***", "--seed=4", "--lr", "1"]
    rest = ["--token=***", "--password", "***", "--lr", "1"]
    assert (shown.seed_and_rest(words), shown.seed_and_rest([*words, "--seed", "5"])) == ((4, rest), (5, rest))
    assert shown.seed_and_rest(["a.py", "--seed"]) == (None, [])
    assert json.dumps(words)
    with pytest.raises(Failure):
        record.TrainConfig(monitor="nothing")
