"""--tensorboard: TensorBoard reads from a run's folder what its records say, once for each step."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from conftest import SMALL, failing, here
from runs import cut_off

from hvdtrain import records
from hvdtrain.config.options import TrainConfig
from hvdtrain.observe import tensorboard as scalars
from hvdtrain.training import observers


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's reader takes its own stand-in for TensorFlow, which would take seconds to load."""
    pytest.importorskip("tensorboard")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))


def drawn(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, as TensorBoard reads them; a step that is there twice fails."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    points: dict[str, dict[int, float]] = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        points[tag] = {event.step: event.value for event in events}
        assert len(points[tag]) == len(events), f"{tag}: {[event.step for event in events]}"
    return points


def recorded(path: Path) -> dict[str, dict[int, float]]:
    """The same, out of the records: a resumed run takes back what was said of the step it goes on from and later."""
    points: dict[str, dict[int, float]] = {}
    curves: Mapping[type[records.Record], tuple[str, ...]] = {
        records.Step: ("loss", "lr", "data_s", "compute_s", "communication_s", "bytes_sent"),
        records.Epoch: ("train_loss", "train_accuracy", "validation_accuracy", "validation_loss", "samples_per_s"),
        records.Summary: ("test_accuracy", "test_loss", "train_s", "peak_rss_bytes"),
    }
    for record in records.read(path):
        if isinstance(record, records.Resumed):
            points = {
                tag: {step: v for step, v in values.items() if step < record.step} for tag, values in points.items()
            }
        step = record.steps - 1 if isinstance(record, records.Summary) else getattr(record, "step", 0)
        if isinstance(record, records.Epoch):
            step -= 1  # it counts steps
        for name in curves.get(type(record), ()):
            value = (msgspec.structs.asdict(record) | records.by_score(record)).get(name)
            if value is not None:
                points.setdefault(f"{record.type}/{name}", {})[step] = float(np.float32(value))
    return points


def test_tensorboard_shows_the_records_of_a_resumed_run_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of rank 0."""
    pytest.importorskip("torch")
    whole, run = tmp_path / "whole", tmp_path / "run"
    flags = [*SMALL, "--framework", "torch", "--tensorboard", "--checkpoint-steps", "20", "--run-dir"]
    here("resnet", *flags, str(whole), "--epochs", "1")
    cut_off(whole, run, 20)
    here("resnet", *flags, str(run), "--epochs", "2", "--resume")
    assert "resumed at step 20 of 60" in capsys.readouterr().err  # so steps 20 to 29 were made twice
    argv = json.loads((run / "manifest.json").read_text())["argv"]
    assert argv[-2:] == ["--epochs", "2"], "a command made of it repeats the run as it became"
    assert argv.count("--run-dir") == 1 and "--resume" not in argv
    expected, shown = recorded(run / "metrics" / "rank0000.jsonl"), drawn(run / "tensorboard")
    assert sorted(expected["step/loss"]) == list(range(60))
    assert {tag: shown.get(tag) for tag in expected} == expected
    assert not {"step/step", "step/warmup", "epoch/unix_s"} & set(shown)
    other = observers.writer(TrainConfig(tensorboard=True), run, rank=1)
    other.close()
    assert type(other) is records.Writer


def test_what_was_not_measured_has_no_point(tmp_path: Path) -> None:
    step = records.Step(
        step=0,
        epoch=0,
        loss=1.5,
        samples=8,
        lr=0.1,
        data_s=0.0,
        compute_s=0.25,
        communication_s=None,
        bytes_sent=0,
        warmup=True,
    )
    writer = scalars.Scalars(tmp_path / "metrics" / "rank0000.jsonl", tmp_path / "tensorboard")
    writer.write(step)
    writer.close()
    assert list(records.read(tmp_path / "metrics" / "rank0000.jsonl")) == [step]
    shown = drawn(tmp_path / "tensorboard")
    assert shown == {f"step/{k}": {0: v} for k, v in [("loss", 1.5), ("lr", np.float32(0.1)), ("data_s", 0.0)]} | {
        "step/compute_s": {0: 0.25},
        "step/bytes_sent": {0: 0.0},
    }


def test_a_missing_package_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with failing(78, r"--tensorboard: .*pip install tensorboard"):
        scalars.check()
