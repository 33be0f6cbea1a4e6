"""`hvdtrain measure` on two hosts that share no files: what its file has, and what it must not have."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Cluster, fails, finished

from hvdtrain import cli
from hvdtrain.measure import PRESETS
from hvdtrain.results import measured

FEW_STEPS = """import sys
from hvdtrain import measure
measure.RUN_S, measure.MODEL = 0, "--framework torch --width 0.125 --image-size 8 --seed 1".split()
sys.exit(measure.main(sys.argv[1:]))
"""


@pytest.mark.root
@pytest.mark.slow
def test_a_file_has_predictions_and_measurements_and_names_nobody(apart: Cluster, tmp_path: Path) -> None:
    throttle = [str(ROOT / "tools" / "throttle.sh"), "100mbit", "--name", apart.name]
    assert finished(throttle).returncode == 0
    path = tmp_path / "measured.json"
    words = ["-H", "a:1,b:1", "-o", str(path), "--root", str(tmp_path)]
    done = apart.on("a", sys.executable, "-c", FEW_STEPS, *words, timeout_s=600)
    assert done.returncode == 0, done.stderr
    content = apart.on("a", "cat", str(path)).stdout
    assert len(content) <= 20_000
    secrets = {str(Path.home()), str(ROOT), str(tmp_path), socket.gethostname(), "10.77.", "root", apart.name}
    assert not {word for word in secrets | {os.environ.get("USER", "root")} if word in content}
    found = json.loads(content)
    assert [each["host"] for each in found["hosts"]] == [1, 2] and all(each["step_s"] > 0 for each in found["hosts"])
    (link,) = found["links"]
    assert link["hosts"] == [1, 2] and 50 < link["there_mbit"] < 100
    assert [each["preset"] for each in found["presets"]] == list(PRESETS)
    folders = apart.on("a", "sh", "-c", f"echo {tmp_path}/measured-*").stdout.split()
    rows = apart.on("a", "hvdtrain", "results", "export", *folders, "--to", "json")
    steps = {Path(row["run_dir"]).name: row["step_s"] for row in json.loads(rows.stdout)["rows"]}
    assert steps == {each["preset"]: each["step_s"] for each in found["presets"]} | {
        "one-host": found["one_host"]["step_s"]
    }
    exact, balanced, fast = found["presets"]
    assert exact["bytes_per_step"] / 6 > balanced["bytes_per_step"] > fast["bytes_per_step"] > 0
    local = tmp_path / "copy.json"
    local.write_text(content)
    assert measured.text([measured.read(local)]) in done.stdout


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"schema": "hvdtrain/measured/1"}', b"\xff"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    fails(lambda: cli.command(["results", "measured", str(path)]), 65, "other.json", "hvdtrain measure")


@pytest.mark.parametrize("words", [["-H", "a:1"], ["-H", "a:1,b:1", "-o", "/nowhere/file.json"]])
def test_what_cannot_be_measured_is_refused_before_anything_starts(words: list[str]) -> None:
    fails(lambda: cli.command(["measure", *words]), 2 if len(words) < 3 else 73)


def test_a_dry_run_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command(["measure", "-H", "a:1,b:1", "--dry-run"]) == 0
    lines: Any = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["doctor", "plan"]
