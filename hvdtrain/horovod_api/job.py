"""The job of a user's script: its ranks, its strategy, and the backend that carries out its calls.

With Horovod's own exchange, Horovod's library carries the calls, and the public names are Horovod's functions. With a
strategy, no Horovod thread runs: the same names are hvdtrain's functions on the TCP backend (see `installed`). The
calls and each strategy have separate connections, so an exchange in the background never meets a call.

If a script requests its strategy after Horovod has started, the ranks exchange their addresses through Horovod,
connect, and shut Horovod down. What Horovod has made by then, such as its optimizers, can no longer be used.

With `launch/mpirun.sh --elastic` an `ElasticCommunicator` connects the ranks. If a host is lost, it connects the others
again, and the job and its strategies connect again through it (see `elastic`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm import lifecycle
from hvdtrain.comm import world as comm_world
from hvdtrain.comm.backends.base import Communicator, RankGroup
from hvdtrain.comm.backends.horovod import HorovodCommunicator
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.stream import connect_ranks, swap
from hvdtrain.config.options import TrainConfig
from hvdtrain.horovod_api import process_sets as sets
from hvdtrain.horovod_api import ranks, record
from hvdtrain.horovod_api.installed import Horovod
from hvdtrain.horovod_api.ranks import NOT_INITIALISED, Job
from hvdtrain.horovod_api.ranks import is_connected as is_connected
from hvdtrain.horovod_api.ranks import job as job
from hvdtrain.strategies import Spec, automatic, parse, presets
from hvdtrain.strategies.automatic import Rule
from hvdtrain.strategies.cost import Shape
from hvdtrain.strategies.registry import DEFAULT_REDUCER
from hvdtrain.system import exits, install
from hvdtrain.system.exits import Failure
from hvdtrain.training import profiled

VARIABLE = "HVDTRAIN_STRATEGY"
WITHOUT_HOROVOD = {"torchrun": "torchrun", "elastic": "--elastic", "torch.distributed": "torch.distributed"}
"""Launchers that Horovod does not support, and their names in messages"""


class Front(Horovod):
    """Horovod's functions for one framework, `init` and `shutdown`."""

    def __init__(self, framework: str, *modules: str) -> None:
        super().__init__(framework, *modules)
        _known.append(self)

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """`hvd.init`, with Horovod's arguments. A second call does nothing.

        Raises Failure if scripts cannot use the strategy in HVDTRAIN_STRATEGY, or the ranks cannot find each other.
        """
        init(self, comm, process_sets)

    def shutdown(self) -> None:
        """`hvd.shutdown`: writes the end of the run's records and disconnects this rank."""
        record.finish()
        if is_connected():
            shutdown()
        else:
            self.end_horovod()

    def is_initialized(self) -> bool:
        """Whether Horovod or the TCP backend has connected the ranks."""
        return is_connected() or (not self.missing and bool(self.get("is_initialized")()))

    def end_horovod(self) -> None:
        """Shut Horovod's library down, if there is one."""
        if not self.missing:
            self.get("shutdown")()


_group: RankGroup | None = None
"""Outlives a job, which may be shut down and initialised again"""
_known: list[Front] = []
"""The fronts that were imported"""
_fronts: dict[str, Front] = {}
"""The initialised fronts, by framework"""


def rule(strategy: str | None = None) -> Rule | None:
    """What `strategy`, or else HVDTRAIN_STRATEGY, lets `auto` choose; None if it names a strategy.

    Raises Failure (78) for a setting that `auto` does not have.
    """
    return automatic.rule(strategy or os.environ.get(VARIABLE) or "")


