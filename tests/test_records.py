"""What is written is what is read; torn lines are passed over, foreign ones refused by file and line. Their sums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import failing
from runs import Made, step, summary

from hvdtrain import records
from hvdtrain.records.metrics import Accuracy, Metric, Regression
from hvdtrain.training.train_state import Position

STEP = step(Made(communication_s=None), 1, 0)


def test_records_come_back_equal_and_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "rank0000.jsonl"
    writer = records.Writer(path)
    writer.write(STEP)
    writer.close()
    with path.open("a") as stream:
        stream.write('{"type":"step","ste')
    assert list(records.read(path)) == [STEP]
    writer = records.Writer(path)
    resumed = records.Resumed(step=1, utc="2026-01-01T00:00:00Z")
    writer.write(resumed)
    writer.close()
    assert list(records.read(path)) == [STEP, resumed]


@pytest.mark.parametrize("line", ['{"type":"stap"}', "[1]", '{"type":"resumed","step":1}'])
def test_a_whole_line_that_is_no_record_is_refused_with_file_and_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"type":"resumed","step":1,"utc":"u","of":"the future"}}\n{line}\n')
    with failing(65, r"x\.jsonl:2"):
        list(records.read(path))


def test_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    with failing(73):
        records.Writer(Path("/proc/nothing/rank0000.jsonl"))


def test_a_link_in_a_folder_from_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "rank0000.jsonl"
    mine.write_text("dear\n")
    link.symlink_to(mine)
    with failing(73):
        records.Writer(link)
    (tmp_path / f".manifest.json.{os.getpid()}").symlink_to(mine)
    records.write_document(tmp_path / "manifest.json", {})
    assert mine.read_text() == "dear\n" and not (tmp_path / "manifest.json").is_symlink()


def test_rates_leave_warm_up_out_and_times_do_not() -> None:
    at, made = Position(), Made(data_s=0.5, hosts=2)
    for number, (seconds, samples) in enumerate([(9.0, 10), (8.0, 10), (2.0, 10), (4.0, 20)]):  # two warm up
        at.learn(np.array([1.0, samples / 2, samples]))
        at.add(step(made, number, 0), seconds=seconds, consumed=at.consumed + samples)
    epoch, _ = at.end_epoch(0, Accuracy(), {"accuracy": 0.5}, validation_loss=1.0, validation_s=3.0, unix_s=0.0)
    assert (epoch.samples, epoch.train_s, epoch.samples_per_s) == (50, 23, 30 / 6)
    assert (epoch.train_loss, epoch.train_scores) == (4 / 50, {"accuracy": 0.5})
    sums: dict[str, Any] = {"steps": 4, "train_s": 23, "validation_s": 3, "checkpoint_s": 0, "data_share": 1 / 6}
    sums |= {"samples_per_s": 5, "samples_per_s_per_rank": 2.5, "bytes_sent": 4 * 4000}
    sums |= {"validation_scores": [{"accuracy": 0.5}], "ranks": 2}
    others = {name: value for name, value in vars(summary(made, Path("run"), 0.0)).items() if name not in sums}
    found = vars(at.summary(ranks=2, **others))
    assert {name: found[name] for name in sums} == sums


@pytest.mark.parametrize(
    ("metric", "target", "short"),
    [(Accuracy(), ("accuracy", 1.0), 0.99), (Accuracy(), ("accuracy", 0.9), 0.89), (Regression(), ("mae", 0.4), 0.41)],
)
def test_a_score_as_good_as_the_target_is_there(metric: Metric, target: tuple[str, float], short: float) -> None:
    for value, there in ((short, False), (target[1], True)):
        assert Position(validation_scores=[{target[0]: value}]).reached(target, metric) is there
