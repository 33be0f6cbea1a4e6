"""The job that a script's process is a rank of: the strategy that it asks for, and what carries its calls.

Horovod's Python functions stay what they are. With Horovod's own exchange its library carries them, and nothing of ours
is in their way. With a strategy on our streams no Horovod thread runs: under the same functions stand a `Basics`, which
answers who is here, and the framework's operations, which the engine (`calls`) carries. The calls have
streams of their own, connected by `init`, and a strategy others, connected at first use, so that an exchange in the
background never meets a call.

A script that first names its strategy when Horovod already carries calls changes over there: the ranks meet through
Horovod once more, connect, and shut Horovod down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hvdtrain.comm.backends.base import Communicator
from hvdtrain.comm.backends.horovod import HorovodCommunicator
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.lifecycle import guard
from hvdtrain.comm.world import RankGroup, connect
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import record
from hvdtrain.horovod_api.basics import Basics
from hvdtrain.horovod_api.calls import Calls
from hvdtrain.strategies import Exchange, Strategy, parse
from hvdtrain.strategies.cost import Shape
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

VARIABLE = "HVDTRAIN_STRATEGY"
NOT_INITIALISED = "Horovod has not been initialized; use hvd.init()."
"""Horovod's words"""


@dataclasses.dataclass(frozen=True)
class Front:
    """Horovod's Python functions for one framework, and what goes under them when streams carry."""

    framework: str
    """torch or tensorflow"""
    module: ModuleType
    """horovod.torch.mpi_ops or horovod.tensorflow.mpi_ops"""
    holder: str
    """That module's attribute that holds the operations of the framework"""
    operations: Callable[[Job, Any], Any]
    """Makes those that stand in for them: of the job, and Horovod's own"""

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """`hvd.init`: meets the other ranks; Horovod's documentation tells the arguments. A second time does nothing.

        Raises Failure if HVDTRAIN_STRATEGY is none that a script can have, or the ranks cannot find each other.
        """
        init(self, comm, process_sets)

    def shutdown(self) -> None:
        """`hvd.shutdown`: writes the end of the run's records, and leaves the other ranks."""
        record.finish()
        self.module.shutdown()


class Elastic:
    """Stands for Horovod's module `elastic`, which has no counterpart: every use raises NotImplementedError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"hvd.elastic.{name}: the number of ranks is fixed from start to end. Save at the end of each epoch (the "
            "model and optimizer.state_dict(), or model.save()), and start the script again, which torchrun "
            "--max-restarts does by itself; the sentinel ends a job that lost a rank "
            "(docs/reference/horovod-compatibility.md)"
        )


def fresh(exchange: Exchange, world: Communicator, shapes: Sequence[Shape]) -> Strategy:
    """A strategy for arrays of these shapes that has exchanged nothing yet."""
    return exchange.make(TrainConfig(strategy=str(exchange)), world, shapes)


class Job:
    """The ranks of this process's job while streams carry its calls."""

    def __init__(self, met: RankGroup, framework: str) -> None:
        """Collective."""
        self.group, self._framework = met, framework
        meeting = met.rendezvous
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        told = [
            each.decode().split() for each in meeting.gather_bytes(f"{socket.gethostname()} {self.local_rank}".encode())
        ]
        hosts = list(dict.fromkeys(host for host, _ in told))
        alike = [hosts.index(host) for host, local_rank in told if int(local_rank) == self.local_rank]
        self.cross_rank, self.cross_size = alike.index(hosts.index(told[self.rank][0])), len(alike)
        counts = [sum(host == name for host, _ in told) for name in hosts]
        self.is_homogeneous = len(set(counts)) == 1
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(self.size))}
        """Process sets by their number"""
        self._worlds = weakref.WeakSet[Communicator]()
        """Each lives as long as whoever exchanges in it"""
        self.calls = Calls(meeting, met.endpoint)
        """The engine of the script's calls"""

    def strategy(self, exchange: Exchange, shapes: Sequence[Shape]) -> tuple[Strategy, Communicator]:
        """A strategy for arrays of these shapes, on streams of its own. Collective."""
        world = self.world()
        return fresh(exchange, world, shapes), world

    def world(self) -> Communicator:
        """The ranks, joined by streams that nobody else uses. Collective."""
        with _connecting:
            world = connect(self._framework, backend="tcp", group=self.group)
        self._worlds.add(world)
        return world

    def close(self) -> None:
        """Closes all streams. A rank that still waits for this one learns that it is gone."""
        for world in self._worlds:
            world.shutdown()
        self.calls.close()


