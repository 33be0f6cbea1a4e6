"""The TCP backend's exchanges with MPI between hosts: `--backend mpi`.

For fabrics that MPI drives (UCX, libfabric). Only the transport of messages between leaders differs. The sums are made
in the same order as in `tcp`, so they have the same bits. A lost host ends an MPI job, so elastic jobs need TCP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.backends.base import Endpoint, Rendezvous
from hvdtrain.comm.backends.tcp import TcpCommunicator, TcpLeaderGroup
from hvdtrain.comm.errors import PeerLost
from hvdtrain.sentinel import waiting
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

TRIES = 20
"""How often to look for a message before sleeping"""
SLEEP_S = 20e-6
"""MPI's own calls wait by polling, which takes the processor from the computation"""
DATA, LEFT = 0, 1
"""Tags of messages: what is exchanged, and that a host exchanges nothing more"""


class MpiLeaderGroup(TcpLeaderGroup):
    """The leaders. Each group has its own MPI communicator, so several groups and threads do not meet."""

    def __init__(self, leaders: Any) -> None:
        """`leaders`: a communicator of mpi4py."""
        super().__init__([None if host == leaders.rank else host for host in range(leaders.size)])
        self._mpi = leaders
        self._unsent: list[tuple[Any, np.ndarray]] = []
        """Sends that may not have ended, with copies of their messages"""

    def leave(self) -> None:
        """This host exchanges nothing more. Hosts that still wait for it get PeerLost."""
        for host in set(range(self.count)) - {self.index}:
            self._mpi.Isend(np.empty(0, np.uint8), host, LEFT)

    def _poll(self, test: Callable[[], Any], host: int) -> Any:
        """Wait for a message from or to another host. Raises PeerLost if that host has left."""

        def done() -> Any:
            return test() or (self._mpi.Iprobe(host, LEFT) and (test() or LEFT))

        if (result := _poll(done)) is LEFT:
            raise PeerLost(f"host {host} has ended its part of the job")
        return result

    def _swap(
        self, target: int | None, data: np.ndarray | None, source: int | None, into: np.ndarray | None = None
    ) -> np.ndarray:
        from mpi4py import MPI

        self._unsent = [(request, copy) for request, copy in self._unsent if not request.Test()]
        sending, received = None, np.empty(0, np.uint8) if into is None else into
        if data is not None:
            self.sent_bytes += data.nbytes
            if source is None:
                data = data.copy()  # the caller may change it before it is sent
            sending = self._mpi.Isend(data.view(np.uint8), target, DATA)
            if source is None:
                self._unsent.append((sending, data))
        if source is not None:
            status = MPI.Status()
            found = self._poll(lambda: self._mpi.Improbe(source, DATA, status), source)
            length = status.Get_count(MPI.BYTE)
            if into is None:
                if length > (most := self.max_message_bytes):
                    raise RuntimeError(f"host {source} sent {length} bytes, but at most {most} may come")
                received = np.empty(length, np.uint8)
            elif length != into.nbytes:
                raise RuntimeError(f"host {source} sent {length} bytes where {into.nbytes} were expected")
            _poll(found.Irecv(received.view(np.uint8)).Test)
            if sending is not None and target is not None:
                self._poll(sending.Test, target)
        return received


class MpiCommunicator(TcpCommunicator):
    """Ranks of a host connected by TCP on the loopback interface or shared memory, and leaders by MPI."""

    library = "mpi"

    def __init__(self, rendezvous: Rendezvous, endpoint: Endpoint) -> None:
        """Raises Failure (78) if MPI has not started these ranks, or does not allow calls from several threads."""
        try:
            from mpi4py import MPI

            if MPI.Is_finalized():
                problem = "--backend mpi: Horovod has ended MPI"
                raise Failure(f"{problem}; hint: set HVDTRAIN_STRATEGY instead of strategy=", exits.BAD_CONFIG)
            ranks = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        except (ImportError, RuntimeError):  # no mpi4py, or no MPI library
            ranks = (0, 1)
        if ranks != (rendezvous.rank, rendezvous.size):
            raise Failure(
                "--backend mpi needs ranks that MPI started; hint: start them with launch/mpirun.sh, mpirun or srun, "
                "without --elastic and --stages",
                exits.BAD_CONFIG,
            )
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise Failure(
                "--backend mpi: this MPI does not allow calls from several threads; hint: use --backend tcp",
                exits.BAD_CONFIG,
            )
        super().__init__(rendezvous, endpoint)

    def leave(self) -> None:
        if isinstance(self._leaders, MpiLeaderGroup):
            self._leaders.leave()
        super().leave()

    def _peers(self, leaders: Sequence[int]) -> Sequence[int]:
        return []

    def _leader_group(self, leaders: Sequence[int]) -> TcpLeaderGroup | None:
        from mpi4py import MPI

        group = MPI.COMM_WORLD.Split(0 if self.rank in leaders else MPI.UNDEFINED, self.rank)
        return MpiLeaderGroup(group) if self.rank in leaders else None


def _poll(test: Callable[[], Any]) -> Any:
    """Call `test` until it returns something true, and return that. Reports long waits to the sentinel."""
    began, tries = time.monotonic(), 0
    reported = began
    while not (result := test()):
        tries += 1
        if tries > TRIES:
            time.sleep(SLEEP_S)
        if waiting.every_s is not None and (now := time.monotonic()) > reported + waiting.every_s:
            reported = now
            waiting.report_wait(now - began)
    waiting.report_progress()
    return result
