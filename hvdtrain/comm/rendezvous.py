"""How ranks find each other when no Horovod runs: through MPI, or through the launcher's own key-value store.

Native strategies bring their own collectives, but someone must tell all ranks where rank 0 listens. mpirun, srun and
`horovodrun --mpi` start MPI programs, and there MPI carries these few bytes; once they are told it sends nothing more.
`horovodrun --gloo` serves a small key-value store over HTTP to its ranks, which Horovod uses for the same purpose;
torchrun serves PyTorch's TCPStore, which PyTorch uses so.

A meeting also gives the ranks a secret of their own. MPI carries one that rank 0 has drawn. A store is open to all who
can reach it, so there the secret is made of the user's key (`sealed`) and never sent.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import datetime
import json
import os
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.comm.backends.base import Alone, Meeting
from hvdtrain.comm.launch_env import Place
from hvdtrain.comm.signed_store import Sealed
from hvdtrain.sentinel.auth import SECRET_BYTES
from hvdtrain.system import exits
from hvdtrain.system.environment import number
from hvdtrain.system.exits import Failure

PATIENCE_S = 300.0
"""For the slowest rank to arrive"""
POLL_S = 0.05
MOST_BYTES = 1 << 16
"""Of what a rank tells the others"""
FIRST_PORT, PORTS = 20_000, 10_000
"""Below those that systems give to connections, so that none of these takes the port between its choice and its use"""


def meet(where: Place) -> Meeting:
    """Joins the other ranks that the launcher started. Raises Failure (69) if that is impossible."""
    if where.launcher == "alone":
        return Alone()
    if where.launcher == "horovodrun":
        return Sealed(HorovodrunMeeting(where))
    if where.launcher == "torchrun":
        return Sealed(TorchrunMeeting(where))
    return MPIMeeting(where)


class MPIMeeting:
    def __init__(self, where: Place) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library found
            raise Failure(
                f"{error}; all strategies but Horovod's own need mpi4py under mpirun: run `make setup`",
                exits.UNREACHABLE,
            ) from error
        if not MPI.Is_initialized():  # a script may have set mpi4py.rc.initialize = False, for Horovod to do it
            MPI.Init()
            atexit.register(self.leave)
        self._mpi: Any = MPI
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.local_rank, self.local_size = where.local_rank, where.local_size
        drawn = bytearray(secrets.token_bytes(SECRET_BYTES))
        MPI.COMM_WORLD.Bcast(drawn, root=0)
        self.secret = bytes(drawn)

    def gather(self, mine: bytes) -> list[bytes]:
        lengths = bytearray(8 * self.size)
        self._mpi.COMM_WORLD.Allgather(len(mine).to_bytes(8, "little"), lengths)
        counts = [int.from_bytes(lengths[i : i + 8], "little") for i in range(0, len(lengths), 8)]
        joined = bytearray(sum(counts))
        self._mpi.COMM_WORLD.Allgatherv(mine, [joined, counts, self._mpi.BYTE])
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        return [bytes(joined[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def leave(self) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.Finalize()


class StoreMeeting(abc.ABC):
    """Ranks that share a key-value store: each puts its part there, rank 0 reads them all and puts the whole there.

    Rank 0 deletes all of it when all have read. Whoever can reach the store can read and change what is there.
    """

    def __init__(self, where: Place, store: str) -> None:
        """`store`: whose it is and where, for people."""
        self.rank, self.size = where.rank, where.size
        self.local_rank, self.local_size = where.local_rank, where.local_size
        self._name, self._scope, self._meetings = store, "hvdtrain", 0

    @abc.abstractmethod
    def _put(self, key: str, value: bytes) -> None: ...

    @abc.abstractmethod
    def _found(self, key: str) -> bytes | None:
        """The value, None while there is none."""

    @abc.abstractmethod
    def _delete(self, key: str) -> None: ...

    def gather(self, mine: bytes) -> list[bytes]:
        scope = f"{self._scope}.{self._meetings}"
        self._meetings += 1
        try:
            self._put(f"{scope}/{self.rank}", mine)
            if self.rank == 0:  # who alone asks for all, so that a meeting is not size x size questions to one store
                found = [self._value(f"{scope}/{rank}", f"rank {rank}") for rank in range(self.size)]
                self._put(f"{scope}/all", json.dumps([each.hex() for each in found]).encode())
            else:
                found = [bytes.fromhex(each) for each in json.loads(self._value(f"{scope}/all", "rank 0"))]
            if len(found) != self.size:
                raise RuntimeError("someone else writes into it")
            self._put(f"{scope}.read/{self.rank}", b"")
            if self.rank == 0:
                for rank in range(self.size):
                    self._value(f"{scope}.read/{rank}", f"rank {rank}")
                keys = [f"{part}/{rank}" for part in (scope, f"{scope}.read") for rank in range(self.size)]
                for key in [f"{scope}/all", *keys]:
                    self._delete(key)
            return found
        except (OSError, RuntimeError, ValueError) as error:  # PyTorch's are RuntimeError
            raise self._unreachable(error) from error

    def _value(self, key: str, whose: str) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        while (value := self._found(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing from {whose} for {PATIENCE_S:g} s")
            time.sleep(POLL_S * max(1, self.size // 16))  # all of them ask one store
        return value

    def _unreachable(self, error: Exception) -> Failure:
        reason = str(error).splitlines()[0]
        return Failure(
            f"{self._name} does not answer ({reason}); check that its host can be reached from the others",
            exits.UNREACHABLE,
        )

    def leave(self) -> None:  # noqa: B027 (the store is the launcher's: there is nothing to close)
        pass


class HorovodrunMeeting(StoreMeeting):
    """horovodrun's store: PUT, GET and DELETE of /scope/key, 404 while there is no value."""

    def __init__(self, where: Place, environment: Mapping[str, str] = os.environ) -> None:
        names = [f"HOROVOD_GLOO_RENDEZVOUS_{part}" for part in ("ADDR", "PORT")]
        hint = "start the ranks with horovodrun, which sets it"
        host, port = (environment.get(name, "") for name in names)
        number(names[1], port, hint, least=1, most=65535)
        self._address = f"http://{host}:{port}"
        super().__init__(where, f"horovodrun's store at {self._address}")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def _put(self, key: str, value: bytes) -> None:
        self._ask("PUT", key, value)

    def _delete(self, key: str) -> None:
        self._ask("DELETE", key)

    def _ask(self, method: str, key: str, value: bytes | None = None) -> None:
        request = urllib.request.Request(f"{self._address}/{key}", data=value, method=method)
        self._open(request, timeout=PATIENCE_S).close()

    def _found(self, key: str) -> bytes | None:
        try:
            with self._open(f"{self._address}/{key}", timeout=PATIENCE_S) as answer:
                return answer.read(2 * MOST_BYTES * self.size)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None


