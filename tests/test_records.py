"""What is written is what is read; torn lines are passed over, foreign ones refused by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import failing
from runs import Made, step

from hvdtrain import records

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
