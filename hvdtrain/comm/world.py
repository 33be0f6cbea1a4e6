"""This process's rank, the collectives of all ranks, and how a rank stops.

The strategy's carrier connects the ranks that a launcher started: Horovod, the framework's own collectives (native), or
TCP streams of our own; without a launcher there is one rank, and Horovod is not imported. The collectives here are for
small values (counts, checksums, messages). `ranks` is what a training step uses.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, cast

import numpy as np

from hvdtrain.comm.backends.base import Alone, Hosts, Meeting, Reach, lost_peer
from hvdtrain.comm.backends.horovod import HorovodRanks
from hvdtrain.comm.backends.servers import ServerRanks
from hvdtrain.comm.backends.tcp import StreamRanks
from hvdtrain.comm.launch_env import Place as Place
from hvdtrain.comm.launch_env import place as place
from hvdtrain.comm.launch_env import separate_programs as separate_programs
from hvdtrain.comm.rendezvous import Along, meet
from hvdtrain.sentinel.rank import Sentinel
from hvdtrain.sentinel.waiting import LIMIT_S
from hvdtrain.system import exits, survive
from hvdtrain.system.exits import Failure

Carrier = str
"""horovod, or a key of CARRIERS"""

PEER_PATIENCE_S = 2.0
"""A rank that lost a peer, or failed and is not rank 0, waits so long for the launcher to end it before it prints"""


def _native(framework: str, meeting: Meeting, reach: Reach, gpu: bool) -> Alone:
    """The framework's own collectives; the other framework is not imported."""
    if framework == "torch":
        from hvdtrain.comm.backends.ddp import DdpRanks

        return DdpRanks(meeting, reach, gpu=gpu)
    from hvdtrain.comm.backends.mwms import MwmsRanks

    return MwmsRanks(meeting, reach, gpu=gpu)


# name -> what connects ranks that have met: (framework, meeting, reach, gpu)
CARRIERS: dict[Carrier, Callable[[str, Meeting, Reach, bool], Alone]] = {
    "native": _native,
    "streams": lambda _, meeting, reach, gpu: StreamRanks(meeting, reach) if meeting.size > 1 else Alone(),
    "servers": lambda _, meeting, reach, gpu: ServerRanks(meeting, reach),
}


@dataclasses.dataclass(frozen=True)
class Met:
    """Ranks that know of each other, watched by a sentinel: all that a carrier needs to connect them."""

    meeting: Meeting
    sentinel: Sentinel | None
    """None for a process by itself"""
    reach: Reach

    @classmethod
    def by(cls, meeting: Meeting, stall_limit_s: float = LIMIT_S) -> Met:
        """Starts the sentinel. Collective."""
        global _sentinel
        if meeting.size == 1:
            return cls(meeting, None, Reach("127.0.0.1", "lo", loopback=True))
        first = meeting.local_rank == 0
        sentinel = Sentinel(meeting.rank, first=first, secret=meeting.secret, stall_limit_s=stall_limit_s)
        _sentinel = sentinel
        atexit.register(sentinel.left)
        sentinel.join(lambda mine: [json.loads(each) for each in meeting.gather(json.dumps(mine).encode())])
        if way := sentinel.way:
            return cls(meeting, sentinel, Reach(way.source, way.device))
        if sentinel.hosts > 1:
            return cls(meeting, sentinel, Reach(socket.gethostname(), None))
        return cls(meeting, sentinel, Reach("127.0.0.1", "lo", loopback=True))

    @classmethod
    def at(cls, where: Place, stall_limit_s: float = LIMIT_S) -> Met:
        """The ranks that the launcher started, found without Horovod. Collective. Raises Failure (69, 77) if they
        cannot find each other."""
        return cls.by(meet(where), stall_limit_s)

    def along(self, ranks: Sequence[int]) -> Met:
        """The ranks `ranks`, of which this is one. Collective: each rank of the whole gives those that it is among."""
        return dataclasses.replace(self, meeting=Along(self.meeting, ranks))


def digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of names and values."""
    sha256 = hashlib.sha256()
    for name, array in arrays.items():
        sha256.update(name.encode())
        sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()


class World:
    """The ranks of this job. Every rank must call the collective methods, in the same order.

    `carrier`: what connects the ranks: horovod, native (the framework's own collectives), streams or servers.
    `framework`: "torch" or "tensorflow". `gpu`: whether gradients are on a GPU. `timeline`: whether Horovod's timeline
    may be started. `met`: the ranks, if they have met before and go on after this world. `stall_limit_s`: see
    `sentinel.stalls`; 0 for none. `rank` and `size` count the ranks alive in the last collective; with servers ranks
    may die. `collectives` names the library in use: none, gloo, mpi, nccl, grpc, streams or servers. Raises Failure
    (69) if Horovod is missing or the ranks cannot be connected.
    """

    def __init__(
        self,
        framework: str,
        gpu: bool = False,
        *,
        carrier: Carrier = "horovod",
        timeline: bool = False,
        met: Met | None = None,
        stall_limit_s: float = LIMIT_S,
    ) -> None:
        self.place = place()
        self.host = socket.gethostname()
        self.framework = framework
        self.links: list[dict[str, Any]] = []
        self.ranks: Alone
        self._met_before = met is not None
        if carrier == "horovod":
            if stall_limit_s:  # Horovod's own check names the ranks; it takes whole seconds
                os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, round(stall_limit_s))))
            alone = self.place.launcher == "alone"
            self.met = met or Met.by(
                Alone() if alone else HorovodRanks(framework, gpu=gpu, timeline=timeline), stall_limit_s
            )
            self.ranks = cast(Alone, self.met.meeting)
        else:
            self.met = met or Met.at(self.place, stall_limit_s)
            self.ranks = CARRIERS[carrier](framework, self.met.meeting, self.met.reach, gpu)
        self._sentinel = self.met.sentinel
        self.local_rank, self.local_size = self.ranks.local_rank, self.ranks.local_size
        self.collectives = self.ranks.carrier
        self._local_sent_bytes = 0

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def take_local_sent_bytes(self) -> int:
        """Payload that this rank gave to other ranks of its host since the last call."""
        before, self._local_sent_bytes = self._local_sent_bytes, self.ranks.local_sent_bytes
        return self._local_sent_bytes - before

    def leave(self) -> None:
        """Disconnects from the other ranks; a rank may wait here for the slowest."""
        if self._sentinel is not None and not self._met_before:
            self._sentinel.left()
        self.ranks.leave()
        if not self._met_before:
            self.met.meeting.leave()

    # --- collectives on small host arrays -----------------------------------------------------------------------

    def sum(self, values: np.ndarray, name: str) -> np.ndarray:
        """Element-wise sum over ranks, same shape and type. `name` must be the same on all ranks."""
        return self.ranks.sum(values, name)

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able value of every rank, in rank order, on all ranks."""
        return [json.loads(each) for each in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order, on all ranks."""
        return self.ranks.gather(mine)

    def agreed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same arrays on all ranks: this rank's own if all ranks' SHA-256 are equal, else rank 0's, broadcast.

        Ranks that make their arrays from the same seed exchange 64 characters instead of the arrays, which take more
        than a minute for ResNet-34 at 10 Mbit/s.
        """
        if len(set(self.gather(digest(arrays)))) == 1:
            return arrays
        return {name: self.ranks.broadcast(array, name) for name, array in arrays.items()}

    # --- the training step --------------------------------------------------------------------------------------

    @property
    def servers(self) -> ServerRanks:
        """Ranks for a strategy with parameter servers."""
        return cast(ServerRanks, self.ranks)

    def may_die(self) -> None:
        """Declares that the job continues if this rank dies."""
        survive.may_die()
        if self._sentinel is not None:
            self._sentinel.may_die()

    def hosts(self, vector: np.ndarray) -> contextlib.AbstractContextManager[Hosts | None]:
        """With streams: sums a 1-d vector over ranks, in place; see `collectives.Alone.hosts`."""
        return self.ranks.hosts(vector)

    def timeline(self) -> HorovodRanks:
        """What starts and stops Horovod's Chrome trace of every tensor, in a world made with `timeline`."""
        assert isinstance(self.ranks, HorovodRanks)
        return self.ranks

    # --- hosts and the links between them -----------------------------------------------------------------------

    def keeps(self, folder: str, command: str) -> None:
        """Tells the sentinel the run's folder and the command that resumes it, for its message when it ends the job."""
        if self._sentinel is not None:
            self._sentinel.keeps(folder, command)

    def measure_links(self) -> list[dict[str, Any]]:
        """Measures the goodput of each host's link now (1.2 s); empty on a single host. Collective.

        Returns the fields of `records.Manifest.links` (NIC, throttle, goodput) and keeps them in `self.links`.
        """
        if self._sentinel is not None:
            self.gather("measure")  # a barrier: all hosts measure at once, without other traffic of ours
            self.links = [link for link in self.gather(self._sentinel.link()) if link]
        return self.links

    def nic_counters(self) -> tuple[int, int] | None:
        """Bytes that the link's NIC has sent and received; None on a single host and on all but a host's first rank."""
        return None if self._sentinel is None else self._sentinel.nic_counters()

    def nic_bytes(self, since: tuple[int, int] | None) -> dict[str, Any] | None:
        """This host's entry of `records.Summary.nic_bytes` since the counters `since`; None where there are none."""
        now = self.nic_counters()
        if self._sentinel is None or since is None or now is None:
            return None
        sent, received = (after - before for after, before in zip(now, since, strict=True))
        return {"host": self.host, "nic": self._sentinel.nic, "sent_bytes": sent, "received_bytes": received}


# --- ending: the sentinel must tell an ordinary end from a fault ------------------------------------------------------

_sentinel: Sentinel | None = None
"""To which this process reports how it ends"""


# --- stopping --------------------------------------------------------------------------------------------------------


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a request to stop after the current step.

    Before `resumable` is set there is nothing to save, and a signal ends the process with 128 + its number. A second
    SIGINT always does.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self.resumable = False
        self.peer_lost = False
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._arrived) for number in numbers}

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        repeated = number == signal.SIGINT and self.requested is signal.SIGINT
        if self.peer_lost or repeated or not self.resumable:
            os._exit(128 + number)
        self.requested = signal.Signals(number)

    def restore(self) -> None:
        """Signals do what they did before this object was made."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def run(program: Callable[[StopSignal], int], *, debug: bool) -> None:
    """Runs a rank's program and ends the process so that the whole job ends, with the cause as its last output.

    A Failure is one line, printed once per job; another exception is a traceback, and its last line again. After an
    error the process ends at once without leaving the world, because a rank that stayed in its exit handlers would keep
    its peers waiting for ever. A rank that only lost a peer prints nothing unless its launcher leaves it alive.
    """
    _refuse_wrong_start()
    stop = StopSignal()
    try:
        code = program(stop)
        sys.stdout.flush()
    except Exception as error:
        stop.peer_lost = True
        code = _told(error, debug)
    _end(code)


def guard(*, debug: bool) -> None:
    """From here on an exception that ends this process ends the whole job, as `run` does it: for a user's script. In a
    process by itself only a Failure is told so."""
    _refuse_wrong_start()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = isinstance(error, Failure) or place().launcher != "alone"
        if ours and isinstance(error, Exception):
            sys.stderr = sys.__stderr__  # torch.distributed's hook calls this one, and holds back what it writes
            _end(_told(error, debug, _line_of_script(trace)))
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = uncaught


def _refuse_wrong_start() -> None:
    """Ends this process if its environment does not make it a rank of one job."""
    try:
        place()
        problem, code = separate_programs(), exits.USAGE
    except Failure as failure:
        problem, code = (str(failure), True), failure.code
    if problem:
        what, first = problem
        if first:
            print(f"hvdtrain: {what}", file=sys.stderr, flush=True)
        raise SystemExit(code)


def _line_of_script(trace: TracebackType | None) -> str:
    """Which line of the user's script an exception came through last; empty if none."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
    return f"{Path(script).name}:{lines[-1]}: " if script and lines else ""


