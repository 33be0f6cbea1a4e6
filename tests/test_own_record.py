"""The run folder of a script: measurements and logged values, which `hvdtrain results` reads like a workload's."""

from __future__ import annotations

import itertools
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
from hvdtrain.horovod_api import record, script
from hvdtrain.results.__main__ import main
from hvdtrain.results.read import frame as results
from hvdtrain.strategies import parse

pytestmark = pytest.mark.slow  # all tests share runs that take a minute

TCP_STRATEGY = "local-sgd:every=2,staleness=1+powersgd:rank=1"
FULL = """
for number in os.listdir("/proc/self/fd"):
    if os.path.realpath(f"/proc/self/fd/{number}").endswith("rank0000.jsonl"):
        os.dup2(os.open("/dev/full", os.O_WRONLY), int(number))
"""
MORE = """
for _ in range(6):
    if _ % 2 == 0:  # several models after each other
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    optimizer.zero_grad()
    model(images).sum().backward()
    optimizer.step()
hvd.shutdown()
sys.exit(3)
"""
SCRIPT = str(PROGRAMS / "own_recorded.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one script. One logs nothing, some fail."""
    folder = tmp_path_factory.mktemp("own")
    jobs = [
        ("two", 2, "allreduce", ["--api-token", "hunter2", "--begin", "os.chdir('/')"]),
        ("quiet", 2, TCP_STRATEGY, ["--quiet", "--seed", "3"]),
        ("failed", 1, "allreduce", ["--end", "raise ValueError('own mistake')"]),
        ("late", 1, "hierarchical", ["--end", MORE]),
        ("other", 2, "allreduce", ["--end", "sys.exit(3 * hvd.rank())"]),
        ("full", 1, "hierarchical", ["--begin", FULL]),
        ("early", 2, "hierarchical", ["--begin", "batches -= hvd.rank()"]),
        ("first", 2, "allreduce", ["--begin", "batches -= hvd.rank() == 0"]),
    ]

    def start(job: tuple[str, int, str, list[str]]) -> Any:
        name, ranks, strategy, flags = job
        variables = {"HVDTRAIN_RUN_DIR": os.path.relpath(folder / name, ROOT), "HVDTRAIN_STRATEGY": strategy}
        words = [str(PROGRAMS / "on_hosts.py"), "own_recorded"] if name == "quiet" else [SCRIPT]
        return launch(ranks, [*words, *flags], "mpirun" if strategy == "allreduce" else "forks", extra=variables)

    jobs.sort(key=lambda job: job[2] != "allreduce")
    count = sum(strategy == "allreduce" for _, _, strategy, _ in jobs)
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(start, jobs[:count])
        forked = [start(job) for job in jobs[count:]]
        for (name, *_), done in zip(jobs, [*ended, *forked], strict=True):
            codes = {"failed": 1, "late": 3, "other": 3, "early": 1, "first": 1}
            assert done.returncode == codes.get(name, 0), done.stderr[-3000:]
            assert (f"run folder {folder / name}: 16 steps" in done.stderr) == (name in ("two", "quiet", "late"))
            unfinished = ("late", "other", "full")  # "first" may be ended before it says so
            assert (f"run folder {folder / name}: unfinished" in done.stderr) == (name in unfinished) or name == "first"
            assert ("the script of rank 1 has ended" in done.stderr) == (name == "early")
            assert done.stderr.count("training continues without records") == (name == "full")
    return folder


def test_run_folder_has_measurements_and_logged_values(runs: Path) -> None:
    manifest = records.read_document(runs / "two" / "manifest.json", records.Manifest)
    assert (manifest.workload, manifest.config["strategy"]) == ("own_recorded", "allreduce")
    assert "hunter2" not in (runs / "two" / "manifest.json").read_text()
    assert (len(manifest.ranks), manifest.model["parameters"], manifest.metric["primary"]) == (2, 650, "accuracy")
    for rank in range(2):
        steps = read_run(runs / "two", rank)["step"]
        assert [step.step for step in steps] == list(range(16))
        assert [step.epoch for step in steps] == [0] * 8 + [1] * 8
        assert {(step.samples, step.data_s) for step in steps} == {(32, None)}
        # of the second optimizer, as float16, since the step before
        assert [step.bytes_sent for step in steps] == [2600] + [2600 + 12] * 15
        assert all(later.loss < before.loss for before, later in itertools.pairwise(steps))
        assert all(step.communication_s is not None and step.compute_s > 0 for step in steps)
        assert [step.lr for step in steps] == [0.5] * 8 + [0.05] * 8
    epochs = read_run(runs / "two")["epoch"]
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    assert all(epoch.train_scores == epoch.validation_scores for epoch in epochs)
    for rank in range(2):
        exchanged = [step.step for step in read_run(runs / "quiet", rank)["step"] if step.bytes_sent]
        # The first optimizer exchanges in every other step; the second one's bytes are part of the next step.
        assert exchanged == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    (summary,) = read_run(runs / "two")["summary"]
    assert (summary.steps, summary.global_batch, summary.ranks, summary.bytes_sent) == (16, 64, 2, 16 * 2612)
    assert (summary.bytes_sent_source, summary.local_bytes_sent) == ("computed", None)
    (quiet,) = read_run(runs / "quiet")["summary"]
    assert (quiet.bytes_sent_source, quiet.local_bytes_sent) == ("counted", 0)
    assert set(summary.step_shares) == {"compute", "exchange", "exchange_least"}


ENDS = [
    ("pass", True),
    ("exit()", True),
    ("sys.exit(None)", True),
    ("sys.exit(0)", True),
    ("threading.Thread(target=sys.exit, args=[1]).start()", True),
    ("raise SystemExit(1)", True),  # it is not seen
    ("leave(2)", True),
    ("exit(1)", False),
    ("quit(3)", False),
    ("sys.exit(2)", False),
    ("raise ValueError", False),
    ("try: sys.exit(0)\nexcept SystemExit: pass\nraise ValueError", False),
    ("raise KeyboardInterrupt", False),
    ("threading.Thread(target=lambda: 1 / 0).start()", False),
    ("sys.excepthook = lambda *_: None\nraise ValueError", False),
]


def test_normal_and_failed_ends_of_an_interpreter(tmp_path: Path) -> None:
    """Of scripts and, in turn, of modules."""
    watched = (
        "import atexit, sys, threading\nfrom sys import exit as leave\nfrom hvdtrain.horovod_api import exit_status\n"
    )
    watched += "exit_status.watch()\natexit.register(lambda: print('ends', exit_status.failure() is None))\n"

    def end(case: tuple[int, tuple[str, bool]]) -> str:
        script = tmp_path / f"script{case[0]}.py"
        script.write_text(watched + case[1][0])
        how = ["-m", script.stem] if case[0] % 2 else [str(script)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        done = subprocess.run([sys.executable, *how], env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.splitlines()[-1]

    with ThreadPoolExecutor(2) as pool:
        printed = list(pool.map(end, enumerate(ENDS)))
    assert dict(zip([code for code, _ in ENDS], printed, strict=True)) == {code: f"ends {well}" for code, well in ENDS}


def test_results_read_scripts_like_workloads(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = results.load([runs]).runs.set_index("run")
    assert dict(table["state"]) == {
        name: "complete" if name in ("two", "quiet") else "unfinished" for name in table.index
    }
    assert len(table) == 8
    assert table.loc["two", "samples_per_s"] > 0
    assert (table.loc["two", "rank_batch"], table.loc["quiet", "seed"]) == (32, 3)
    assert table.loc["two", "step_s"] == pytest.approx(
        table.loc["two", "compute_s"] + table.loc["two", "communication_s"]
    )
    assert (table.loc["quiet", "strategy"], table.loc["quiet", "backend"]) == (TCP_STRATEGY, "tcp")
    assert 0 < table.loc["quiet", "bytes_per_step"] < table.loc["two", "bytes_per_step"]
    missing = ["data_s", "test_s", "checkpoint_s", "test_score", "train_samples"]
    assert table[missing].isna().all(axis=None)
    assert table.loc["quiet", ["samples_per_s", "global_batch", "epochs", "primary_metric"]].isna().all()
    for command in ("table", "phases", "accuracy"):
        assert main([command, str(runs)]) == 0
        assert "nan" not in capsys.readouterr().out, command
    assert main(["report", str(runs), "-o", str(runs / "report.html")]) == 0


def test_recording_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HVDTRAIN_RECORD", "0")
    monkeypatch.chdir(tmp_path)
    world = connect("torch", backend="tcp")
    about = {"shapes": [(1,)], "device": "cpu", "threads": 1, "gather": lambda: world.gather_bytes}
    assert record.begin(world, parse("hierarchical"), **about) is None
    record.log(loss=1.0)
    record.finish()
    assert list(tmp_path.iterdir()) == []


def test_restarted_script_gets_a_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = str(tmp_path / "run")
    assert script.new_folder(None, restarted=True) is None
    for name in ("run", "run-2"):
        assert script.new_folder(f"{first}/", restarted=True).rstrip("/") == str(tmp_path / name)
        assert script.new_folder(first, restarted=False) == first
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert script.new_folder(first, restarted=False) == str(tmp_path / "run-3")


@pytest.mark.parametrize("values", [{"loss": "low"}, {"epoch": 1.5}, {"Accuracy": 1}, {"score": 1}])
def test_invalid_values_are_rejected(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"log.{next(iter(values))}"):
        record.log(**values)


def test_guessed_scores_and_seeds() -> None:
    assert script.score("accuracy", 0.5).share
    assert not script.score("accuracy", 93.5).share
    assert not script.score("rmse", 0.5).higher_is_better
    words, rest = ["a.py", "--x=y", "--seed=4", "--lr", "1"], ["--x=y", "--lr", "1"]
    assert (script.seed_and_rest(words), script.seed_and_rest([*words, "--seed", "5"])) == ((4, rest), (5, rest))
    assert script.seed_and_rest(["a.py", "--seed"]) == (None, [])
