"""tools/replay.py sleeps instead of computing, and exchanges for real."""

from __future__ import annotations

import pytest
from conftest import ROOT, document, launch


@pytest.mark.parametrize("strategy", ["powersgd", "native:hook=powersgd,rank=1"])
@pytest.mark.slow
def test_a_replay_sleeps_and_exchanges(strategy: str) -> None:
    flags = ["--width", "0.125", "--compute-s", "0.2", "--steps", "3", "--threads", "1", "--strategy", strategy]
    report = document(launch(2, [str(ROOT / "tools" / "replay.py"), "--framework", "torch", *flags]))
    assert (report["ranks"], report["hosts"], len(report["steps_s"])) == (2, 1, 3)
    assert min(report["steps_s"]) > 0.199
    if strategy.startswith("native"):
        assert report["bytes_sent_per_step"] == report["bytes_per_step"] > 0
