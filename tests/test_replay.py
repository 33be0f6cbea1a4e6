"""tools/replay.py: the computation is slept, the exchange is real."""

from __future__ import annotations

import pytest
from conftest import ROOT, document, launch


@pytest.mark.parametrize("strategy", ["powersgd", "native:hook=powersgd,rank=1"])
def test_a_replay_sleeps_its_computation_and_exchanges_for_real(strategy: str) -> None:
    flags = ["--width", "0.125", "--compute-s", "0.2", "--steps", "3", "--threads", "1", "--strategy", strategy]
    found = document(launch(2, [str(ROOT / "tools" / "replay.py"), "--framework", "torch", *flags]))
    assert (found["ranks"], found["hosts"], len(found["steps_s"])) == (2, 1, 3)
    assert min(found["steps_s"]) > 0.199
    if strategy.startswith("native"):
        assert found["bytes_sent_per_step"] == found["bytes_per_step"] > 0
