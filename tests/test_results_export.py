"""hvdtrain results export --to: MLflow reads the numbers of the records (TensorBoard: test_scalars)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import runs
from conftest import failing

from hvdtrain import records
from hvdtrain.results.__main__ import main
from hvdtrain.results.export import names

METRICS = Path("metrics") / "rank0000.jsonl"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A complete run that was resumed, an unfinished one, and one whose records are refused."""
    odd = runs.make(tmp_path / "r" / 'a"\\b', hosts=2, energy_w={"cpu0": 30.0})
    with runs.edited(odd / METRICS) as lines:
        lines[3:3] = [{"type": "resumed", "step": 1, "utc": records.utc_now()}, lines[1] | {"loss": 9.5}, lines[2]]
    runs.make(tmp_path / "r" / "part", complete=False)
    with runs.edited(runs.make(tmp_path / "r" / "bad") / METRICS) as lines:
        lines[2]["compute_s"] = -1
    return tmp_path / "r"


def export(root: Path, to: str, output: Path) -> None:
    assert main(["export", str(root), "--to", to, "-o", str(output)]) == 0


def test_mlflow_reads_the_records_back(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    for _ in range(2):  # a second export replaces the first
        export(root, "mlflow", tmp_path / "new" / "mlflow.db")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/new/mlflow.db")
    experiment = client.get_experiment_by_name("resnet")
    found = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in found.items()} == {'a"\\b': "FINISHED", "part": "RUNNING"}
    run = found['a"\\b']
    history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "step/loss")}
    last = {record.step: record.loss for record in runs.read_run(root / 'a"\\b')["step"]}
    assert history == last and history[1] == 9.5, "of repeated steps the later one counts"
    row = next(row for row in runs.results("export", root)["rows"] if row["run"] == 'a"\\b')
    metrics = run.data.metrics
    assert (metrics["run/energy_j"], metrics["run/train_s"]) == (row["energy_j"], row["train_s"])
    assert (run.data.params["lr"], run.data.params["width"]) == ("0.05", "0.25")
    times = [point.timestamp for point in client.get_metric_history(run.info.run_id, "step/lr")]
    assert times == sorted(times)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop", "r"):
        with failing(73, f"{name}: .*hint: name a writable file"):
            main(["export", str(root), "--to", "mlflow", "-o", str(tmp_path / name)])
    (tmp_path / "text").write_text("no database")
    with failing(65, "text: .*hint: name a new file"):
        main(["export", str(root), "--to", "mlflow", "-o", str(tmp_path / "text")])


def test_what_cannot_be_printed_needs_a_destination(root: Path) -> None:
    for to, example in (("parquet", "runs.parquet"), ("tensorboard", "logs"), ("mlflow", "mlflow.db")):
        with failing(2, f"-o {example}"):
            main(["export", str(root), "--to", to])


def test_a_missing_package_is_one_line(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "alembic", None)
    with failing(69, "the package alembic is missing; hint: pip install"):
        export(root, "mlflow", tmp_path / "mlflow.db")
    assert not (tmp_path / "mlflow.db").exists()


def test_runs_are_named_by_their_paths_below_a_common_folder() -> None:
    assert names.of_runs(["/x/a/run", "/x/b/run"]) == {"/x/a/run": "a/run", "/x/b/run": "b/run"}
    assert (names.of_runs(["/x/a/run"]), names.of_runs([])) == ({"/x/a/run": "run"}, {})
