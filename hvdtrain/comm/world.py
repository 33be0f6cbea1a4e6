"""Connects the ranks of a job: rendezvous, sentinel, backend.

The strategy names the backend: Horovod, the framework's own collectives (native), TCP, or a plug-in's.
Without a launcher there is one rank, and Horovod is not imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
from collections.abc import Callable, Sequence
from typing import cast

from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Communicator, Endpoint, RankGroup, Rendezvous
from hvdtrain.comm.backends.horovod import HorovodCommunicator
from hvdtrain.comm.backends.mpi import MpiCommunicator
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.elastic import ElasticCommunicator, ViewRendezvous, unsupported
from hvdtrain.comm.elastic import join as join_elastic
from hvdtrain.comm.launch_env import LaunchEnv, launch_env
from hvdtrain.comm.rendezvous import Subgroup, join
from hvdtrain.launch import launched_by
from hvdtrain.sentinel import interfaces
from hvdtrain.sentinel.rank import Sentinel
from hvdtrain.sentinel.waiting import LIMIT_S
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

Backend = str
"""horovod, or a key of BACKENDS"""
BUILT_IN = ("horovod", "native", "tcp")
"""What a strategy may need; mpi takes the place of tcp"""


def _native(framework: str, rendezvous: Rendezvous, endpoint: Endpoint, gpu: bool) -> Communicator:
    """The framework's own collectives. Does not import the other framework."""
    if framework == "torch":
        from hvdtrain.comm.backends.ddp import DdpCommunicator

        return DdpCommunicator(rendezvous, endpoint, gpu=gpu)
    from hvdtrain.comm.backends.mwms import MwmsCommunicator

    return MwmsCommunicator(rendezvous, endpoint, gpu=gpu)


def _tcp(_: str, rendezvous: Rendezvous, endpoint: Endpoint, gpu: bool) -> Communicator:
    if isinstance(rendezvous, ViewRendezvous):
        return ElasticCommunicator(rendezvous, endpoint)
    return TcpCommunicator(rendezvous, endpoint) if rendezvous.size > 1 else Communicator()


def _mpi(_: str, rendezvous: Rendezvous, endpoint: Endpoint, gpu: bool) -> Communicator:
    return MpiCommunicator(rendezvous, endpoint) if rendezvous.size > 1 else Communicator()


BACKENDS: dict[Backend, Callable[[str, Rendezvous, Endpoint, bool], Communicator]] = {
    "native": _native,
    "tcp": _tcp,
    "mpi": _mpi,
}
"""Functions (framework, rendezvous, endpoint, gpu) that connect ranks which have found each other, by name.

A plug-in adds its own when it is imported."""


def stall_limit_s() -> float:
    """HVDTRAIN_STALL_LIMIT, or LIMIT_S: after it a rank that takes no part in an exchange is reported; 0: never.

    Raises Failure (78).
    """
    text = os.environ.get("HVDTRAIN_STALL_LIMIT", str(LIMIT_S))
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise Failure(f"HVDTRAIN_STALL_LIMIT={text}: must be seconds >= 0, for example 60", exits.BAD_CONFIG)


def watched(rendezvous: Rendezvous, stall_limit_s: float = LIMIT_S) -> RankGroup:
    """Start the sentinel of these ranks. Collective."""
    elastic = isinstance(rendezvous, ViewRendezvous)
    joining = rendezvous if isinstance(rendezvous, ViewRendezvous) and rendezvous.joining else None
    own = rendezvous.host if isinstance(rendezvous, ViewRendezvous) else ""
    loopback = Endpoint(own if own.startswith("127.") else "127.0.0.1", "lo", loopback=True)
    if rendezvous.size == 1 and not joining:
        return RankGroup(rendezvous, None, loopback)
    first = rendezvous.local_rank == 0
    sentinel = Sentinel(
        rendezvous.rank, first=first, job_key=rendezvous.job_key, stall_limit_s=stall_limit_s, elastic=elastic
    )
    if isinstance(rendezvous, ViewRendezvous):
        rendezvous.channel.watch(stall_limit_s)
    lifecycle.report_to(sentinel)
    lifecycle.at_exit(sentinel.report_finished)
    group = RankGroup(rendezvous, sentinel, loopback)
    sentinel.join(group.gather)
    if joining and loopback.address != own:
        others = (address for host, address in joining.channel.addresses.items() if host != own)
        # The launcher's own name may resolve to 127.0.1.1.
        other = next((address for address in others if not address.startswith("127.")), "")
        remote = {"": other} if other else {}
        sentinel.route = interfaces.route(interfaces.addresses(), remote, other, interfaces.preferred_networks())
    if route := sentinel.route:
        return dataclasses.replace(group, endpoint=Endpoint(route.source, route.device))
    if sentinel.hosts > 1:
        return dataclasses.replace(group, endpoint=Endpoint(socket.gethostname(), None))
    return group


