"""tools/chaos.py: real faults on virtual hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import finished, unique

CHAOS = [sys.executable, "tools/chaos.py"]


@pytest.mark.root
@pytest.mark.slow
def test_survivors_lose_nothing(tmp_path: Path) -> None:
    words = ["--faults", "1", "--seed", "14", "--kinds", "rank-0", "--rates", "unlimited", "--out", str(tmp_path)]
    done = finished([*CHAOS, *words, "--json", "--name", unique()])
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["rows"]
    assert run["finished"] and run["continued_s"] > 0


def test_wrong_options_are_one_line() -> None:
    done = finished([*CHAOS, "--kinds", "fire"])
    assert done.returncode == 2 and "unknown fire; hint: choose from" in done.stderr and done.stderr.count("\n") == 1