_connecting = threading.Lock()
_met: RankGroup | None = None
"""Once in a process: a job may be shut down and initialised again"""
_job: Job | None = None
_fronts: dict[str, Front] = {}
"""Those that were initialised, by framework"""
_beneath: list[tuple[Any, str, Any]] = []
"""What `_carry` replaced: whose attribute, its name, what was there"""


def wanted(strategy: str | None = None) -> Exchange | None:
    """The exchange that a script asks for: by an argument, else by HVDTRAIN_STRATEGY; None for Horovod's own.

    Raises Failure (78) for one that is unknown, or that a script cannot have.
    """
    launcher = launch_env().launcher
    text = strategy or os.environ.get(VARIABLE)
    if text is None and launcher == "torchrun":
        text = DEFAULT_REDUCER
    exchange = parse(text or TrainConfig.strategy)
    able = exchange.capabilities
    if able.backend == "horovod":
        if launcher == "torchrun":
            why = f"Horovod cannot connect torchrun's ranks; give {DEFAULT_REDUCER}, or use horovodrun or mpirun"
            raise Failure(f"strategy {exchange}: {why}", exits.BAD_CONFIG)
        return None
    why = ""
    if able.backend == "native":
        why = f"it is PyTorch's DistributedDataParallel or Keras' own; take {DEFAULT_REDUCER}, or hvd.ddp_hook(...)"
    elif able.backend != "tcp":
        why = f"its servers update the weights in place of the script's optimizer; take {DEFAULT_REDUCER}"
    if why:
        raise Failure(f"strategy {exchange}: a script cannot have it: {why}", exits.BAD_CONFIG)
    return exchange


def stall_limit_s() -> float:
    """HVDTRAIN_STALL_LIMIT, else the workloads' default. Raises Failure (78)."""
    text = os.environ.get("HVDTRAIN_STALL_LIMIT", str(TrainConfig.stall_limit))
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise Failure(f"HVDTRAIN_STALL_LIMIT={text}: give seconds >= 0, as in 60", exits.BAD_CONFIG)


def init(front: Front, comm: Any = None, process_sets: Any = None, strategy: str | None = None) -> None:
    """What `hvd.init()` does; a second time does nothing. Collective. `strategy`: if it is known already.

    Raises Failure if the strategy is none that a script can have, or the ranks cannot find each other.
    """
    global _met, _job
    if front.framework in _fronts and front.module.is_initialized():
        return
    if _met is None:
        guard(debug=False)
    exchange = wanted(strategy)
    if exchange is None and _job is None:
        front.module.init(comm, process_sets)
        if front.framework == "torch":  # TensorFlow would compute, and then nobody may choose its GPUs and threads
            _meet(front)
    else:
        if _met is None:
            _met = RankGroup.launched(launch_env(), stall_limit_s())
            if _met.rendezvous.rank == 0 and strategy is None and os.environ.get(VARIABLE) is None:
                _tell(f"Horovod cannot connect torchrun's ranks: {exchange} carries; {VARIABLE} names another strategy")
        _job = _job or Job(_met, front.framework)
        _carry(front, _job)
        front.module.init(comm, process_sets)
    _fronts[front.framework] = front