def wanted(strategy: str | None = None, *, chooses: bool = False) -> Spec | None:
    """The exchange that `strategy`, or else HVDTRAIN_STRATEGY, asks for; None for Horovod's own.

    `chooses`: whether the caller can choose later; until then, `auto` gets the default reducer. `hvdtrain plan` runs
    one process, for which all strategies are alike.

    Raises Failure (78) if the strategy is unknown, or scripts cannot use it.
    """
    launcher = launch_env().launcher
    text = strategy or os.environ.get(VARIABLE)
    if launcher == "elastic" and rule(strategy):
        raise Failure(f"--elastic: scripts cannot use strategy auto; hint: use {DEFAULT_REDUCER}", exits.BAD_CONFIG)
    if profiled.observer() or rule(strategy):
        if not chooses:
            problem = "strategy auto and hvdtrain plan do not work with TensorFlow's optimizers and tapes"
            raise Failure(f"{problem}; hint: name a strategy", exits.BAD_CONFIG)
        text = DEFAULT_REDUCER
    missing = next((front.missing for front in _known if front.missing), "")
    if not text and (launcher in WITHOUT_HOROVOD or (missing and launcher == "alone")):
        text = DEFAULT_REDUCER
    exchange = parse(resolved(text or TrainConfig.strategy))
    backend = exchange.capabilities.backend
    if backend == "horovod" and launcher not in WITHOUT_HOROVOD:
        if missing:
            hint = f"set {VARIABLE}={DEFAULT_REDUCER} or another strategy that does not need Horovod"
            raise Failure(
                f"strategy {exchange} under {launcher}: {missing}; hint: {install.horovod()}, or {hint}",
                exits.BAD_CONFIG,
            )
        return None
    name = WITHOUT_HOROVOD.get(launcher)
    reasons = {
        "tcp": "",
        "horovod": f"Horovod does not support {name}; hint: use {DEFAULT_REDUCER}, horovodrun or mpirun",
        "native": f"scripts cannot use PyTorch's or Keras' own exchange; hint: use {DEFAULT_REDUCER}",
    }
    servers = f"scripts cannot use parameter servers, which update the weights themselves; hint: use {DEFAULT_REDUCER}"
    if reason := reasons.get(backend, servers):
        raise Failure(f"strategy {exchange}: {reason}", exits.BAD_CONFIG)
    if launcher == "elastic" and not exchange.capabilities.elastic:
        problem = f"--elastic: ranks with strategy {exchange} cannot continue without a lost host"
        raise Failure(f"{problem}; hint: use {' or '.join(presets.NAMES)}", exits.BAD_CONFIG)
    return exchange


@functools.cache
def resolved(text: str) -> str:
    """The strategy of a preset, which rank 0 prints; another strategy string as it is. Raises Failure (78)."""
    if (preset := presets.of(text)) is None:
        return text
    strategy = presets.strategy(preset, None)
    if launch_env().rank == 0:
        hint = f"for SGD and Muon `hvdtrain strategies {preset}` names others"
        say(f"strategy {preset} is {strategy}, as for Adam, because a script's optimizer is not known yet; {hint}")
    return strategy


def init(front: Front, comm: Any = None, process_sets: Any = None, strategy: str | None = None) -> None:
    """Implements `hvd.init()`; a second call does nothing. Collective. `strategy` takes precedence over the variable.

    Raises Failure if scripts cannot use the strategy, or the ranks cannot find each other.
    """
    global _group
    if front.framework in _fronts and front.is_initialized():
        return
    if _group is None:
        lifecycle.guard(debug=False)
    exchange = wanted(strategy, chooses=True)
    if exchange is None and ranks.current is None:
        front.get("init")(comm, process_sets)
        sets.global_process_set.ranks = list(range(front.get("size")()))
        if front.framework == "torch":  # in TensorFlow it would compute, which fixes the GPUs and threads
            _form_group(front)
    else:
        if _group is None:
            _group = _launched(front)
            name = WITHOUT_HOROVOD.get(launch_env().launcher)
            if name and _group.rendezvous.rank == 0 and strategy is None and os.environ.get(VARIABLE) is None:
                say(f"Horovod does not support {name}; using {exchange} (set {VARIABLE} to change it)")
        if launch_env().launcher == "elastic" and process_sets:
            problem = "--elastic cannot be combined with process sets; hint: leave process_sets= out"
            raise Failure(problem, exits.BAD_CONFIG)
        if ranks.current is None:
            ranks.current = Job(_group, front.framework)
            _leave_at_exit()
        sets.begin(comm, process_sets)
    _fronts[front.framework] = front


def _launched(front: Front) -> RankGroup:
    """Forms the group of the ranks that the launcher started. Collective."""
    environment = launch_env()
    if environment.launcher != "elastic":
        return comm_world.launched(environment, comm_world.stall_limit_s())
    group = comm_world.launched(environment, comm_world.stall_limit_s(), elastic=True)
    os.environ["HOROVOD_ELASTIC"] = "1"  # Horovod's functions for graphs then ask for the number of ranks in each step
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # how the launcher asks ranks to stop
        signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(128 + signal.SIGTERM))
    return dataclasses.replace(group, rendezvous=comm_world.connect(front.framework, backend="tcp", group=group))


def exchange(strategy: str | None = None) -> Spec | None:
    """The exchange for an optimizer of an initialised job, see `wanted`; None for Horovod's own.

    Switches from Horovod to the TCP backend if needed. Collective. Raises ValueError before `init`, and Failure if
    scripts cannot use the strategy.
    """
    exchange = wanted(strategy, chooses=True)
    if not any(front.is_initialized() for front in _fronts.values()):
        raise ValueError(NOT_INITIALISED)
    if exchange is None and ranks.current is not None:
        reason = f"Horovod is not running, because {VARIABLE} or an earlier optimizer requested another strategy"
        raise Failure(f"strategy {strategy}: {reason}; hint: use {DEFAULT_REDUCER}", exits.BAD_CONFIG)
    if ranks.current is None:
        _form_group(next(iter(_fronts.values())))
        if exchange is not None:
            _switch_to_tcp()
    return exchange


