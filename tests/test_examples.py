"""The files of examples/, run as in docs/guides/: two ranks, on one host or on two."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, launch

from hvdtrain import records

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if "import hvdtrain" in path.read_text())
"""Those that import hvdtrain; test_trainers runs unmodified scripts"""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.slow
def test_example(example: Path, tmp_path: Path) -> None:
    pytest.importorskip("keras" if "import keras" in example.read_text() else "torch")
    done = launch(2, [str(example)], extra={"HVDTRAIN_RUN_DIR": str(tmp_path / "run")})
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = re.search(r"test accuracy +([\d.]+)|([\d.]+) accuracy", done.stdout)
    assert accuracy and float(accuracy[1] or accuracy[2]) > 0.8, done.stdout
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["plan"]["ranks"] == 2
    assert (tmp_path / "run" / "COMPLETE").exists()
    written = list(records.read(tmp_path / "run" / "metrics" / "rank0000.jsonl"))
    assert {"step", "summary"} <= {record.type for record in written}
    assert all(record.bytes_sent > 0 and record.compute_s > 0 for record in written if record.type == "step")
