"""Horovod's collective calls on the TCP backend: the results equal NumPy's, and all ranks raise the same errors."""

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
from hvdtrain.horovod_api.coordinator import Coordinator, Request, pack, unpack


def test_results_equal_numpys_on_every_rank() -> None:
    """The program compares the results and watches idle ranks. Errors must be the same on all ranks."""
    errors = document(launch(4, [str(PROGRAMS / "calls_ranks.py")], "forks"))["ranks"]
    assert errors == [errors[0]] * 4


def test_a_single_process_has_the_same_calls() -> None:
    calls = Calls(Communicator(), Endpoint("127.0.0.1", "lo", loopback=True))
    array = np.arange(6, dtype=np.int32).reshape(3, 2)
    for kind in ("allreduce", "broadcast", "allgather"):
        assert np.array_equal(calls.call(kind, array), array)
    result, received = calls.call("alltoall", array, splits=[2])
    assert result.tolist() == [[0, 1], [2, 3]]
    assert received.tolist() == [2]
    child = os.fork()
    if not child:  # the job belongs to the parent
        try:
            calls.start("barrier")
        except RuntimeError as error:
            os._exit("forked" in str(error))
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert np.array_equal(calls.call("allreduce", array, op=Op.MAX), array)
    calls.close()
    calls.close()


def test_a_call_that_some_ranks_have_not_made_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: now)
    ranks = Coordinator(60)
    assert ranks.seconds_to_next_report() is None
    request = Request(kind="allreduce", name="allreduce.loss", ranks=[0, 1, 2], types=["float32"], shapes=[[1]])
    assert Request(**unpack(pack(request))[0]) == request
    assert ranks.add(1, request, b"") == []
    assert ranks.seconds_to_next_report() == 60
    assert ranks.report_stalled() == []
    now = 60
    [line] = ranks.report_stalled()
    assert "allreduce.loss" in line
    assert "rank 0, 2;" in line
    assert ranks.report_stalled() == []
    assert ranks.seconds_to_next_report() is None


def test_a_name_is_free_once_its_call_is_finished_or_polled_as_done() -> None:
    """A name is not free as soon as the call is over, because ranks learn of that at different times."""
    calls = Calls(Communicator(), Endpoint("127.0.0.1", "lo", loopback=True))
    array = np.ones(3)
    first = calls.start("allreduce", array, name="loss")
    calls.call("barrier")  # runs after the allreduce
    with pytest.raises(ValueError, match=r"allreduce\.loss is in progress"):
        calls.start("allreduce", array, name="loss")
    assert calls.done(first)
    second = calls.start("allreduce", array, name="loss")
    calls.finish(first)
    with pytest.raises(ValueError, match=r"allreduce\.loss is in progress"):
        calls.start("allreduce", array, name="loss")
    calls.finish(second)
    calls.call("allreduce", array, name="loss")
    calls.close()


def test_calls_of_a_process_set_do_not_mix_with_calls_of_all_ranks() -> None:
    """Some ranks make unnamed calls alone, and each rank lists the members in another order."""

    def program(meeting: ThreadRendezvous) -> list[object]:
        calls = Calls(meeting, reach(meeting.rank))
        array = np.full(2, 1.0 + meeting.rank)
        if meeting.rank == 0:
            calls.call("allreduce", array, ranks=[0])
        handles = [calls.start("allreduce", array, op=Op.SUM)]
        handles += [calls.start("allreduce", array, op=Op.SUM, ranks=[meeting.rank, 1 - meeting.rank], name="both")]
        until(lambda: all(map(calls.done, handles)), 30)
        results = [calls.finish(handle).tolist() for handle in handles]
        calls.call("barrier")
        calls.close()
        return results

    programs = [functools.partial(program, meeting) for meeting in meetings(2)]
    assert at_once(programs) == [[[3, 3], [3, 3]]] * 2


def test_a_rank_that_has_joined_counts_as_zeros() -> None:
    """Ranks with 3 and 5 batches: sums have zeros of the first, and means divide by both, as in Horovod."""

    def program(meeting: ThreadRendezvous) -> list[object]:
        calls = Calls(meeting, reach(meeting.rank))
        long = np.full(5000, 1.0 + meeting.rank, np.float32)  # does not travel with the request
        results: list[object] = []
        for _ in range(3 + 2 * meeting.rank):
            mean, total = calls.call("allreduce", long[:2]), calls.call("allreduce", [long, long[:1]], op=Op.SUM)
            results.append([float(mean[1]), float(total[0][-1]), float(total[1][0])])
        if meeting.rank:
            for kind in ("allgather", "broadcast", "alltoall", "reducescatter"):
                with pytest.raises(RuntimeError, match=f"{kind} is not supported with join"):
                    calls.call(kind, long[:2], root=1)
        results.append(calls.call("join"))
        results.append(calls.call("allreduce", long[:1], op=Op.SUM).tolist())
        calls.close()
        return results

    programs = [functools.partial(program, meeting) for meeting in meetings(2)]
    both, alone, after = [1.5, 3, 3], [1, 2, 2], [1, [3]]
    assert at_once(programs) == [[both] * 3 + after, [both] * 3 + [alone] * 2 + after]
