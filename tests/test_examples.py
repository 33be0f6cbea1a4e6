"""Each file of examples/ as docs/OWN.md starts it: two ranks, on one host or on two."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, launch

from hvdtrain import records

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_HOSTS = str(ROOT / "tests" / "programs" / "on_hosts.py")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example: Path, tmp_path: Path) -> None:
    """It is short, and one rank says what was learnt."""
    assert len(example.read_text().splitlines()) <= 40
    pytest.importorskip("keras" if "import keras" in example.read_text() else "torch")
    done = launch(2, [str(example)], extra={"HVDTRAIN_RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == 0, done.stderr[-3000:]
    learnt = re.search(r"test accuracy +([\d.]+)|([\d.]+) accuracy", done.stdout)
    assert learnt and float(learnt[1] or learnt[2]) > 0.8, done.stdout
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["plan"]["ranks"] == 2
    assert (tmp_path / "run" / "COMPLETE").exists()
    written = list(records.read(tmp_path / "run" / "metrics" / "rank0000.jsonl"))
    assert {"step", "summary"} <= {record.type for record in written}
    assert all(record.bytes_sent > 0 and record.compute_s > 0 for record in written if record.type == "step")


def test_own_model_over_hosts_sends_less_with_powersgd(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sent = "--strategy", "powersgd:rank=4", "--run-dir", str(tmp_path / "run")
    done = launch(2, [ON_HOSTS, "own_model", *sent], extra={"PYTHONPATH": str(ROOT / "examples")})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "run" / "metrics" / "rank0000.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if '"type":"step"' in line]
    parameters = json.loads((tmp_path / "run" / "manifest.json").read_text())["model"]["parameters"]
    assert 0 < steps[0]["bytes_sent"] < parameters, "a quarter of what a ring of two sends"


def test_the_regression_of_the_page_learns(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (code,) = re.findall(r"^```python\n(import torch\n.*?)^```$", (ROOT / "docs" / "OWN.md").read_text(), re.M | re.S)
    (tmp_path / "diabetes.py").write_text(code)
    done = launch(0, [str(tmp_path / "diabetes.py")], extra={"HVDTRAIN_RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) > 0.4
