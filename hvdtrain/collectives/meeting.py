"""How ranks find each other when no Horovod runs: through MPI, or through horovodrun's own key-value store.

Native strategies bring their own collectives, but someone must tell all ranks where rank 0 listens. mpirun, srun and
`horovodrun --mpi` start MPI programs, and there MPI carries these few bytes; once they are told it sends nothing more.
`horovodrun --gloo` serves a small key-value store over HTTP to its ranks, which Horovod uses for the same purpose.
"""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from hvdtrain import exits
from hvdtrain.collectives import Alone, Meeting
from hvdtrain.exits import Failure

PATIENCE_S = 300.0
"""For the slowest rank to arrive"""
POLL_S = 0.05
FIRST_PORT, PORTS = 20_000, 10_000
"""Below those that systems give to connections, so that none of these takes the port between its choice and its use"""


def meet(launcher: str, rank: int, size: int, local_rank: int, local_size: int) -> Meeting:
    """Joins the other ranks that `launcher` started. Raises Failure (69) if that is impossible."""
    if launcher == "alone":
        return Alone()
    if launcher == "horovodrun":
        return StoreMeeting(rank, size, local_rank, local_size)
    return MPIMeeting(local_rank, local_size)


class MPIMeeting:
    def __init__(self, local_rank: int, local_size: int) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library found
            raise Failure(
                f"{error}; a native strategy under mpirun needs mpi4py: run `make setup`", exits.UNREACHABLE
            ) from error
        self._mpi: Any = MPI
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.local_rank, self.local_size = local_rank, local_size

    def gather(self, mine: bytes) -> list[bytes]:
        lengths = bytearray(8 * self.size)
        self._mpi.COMM_WORLD.Allgather(len(mine).to_bytes(8, "little"), lengths)
        counts = [int.from_bytes(lengths[i : i + 8], "little") for i in range(0, len(lengths), 8)]
        joined = bytearray(sum(counts))
        self._mpi.COMM_WORLD.Allgatherv(mine, [joined, counts, self._mpi.BYTE])
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        return [bytes(joined[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def leave(self) -> None:
        self._mpi.Finalize()


class StoreMeeting:
    """horovodrun's key-value store: PUT and GET of /scope/key, 404 while there is no value."""

    def __init__(
        self, rank: int, size: int, local_rank: int, local_size: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        host, port = (environment[f"HOROVOD_GLOO_RENDEZVOUS_{part}"] for part in ("ADDR", "PORT"))
        self._store = f"http://{host}:{port}/hvdtrain"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._meetings = 0

    def gather(self, mine: bytes) -> list[bytes]:
        scope = f"{self._store}.{self._meetings}"
        self._meetings += 1
        try:
            self._open(
                urllib.request.Request(f"{scope}/{self.rank}", data=mine, method="PUT"), timeout=PATIENCE_S
            ).close()
            return [self._value(f"{scope}/{rank}", rank) for rank in range(self.size)]
        except OSError as error:
            raise Failure(
                f"horovodrun's store at {self._store.rpartition('/')[0]} does not answer ({error}); check that the "
                "host that runs horovodrun can be reached from the others",
                exits.UNREACHABLE,
            ) from error

    def _value(self, key: str, rank: int) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self._open(key, timeout=PATIENCE_S) as answer:
                    value: bytes = answer.read()
                    return value
            except urllib.error.HTTPError as error:
                if error.code != 404 or time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def leave(self) -> None:
        pass


def reserved_port(first: int) -> socket.socket:
    """A socket bound to the first free port from `first` on. Raises Failure (69) if all are taken."""
    for port in range(first, FIRST_PORT + PORTS):
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        return held
    raise Failure(
        f"no free TCP port from {first} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}: see `ss -ltn`",
        exits.UNREACHABLE,
    )
