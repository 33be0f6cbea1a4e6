"""Connects the ranks of a job: rendezvous, sentinel, backend.

The strategy names the backend: Horovod, the framework's own collectives (native), TCP, or a plug-in's.
Without a launcher there is one rank, and Horovod is not imported.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import cast

from hvdtrain.comm import lifecycle
from hvdtrain.comm.backends.base import Communicator, Endpoint, Rendezvous
from hvdtrain.comm.backends.horovod import HorovodCommunicator
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.launch_env import LaunchEnv, launch_env
from hvdtrain.comm.rendezvous import Subgroup, join
from hvdtrain.sentinel.rank import Sentinel
from hvdtrain.sentinel.waiting import LIMIT_S

Backend = str
"""horovod, or a key of BACKENDS"""
BUILT_IN = ("horovod", "native", "tcp")


def _native(framework: str, rendezvous: Rendezvous, endpoint: Endpoint, gpu: bool) -> Communicator:
    """The framework's own collectives. Does not import the other framework."""
    if framework == "torch":
        from hvdtrain.comm.backends.ddp import DdpCommunicator

        return DdpCommunicator(rendezvous, endpoint, gpu=gpu)
    from hvdtrain.comm.backends.mwms import MwmsCommunicator

    return MwmsCommunicator(rendezvous, endpoint, gpu=gpu)


def _tcp(_: str, rendezvous: Rendezvous, endpoint: Endpoint, gpu: bool) -> Communicator:
    return TcpCommunicator(rendezvous, endpoint) if rendezvous.size > 1 else Communicator()


BACKENDS: dict[Backend, Callable[[str, Rendezvous, Endpoint, bool], Communicator]] = {
    "native": _native,
    "tcp": _tcp,
}
"""Functions (framework, rendezvous, endpoint, gpu) that connect ranks which have found each other, by name.

A plug-in adds its own when it is imported."""


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Ranks that have found each other and are watched by a sentinel: all that a backend needs to connect them."""

    rendezvous: Rendezvous
    sentinel: Sentinel | None
    """None for a single process"""
    endpoint: Endpoint

    @classmethod
    def watched(cls, rendezvous: Rendezvous, stall_limit_s: float = LIMIT_S) -> RankGroup:
        """Start the sentinel of these ranks. Collective."""
        loopback = Endpoint("127.0.0.1", "lo", loopback=True)
        if rendezvous.size == 1:
            return cls(rendezvous, None, loopback)
        first = rendezvous.local_rank == 0
        sentinel = Sentinel(rendezvous.rank, first=first, job_key=rendezvous.job_key, stall_limit_s=stall_limit_s)
        lifecycle.report_to(sentinel)
        atexit.register(sentinel.report_finished)
        sentinel.join(lambda own: [json.loads(text) for text in rendezvous.gather_bytes(json.dumps(own).encode())])
        if route := sentinel.route:
            return cls(rendezvous, sentinel, Endpoint(route.source, route.device))
        if sentinel.hosts > 1:
            return cls(rendezvous, sentinel, Endpoint(socket.gethostname(), None))
        return cls(rendezvous, sentinel, loopback)

    @classmethod
    def launched(cls, environment: LaunchEnv, stall_limit_s: float = LIMIT_S) -> RankGroup:
        """Find the ranks that the launcher started, without Horovod. Collective.

        Raises Failure (69, 77) if they cannot find each other.
        """
        return cls.watched(join(environment), stall_limit_s)

    def subgroup(self, ranks: Sequence[int]) -> RankGroup:
        """The group of these ranks. Collective: every rank of the whole group passes the ranks of its subgroup."""
        return dataclasses.replace(self, rendezvous=Subgroup(self.rendezvous, ranks))


def connect(
    framework: str,
    gpu: bool = False,
    *,
    backend: Backend = "horovod",
    timeline: bool = False,
    group: RankGroup | None = None,
    stall_limit_s: float = LIMIT_S,
) -> Communicator:
    """Connect the ranks of this job through a backend. Collective.

    `framework`: torch or tensorflow. `gpu`: whether gradients are on a GPU. `timeline`: allow Horovod's timeline to
    start later. `group`: ranks that have found each other before and outlive the communicator. `stall_limit_s`: see
    `sentinel.stalls`; 0 for no limit. Raises Failure (69) if Horovod is missing or the ranks cannot be connected.
    """
    owned = group is None
    environment = launch_env()
    if backend == "horovod":
        if stall_limit_s:  # Horovod's own check names the stalled ranks; it takes whole seconds
            os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, round(stall_limit_s))))
        if group is None:
            single = environment.launcher == "alone"
            ranks = Communicator() if single else HorovodCommunicator(framework, gpu=gpu, timeline=timeline)
            group = RankGroup.watched(ranks, stall_limit_s)
        communicator = cast(Communicator, group.rendezvous)
    else:
        group = group or RankGroup.launched(environment, stall_limit_s)
        communicator = BACKENDS[backend](framework, group.rendezvous, group.endpoint, gpu)
    communicator.use_group(group, framework, owned=owned)
    return communicator