def exchange(strategy: str | None = None) -> Exchange | None:
    """The exchange that an optimizer is to have: `wanted`, of a job that is initialised; None for Horovod's own.

    Changes over from Horovod to streams if the job has to. Collective. Raises ValueError before `init`, Failure if a
    script cannot have the strategy.
    """
    found = wanted(strategy)
    if not any(front.module.is_initialized() for front in _fronts.values()):
        raise ValueError(NOT_INITIALISED)
    if found is None and _job is not None:
        why = f"Horovod does not run, since {VARIABLE} or an earlier optimizer asked for another strategy"
        raise Failure(f"strategy {strategy}: {why}; give {DEFAULT_REDUCER}", exits.BAD_CONFIG)
    if _job is None:
        _meet(next(iter(_fronts.values())))
        if found is not None:
            _change_over()
    return found


def _meet(front: Front) -> None:
    """The ranks that Horovod connects get to know each other, once. Collective."""
    global _met
    if _met is None and front.module.size() > 1:
        _met = RankGroup.watched(HorovodCommunicator(front.framework, gpu=False, timeline=False), stall_limit_s())


def recorder(
    exchange: Exchange | None, world: Communicator | None, *, parameters: int, device: str, threads: int
) -> record.Steps | None:
    """What the steps of an optimizer are told to; None if the script is not to be recorded. The first one opens the run
    folder. Collective.

    `exchange` and `world`: of the strategy; None where Horovod's calls exchange. The others: see `record.begin`.
    """
    if record.begun:
        return record.steps()
    if _job is not None:
        ranks, gather, own = world or _job.world(), _job.calls.gather_bytes, DEFAULT_REDUCER
    else:
        ranks = connect(next(iter(_fronts)), group=_met or RankGroup.watched(Communicator()))
        gather, own = ranks.gather_bytes, TrainConfig.strategy
    exchange = exchange or parse(own)
    return record.begin(ranks, exchange, parameters=parameters, device=device, threads=threads, gather=gather)


def job() -> Job:
    """The job that streams carry. Raises ValueError if there is none."""
    if _job is None:
        raise ValueError(NOT_INITIALISED)
    return _job


def check_beginning(world: Communicator, weights: int, how: str) -> None:
    """Raises ValueError, which says `how` to mend it, if ranks that are to train by themselves begin with different
    weights, of which these are each rank's checksum. Collective."""
    told = world.gather(weights)
    if len(set(told)) > 1:
        other = next(rank for rank, found in enumerate(told) if found != told[0])
        raise ValueError(f"rank {other} and rank 0 begin with different weights: {how} before the first step")


def _change_over() -> None:
    """From Horovod to streams: the ranks meet through Horovod, connect, and shut it down."""
    global _met, _job
    front = next(iter(_fronts.values()))
    sets = front.module._basics._get_process_set_ids_and_ranks()
    met = _met or RankGroup.watched(Communicator())
    base = TcpCommunicator(met.rendezvous, met.endpoint) if met.rendezvous.size > 1 else met.rendezvous
    _met = dataclasses.replace(met, rendezvous=base)  # what connects later meets over that
    _job = Job(_met, front.framework)  # all ranks have come here now, and need Horovod no more
    _job.sets = {number: tuple(ranks) for number, ranks in sets.items()}
    for one in _fronts.values():
        one.module.shutdown()
        _carry(one, _job)
    if _job.rank == 0:
        _tell(f"Horovod has shut down, the strategy's streams carry from here; {VARIABLE} would leave it out at once")


def _carry(front: Front, job: Job) -> None:
    """Puts the job under Horovod's functions."""
    module, basics = front.module, front.module._basics
    stand_ins = (
        (basics, "MPI_LIB_CTYPES", Basics(job, basics.MPI_LIB_CTYPES, shutdown)),
        (module, front.holder, front.operations(job, getattr(module, front.holder))),
    )
    for owner, name, ours in stand_ins:
        _beneath.append((owner, name, getattr(owner, name)))
        setattr(owner, name, ours)


def shutdown() -> None:
    """Closes the streams and gives Horovod's functions their own library back; a second time does nothing."""
    global _job
    record.finish()
    while _beneath:
        setattr(*_beneath.pop())
    if _job is not None:
        _job.close()
    _job = None
    _fronts.clear()


def _tell(line: str) -> None:
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