def _told(error: Exception, debug: bool, at: str = "") -> int:
    """Tells the user what ended this rank, and `at` which line of a script; the exit code."""
    where, debug = place(), debug or os.environ.get("HVDTRAIN_DEBUG", "").lower() == "true"
    if isinstance(error, OSError) and not debug:
        error = exits.of_system(error) or error
    if isinstance(error, Failure):
        if debug:
            traceback.print_exception(error)
        if where.rank:
            time.sleep(PEER_PATIENCE_S)
        print(f"hvdtrain: {_who(where)}{at}{error}", file=sys.stderr, flush=True)
        return error.code
    if isinstance(error, BrokenPipeError) and where.launcher == "alone":  # `--strategy help | head`
        sys.stdout = None
    elif lost_peer(error):
        time.sleep(PEER_PATIENCE_S)
        print(f"hvdtrain: {_who(where)}lost contact with another rank: {error}", file=sys.stderr, flush=True)
    else:
        trace = "".join(traceback.format_exception(error))
        first_line = exits.printable(str(error).partition("\n")[0])
        sys.stderr.write(f"{trace}hvdtrain: {_who(where)}failed: {type(error).__name__}: {first_line}\n")
        sys.stderr.flush()
    return exits.FAILED


def _end(code: int) -> NoReturn:
    """Ends this process, and with an error the job: the sentinel tells the other ranks."""
    if code and place().launcher != "alone":
        if _sentinel is not None and code != exits.RESUMABLE:
            _sentinel.failed()
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _who(where: Place) -> str:
    return f"rank {where.rank} on {socket.gethostname()}: " if where.rank else ""
