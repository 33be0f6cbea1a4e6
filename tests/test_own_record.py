"""A script's run folder: what it told and what was measured, read by `hvdtrain results` like a workload's."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS, ROOT, launch
from runs import read_run

from hvdtrain import records
from hvdtrain.comm.world import connect
from hvdtrain.horovod_api import record, shown
from hvdtrain.results import load as results
from hvdtrain.results.__main__ import main
from hvdtrain.strategies import parse
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
        ("failed", 1, "allreduce", ["--end", "raise ValueError('own mistake')"]),
        ("late", 1, "hierarchical", ["--end", "hvd.shutdown(); raise SystemExit(3)"]),
        ("other", 2, "allreduce", ["--end", "raise SystemExit(3 * hvd.rank())"]),
    ]

    def begun(job: tuple[str, int, str, list[str]]) -> Any:
        name, ranks, strategy, flags = job
        variables = {"HVDTRAIN_RUN_DIR": str(folder / name), "HVDTRAIN_STRATEGY": strategy}
        words = [str(PROGRAMS / "on_hosts.py"), "own_recorded"] if name == "quiet" else [SCRIPT]
        return launch(ranks, [*words, *flags], extra=variables)

    with ThreadPoolExecutor(3) as pool:
        for (name, *_), done in zip(jobs, pool.map(begun, jobs), strict=True):
            assert done.returncode == {"failed": 1, "late": 3, "other": 3}.get(name, 0), done.stderr[-3000:]
            assert (f"run folder {folder / name}: 16 steps" in done.stderr) == (name not in ("failed", "other"))
            assert (f"run folder {folder / name}: unfinished" in done.stderr) == (name in ("late", "other"))
    return folder


def test_the_folder_has_what_was_measured_and_told(made: Path) -> None:
    manifest = records.read_document(made / "two" / "manifest.json", records.Manifest)
    assert (manifest.workload, manifest.config["strategy"]) == ("own_recorded", "allreduce")
    assert "hunter2" not in (made / "two" / "manifest.json").read_text()
    assert (len(manifest.ranks), manifest.model["parameters"], manifest.metric["primary"]) == (2, 650, "accuracy")
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
    assert (summary.bytes_sent_source, summary.local_bytes_sent) == ("computed", None)
    (quiet,) = read_run(made / "quiet")["summary"]
    assert (quiet.bytes_sent_source, quiet.local_bytes_sent) == ("counted", 0)
    assert set(summary.step_shares) == {"compute", "exchange", "exchange_least"}


ENDS = [
    ("pass", True),
    ("raise SystemExit", True),
    ("raise SystemExit(0)", True),
    ("exit()", True),
    ("sys.exit(None)", True),
    ("leave(0)", True),
    ("try: sys.exit(1)\nexcept SystemExit as end: print(end.code)", True),
    ("threading.Thread(target=sys.exit, args=[1]).start()", True),
    ("raise SystemExit(1)", False),
    ("raise SystemExit('words')", False),
    ("raise SystemExit('')", False),
    ("class Mine(SystemExit): pass\nraise Mine(1)", False),
    ("exit(1)", False),
    ("quit(3)", False),
    ("sys.exit(2)", False),
    ("leave(2)", False),
    ("raise ValueError", False),
    ("raise KeyboardInterrupt", False),
    ("threading.Thread(target=lambda: 1 / 0).start()", False),
    ("sys.excepthook = lambda *_: None\nraise ValueError", False),
]


@pytest.mark.parametrize("module", [False, True])
def test_how_an_interpreter_ends(module: bool, tmp_path: Path) -> None:
    """Normally or not, whether it runs a file or `python -m`."""
    watched = "import atexit, sys, threading\nfrom sys import exit as leave\nfrom hvdtrain.horovod_api import ending\n"
    watched += "ending.watch()\natexit.register(lambda: print('ends', ending.failure() is None))\n"

    def ended(case: tuple[int, tuple[str, bool]]) -> str:
        script = tmp_path / f"script{case[0]}.py"
        script.write_text(watched + case[1][0])
        how = ["-m", script.stem] if module else [str(script)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        done = subprocess.run([sys.executable, *how], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.splitlines()[-1]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ended, enumerate(ENDS)))
    assert dict(zip([code for code, _ in ENDS], found, strict=True)) == {code: f"ends {well}" for code, well in ENDS}


def test_results_show_scripts_like_workloads(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = results.load([made]).runs.set_index("run")
    assert dict(runs["state"]) == {
        name: "unfinished" if name in ("failed", "late", "other") else "complete" for name in runs.index
    }
    assert len(runs) == 6
    assert runs.loc["two", "samples_per_s"] > 0
    assert (runs.loc["two", "rank_batch"], runs.loc["quiet", "seed"]) == (32, 3)
    assert runs.loc["two", "step_s"] == pytest.approx(runs.loc["two", "compute_s"] + runs.loc["two", "communication_s"])
    assert (runs.loc["quiet", "strategy"], runs.loc["quiet", "collectives"]) == (STREAMS, "tcp")
    assert 0 < runs.loc["quiet", "bytes_per_step"] < runs.loc["two", "bytes_per_step"]
    assert runs.loc["one", "bytes_per_step"] == 0, "there is nobody to send to"
    missing = ["data_s", "test_s", "checkpoint_s", "test_score", "train_samples"]
    assert runs[missing].isna().all(axis=None)
    assert runs.loc["quiet", ["samples_per_s", "global_batch", "epochs", "primary_metric"]].isna().all()
    for command in ("list", "table", "scaling", "phases", "strategies", "accuracy", "energy", "inference"):
        assert main([command, str(made)]) == 0
        assert "nan" not in capsys.readouterr().out, command
    assert main(["report", str(made), "-o", str(made / "report.html")]) == 0
    assert main(["scaling", str(made / "quiet"), str(made / "one"), "--format", "json"]) == 0
    capsys.readouterr()


def test_nothing_is_recorded_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVDTRAIN_RECORD", "0")
    monkeypatch.chdir(tmp_path)
    world = connect("torch", backend="tcp")
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
    words, rest = ["a.py", "--x=y", "--seed=4", "--lr", "1"], ["--x=y", "--lr", "1"]
    assert (shown.seed_and_rest(words), shown.seed_and_rest([*words, "--seed", "5"])) == ((4, rest), (5, rest))
    assert shown.seed_and_rest(["a.py", "--seed"]) == (None, [])
    with pytest.raises(Failure):
        record.TrainConfig(monitor="nothing")