def _form_group(front: Front) -> None:
    """Forms the group of the ranks that Horovod connects, once. Collective."""
    global _group
    if _group is None and front.get("size")() > 1:
        _group = comm_world.watched(HorovodCommunicator(front.framework, gpu=False), comm_world.stall_limit_s())


def recorder(
    exchange: Spec | None, world: Communicator | None, *, shapes: Sequence[Shape], device: str, threads: int
) -> record.Steps | None:
    """Records the steps of an optimizer; None if the script is not recorded. The first call opens the run folder.
    Collective.

    `exchange` and `world` are the strategy's; None if Horovod's calls exchange. See `record.begin` for the others.
    """
    if record.begun:
        return record.steps()
    if ranks.current is not None and ranks.current.joins:
        return None  # the others have opened the run folder
    group = _group or comm_world.watched(Communicator())
    if ranks.current is not None:
        group_ranks, default = world or ranks.current.world(), DEFAULT_REDUCER
    else:
        group_ranks, default = comm_world.connect(next(iter(_fronts)), group=group), TrainConfig.strategy
    exchange, gather = exchange or parse(default), functools.partial(_last_gather, group)
    return record.begin(group_ranks, exchange, shapes=shapes, device=device, threads=threads, gather=gather)


def _last_gather(group: RankGroup) -> Callable[[bytes], list[bytes]]:
    """Connects each rank to rank 0, for the time after the scripts have ended. Collective.

    Returns a function that gives rank 0 the bytes of all ranks, and the others their own.
    """
    rank, size = group.rendezvous.rank, group.rendezvous.size
    targets, expected = (range(1), range(0)) if rank else (range(0), range(1, size))
    streams = connect_ranks(group.rendezvous, group.endpoint, b"records", targets, expected) if size > 1 else {}
    for stream in streams.values():
        stream.blocks_rank = False  # no rank is at fault because its script takes longer

    def gather(own: bytes) -> list[bytes]:
        leave()
        if rank:
            swap(streams[0], np.frombuffer(own, np.uint8), None)
        return [own, *(swap(None, None, streams[each]).tobytes() for each in expected)]

    return gather


def leave() -> None:
    """This rank's script has ended: ranks that still wait for it get an error."""
    if ranks.current is not None:
        ranks.current.leave()
    else:
        for front in _fronts.values():
            front.end_horovod()


@functools.cache
def _leave_at_exit() -> None:
    lifecycle.at_exit(leave)


def reconnect() -> None:
    """Connects the ranks of an elastic job that are left. Collective. Raises PeerLost or Failure (69)."""
    job().reconnect()
    sets.begin(None, None)  # the set of all ranks gets the present ones


def check_beginning(world: Communicator, weights: int, how: str) -> None:
    """Raises ValueError if ranks that train separately start from different weights. Collective.

    `weights` is the checksum of this rank's weights. The error names `how`, the call that makes them equal.
    """
    checksums = world.gather(weights)
    other = next((rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]), None)
    if other is not None:
        raise ValueError(f"ranks 0 and {other} start with different weights; hint: {how} before the first step")


def _switch_to_tcp() -> None:
    """Connects the ranks through Horovod and shuts it down."""
    global _group
    front = next(iter(_fronts.values()))
    numbered = front.get("_basics")._get_process_set_ids_and_ranks()
    group = _group or comm_world.watched(Communicator())
    rendezvous = group.rendezvous
    if rendezvous.size > 1:  # later connections can no longer use Horovod to exchange addresses
        rendezvous = TcpCommunicator(rendezvous, group.endpoint)
    _group = dataclasses.replace(group, rendezvous=rendezvous)
    _leave_at_exit()
    ranks.current = Job(_group, front.framework)  # all ranks are here, so none still needs Horovod
    ranks.current.sets = {number: tuple(members) for number, members in numbered.items()}
    for each in _fronts.values():
        each.end_horovod()
    if ranks.current.rank == 0:
        say(f"Horovod has shut down; hvdtrain's TCP backend takes over (set {VARIABLE} to start without Horovod)")


def shutdown() -> None:
    """Closes the connections; a second call does nothing."""
    record.finish()
    if ranks.current is not None:
        ranks.current.close()
    ranks.current = None
    _fronts.clear()


def say(line: str) -> None:
    """Print a line on stderr."""
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
