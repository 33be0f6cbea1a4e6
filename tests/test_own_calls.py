"""Horovod's collective calls over our streams: NumPy's results, errors alike on all ranks, nothing sent when idle."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
from conftest import PROGRAMS, document, launch, until
from thread_ranks import ThreadRendezvous, at_once, meetings, reach

from hvdtrain.comm.backends.base import Communicator, Endpoint
from hvdtrain.horovod_api import coordinator
from hvdtrain.horovod_api.calls import Calls, Op
from hvdtrain.horovod_api.coordinator import Asked, Coordinator, packed, unpacked


@pytest.mark.parametrize(("ranks", "launcher"), [(3, "horovodrun --gloo"), (4, "mpirun")])
def test_every_call_gives_what_numpy_gives_on_every_rank(ranks: int, launcher: str) -> None:
    """The program compares, and looks at idle ranks; here is what the ranks must have alike."""
    errors = document(launch(ranks, [str(PROGRAMS / "calls_ranks.py")], launcher))["ranks"]
    assert errors == [errors[0]] * ranks


def test_one_process_by_itself_has_the_same_calls() -> None:
    calls = Calls(Communicator(), Endpoint("127.0.0.1", "lo", loopback=True))
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
    ranks = Coordinator(60)
    assert ranks.due_s() is None
    asked = Asked(kind="allreduce", name="allreduce.loss", ranks=[0, 1, 2], types=["float32"], shapes=[[1]])
    assert Asked(**unpacked(packed(asked))[0]) == asked
    assert ranks.heard(1, asked, b"") == []
    assert ranks.due_s() == 60
    assert ranks.stalled() == []
    now = 60
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


def test_those_who_have_joined_are_missed_by_no_call_of_a_process_set_and_count_on_from_the_most() -> None:
    """A join is of the calls of all ranks: zeros in place of a rank would make a sum of fewer ranks wrong."""
    ranks = Coordinator(60)
    some = Asked(kind="allreduce", name="allreduce.some", ranks=[0, 1], types=["float32"], shapes=[[1]])
    joins = [Asked(kind="join", name="join", ranks=[0, 1, 2], unnamed=made) for made in (4, 7, 5)]
    assert ranks.heard(0, some, b"") == []
    assert ranks.heard(1, joins[1], b"") == []
    [(members, answer, _)] = ranks.heard(1, some, b"")
    assert (members, answer.error, answer.call) == ([0, 1], "", None)
    assert ranks.heard(0, joins[0], b"") == []
    [(members, answer, _)] = ranks.heard(2, joins[2], b"")
    assert (members, answer.last, answer.unnamed) == ([0, 1, 2], 2, 7)


def test_a_name_is_free_when_its_call_was_finished_or_found_done() -> None:
    """And not as soon as the call is over, which one rank may see before another."""
    calls = Calls(Communicator(), Endpoint("127.0.0.1", "lo", loopback=True))
    given = np.ones(3)
    first = calls.start("allreduce", given, name="loss")
    calls.call("barrier")  # behind it
    with pytest.raises(ValueError, match=r"allreduce\.loss is under way"):
        calls.start("allreduce", given, name="loss")
    assert calls.done(first)
    second = calls.start("allreduce", given, name="loss")
    calls.finish(first)
    with pytest.raises(ValueError, match=r"allreduce\.loss is under way"):
        calls.start("allreduce", given, name="loss")
    calls.finish(second)
    calls.call("allreduce", given, name="loss")
    calls.close()


def test_calls_of_some_ranks_and_calls_of_all_do_not_get_mixed_up() -> None:
    """However often some made unnamed ones by themselves, and in whatever order each rank names the members."""

    def program(meeting: ThreadRendezvous) -> list[object]:
        calls = Calls(meeting, reach(meeting.rank))
        mine = np.full(2, 1.0 + meeting.rank)
        if meeting.rank == 0:
            calls.call("allreduce", mine, ranks=[0])
        handles = [calls.start("allreduce", mine, op=Op.SUM)]
        handles += [calls.start("allreduce", mine, op=Op.SUM, ranks=[meeting.rank, 1 - meeting.rank], name="both")]
        until(lambda: all(map(calls.done, handles)), 30)
        found = [calls.finish(handle).tolist() for handle in handles]
        told = calls.gather_bytes(b"long" * meeting.rank + b"!")
        calls.call("barrier")
        calls.close()
        return [*found, told]

    programs = [functools.partial(program, meeting) for meeting in meetings(2)]
    assert at_once(programs) == [[[3, 3], [3, 3], [b"!", b"long!"]]] * 2