class TorchrunMeeting(StoreMeeting):
    """torchrun's store, PyTorch's TCPStore. It outlives a restart of the ranks (--max-restarts, or a host that joins),
    and then still holds what the ranks before have put there; so rank 0 gives each start a name of its own."""

    def __init__(self, where: Place) -> None:
        hint = "start the ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT"
        host = os.environ.get("MASTER_ADDR", "")
        port = number("MASTER_PORT", os.environ.get("MASTER_PORT", ""), hint, least=1, most=65535)
        super().__init__(where, f"torchrun's store at {host}:{port}")
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise Failure(
                f"{error}; ranks of torchrun meet in its store, for which they need PyTorch: run `make setup`, or "
                "start them with horovodrun or mpirun",
                exits.UNREACHABLE,
            ) from error
        # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 leaves it to rank 0.
        serves = where.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience = datetime.timedelta(seconds=PATIENCE_S)
        try:
            self._store: Any = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=patience)
            self._scope += f".{self._this_start()}"
        except (OSError, RuntimeError) as error:
            raise self._unreachable(error) from error

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def _delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _found(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _this_start(self) -> str:
        """Rank 0's random word. It answers each word that it finds of another rank, which may be one of an earlier
        start, until all ranks of this one have heard it."""
        mine = secrets.token_hex(8)
        if self.rank:
            self._put(f"{self._scope}.word/{self.rank}", mine.encode())
            first = self._value(f"{self._scope}.answer/{mine}", "rank 0").decode()
            self._put(f"{self._scope}.{first}.heard/{self.rank}", b"")
            return first
        deadline, missing = time.monotonic() + PATIENCE_S, set(range(1, self.size))
        while missing:
            for rank in missing:
                if word := self._found(f"{self._scope}.word/{rank}"):
                    self._put(f"{self._scope}.answer/{word.decode()}", mine.encode())
            time.sleep(POLL_S)
            missing = {rank for rank in missing if self._found(f"{self._scope}.{mine}.heard/{rank}") is None}
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing from ranks {sorted(missing)} for {PATIENCE_S:g} s")
        return mine


class Along:
    """Some ranks of a meeting, in this order, as a meeting of their own. All ranks of the whole make one, each with
    the ranks among which it is, and gather at the same times."""

    def __init__(self, whole: Meeting, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.rank, self.size, self.secret = ranks.index(whole.rank), len(ranks), whole.secret
        names = self.gather(socket.gethostname().encode())
        here = [rank for rank, name in enumerate(names) if name == names[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def gather(self, mine: bytes) -> list[bytes]:
        found = self._whole.gather(mine)
        return [found[rank] for rank in self._ranks]

    def leave(self) -> None:
        """The whole is left by whoever made it."""


def reserved_port(first: int) -> socket.socket:
    """A socket bound to the first port from `first` on that is free on all addresses. If the host has IPv6, the socket
    takes IPv6 and IPv4, like gRPC's. Raises Failure (69) if all ports are taken."""
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    for port in range(first, FIRST_PORT + PORTS):
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        return held
    raise Failure(
        f"no free TCP port from {first} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}: see `ss -ltn`",
        exits.UNREACHABLE,
    )


def _has_ipv6() -> bool:
    """Whether IPv6's loopback address is there, by which gRPC decides as well."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False