def launched(environment: LaunchEnv, stall_limit_s: float = LIMIT_S, *, elastic: bool = False) -> RankGroup:
    """Find the ranks that the launcher started, without Horovod. Collective.

    `elastic`: the program continues if a host is lost. Raises Failure (69, 77) if the ranks cannot find each other,
    (78) if the launcher expects the program to continue without lost hosts, and it cannot.
    """
    if environment.launcher != "elastic":
        return watched(join(environment), stall_limit_s)
    if not elastic:
        raise unsupported()
    return watched(join_elastic(), stall_limit_s)


def subgroup(group: RankGroup, ranks: Sequence[int]) -> RankGroup:
    """The group of these ranks. Collective: every rank of the whole group passes the ranks of its subgroup."""
    return dataclasses.replace(group, rendezvous=Subgroup(group.rendezvous, ranks))


def find_ranks(
    framework: str, *, horovod: bool, gpu: bool = False, stall_limit_s: float = LIMIT_S, elastic: bool = False
) -> RankGroup:
    """Find the other ranks of this job and start the sentinels. Collective.

    `horovod`: let Horovod find them, which is then the backend.
    `stall_limit_s`: see `launch.stalls`; 0 for no limit. `elastic`: see `launched`. Raises Failure (69) if
    Horovod is missing, ranks cannot be found, or there are fewer ranks or hosts than the launcher started.
    """
    environment = launch_env()
    if not horovod:
        group = launched(environment, stall_limit_s, elastic=elastic)
    else:
        if stall_limit_s:  # Horovod's own check names the stalled ranks; it takes whole seconds
            os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, round(stall_limit_s))))
        single = environment.launcher == "alone"
        ranks = Communicator() if single else HorovodCommunicator(framework, gpu=gpu)
        group = watched(ranks, stall_limit_s)
    if isinstance(group.rendezvous, ViewRendezvous) and group.rendezvous.joining:
        return group
    if (found := group.rendezvous.size) != environment.size:
        raise Failure(
            f"{environment.launcher} started {environment.size} ranks, but {found} found each other; hint: the "
            "launcher may belong to another MPI than the one loaded here, see `hvdtrain doctor`",
            exits.UNREACHABLE,
        )
    _check_complete(group)
    return group


def _check_complete(group: RankGroup) -> None:
    """Raise Failure (69) if hvdtrain's launcher started more ranks, or used more hosts, than have found each other."""
    launched = launched_by.from_environment()
    machines = group.sentinel.machines if group.sentinel else 1
    if isinstance(group.rendezvous, ViewRendezvous):  # each has its own agent; to try it, they may share a machine
        machines = len(set(group.rendezvous.view.hosts))
    for noun, found, hint in (
        (
            "ranks",
            group.rendezvous.size,
            f"pass the launcher's variables on to each rank, or unset {launched_by.VARIABLE}",
        ),
        ("hosts", machines, "check that the names belong to different machines, and that each has slots"),
    ):
        wanted = launched.get(noun)
        if isinstance(wanted, int) and found < wanted:
            what = f"{launched['launcher']} asked for {wanted} {noun}, but this job has {found}"
            raise Failure(f"{what}; hint: {hint}", exits.UNREACHABLE)


def alone(framework: str) -> Communicator:
    """Connect this process to no other rank, whatever has started it."""
    return connect(framework, backend="tcp", group=watched(Communicator()))


def connect(
    framework: str,
    gpu: bool = False,
    *,
    backend: Backend = "horovod",
    group: RankGroup | None = None,
    owned: bool = False,
    stall_limit_s: float = LIMIT_S,
) -> Communicator:
    """Connect the ranks of this job, or of a group that have found each other, through a backend. Collective.

    `gpu`: whether gradients are on a GPU. `owned`: the communicator shuts down the group too, as it does without a
    given one. Raises Failure (69) if Horovod is missing or the ranks cannot be connected.
    """
    if group is None:
        group = find_ranks(framework, horovod=backend == "horovod", gpu=gpu, stall_limit_s=stall_limit_s)
        owned = True
    if backend == "horovod":
        communicator = cast(Communicator, group.rendezvous)
    else:
        if backend == "tcp":
            backend = group.between_hosts
        if backend not in BACKENDS:
            raise Failure(f"HVDTRAIN_BACKEND is {backend!r}; hint: use tcp or mpi", exits.BAD_CONFIG)
        communicator = BACKENDS[backend](framework, group.rendezvous, group.endpoint, gpu)
    communicator.use_group(group, framework, owned=owned)
    return communicator
