"""Horovod's collective calls over our streams: NumPy's results, errors alike on all ranks, nothing sent when idle."""

from __future__ import annotations

import os

import numpy as np
import pytest
from conftest import PROGRAMS, document, launch

from hvdtrain.collectives import Alone, Reach
from hvdtrain.script import coordinator
from hvdtrain.script.calls import Calls, Op
from hvdtrain.script.coordinator import Asked, Coordinator, packed, unpacked


@pytest.mark.parametrize(("ranks", "launcher"), [(3, "horovodrun --gloo"), (4, "mpirun")])
def test_every_call_gives_what_numpy_gives_on_every_rank(ranks: int, launcher: str) -> None:
    """The program compares, and looks at idle ranks; here is what the ranks must have alike."""
    errors = document(launch(ranks, [str(PROGRAMS / "calls_ranks.py")], launcher))["ranks"]
    assert errors == [errors[0]] * ranks


def test_one_process_by_itself_has_the_same_calls() -> None:
    calls = Calls(Alone(), Reach("127.0.0.1", "lo", loopback=True))
    given = np.arange(6, dtype=np.int32).reshape(3, 2)
    for kind in ("allreduce", "broadcast", "allgather", "reducescatter"):
        assert np.array_equal(calls.call(kind, given), given)
    found, received = calls.call("alltoall", given, splits=[2])
    assert found.tolist() == [[0, 1], [2, 3]]
    assert received.tolist() == [2]
    assert calls.call("join") == 0
    child = os.fork()
    if not child:  # the job is its parent's
        try:
            calls.start("barrier")
        except RuntimeError as error:
            os._exit("forked" in str(error))
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert np.array_equal(calls.call("allreduce", given, op=Op.MAX), given)
    calls.close()
    calls.close()


def test_a_call_that_some_ranks_have_not_made_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: now)
    ranks = Coordinator()
    assert ranks.due_s() is None
    asked = Asked(kind="allreduce", name="allreduce.loss", ranks=[0, 1, 2], types=["float32"], shapes=[[1]])
    assert Asked(**unpacked(packed(asked))[0]) == asked
    assert ranks.heard(1, asked, b"") == []
    assert ranks.due_s() == coordinator.STALL_S
    assert ranks.stalled() == []
    now = coordinator.STALL_S
    [line] = ranks.stalled()
    assert "allreduce.loss" in line
    assert "rank 0, 2:" in line
    assert ranks.stalled() == []
    assert ranks.due_s() is None
    join = Asked(kind="join", name="join", ranks=[0, 1])
    assert ranks.heard(0, join, b"") == []
    now *= 2
    [line] = ranks.stalled()
    assert "rank 1: make as many steps" in line
    assert [answer.last for _, answer, _ in ranks.heard(1, join, b"")] == [1]
    assert ranks.stalled() == []
