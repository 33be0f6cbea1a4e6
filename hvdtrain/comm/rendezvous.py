"""How ranks find each other without Horovod: through MPI, or through the launcher's key-value store.

Before a backend can connect the ranks, every rank must learn the addresses of the others. mpirun, srun and `horovodrun
--mpi` start MPI programs, so MPI carries these few bytes; after that it sends nothing more. `horovodrun --gloo` serves
a small key-value store over HTTP, which Horovod uses for the same purpose. torchrun serves PyTorch's TCPStore.

A rendezvous also gives the ranks a job key. Rank 0 draws it, and MPI distributes it. A store is open to everyone who
can reach it; there the job key is derived from the user's key (`signed_store`) and never sent.
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

from hvdtrain.comm.backends.base import Communicator, Rendezvous
from hvdtrain.comm.launch_env import LaunchEnv
from hvdtrain.comm.signed_store import SignedRendezvous
from hvdtrain.sentinel.auth import KEY_BYTES
from hvdtrain.system import exits, install
from hvdtrain.system.environment import number
from hvdtrain.system.exits import Failure

PATIENCE_S = 300.0
"""How long to wait for the slowest rank"""
POLL_S = 0.05
MAX_BYTES = 1 << 16
"""Longest message of a rank"""
FIRST_PORT, PORTS = 20_000, 10_000
"""Below the ephemeral ports, so that no connection takes the port between its reservation and its use"""


def join(environment: LaunchEnv) -> Rendezvous:
    """Find the other ranks that the launcher started. Collective. Raises Failure (69) if that is impossible."""
    if environment.launcher == "alone":
        return Communicator()
    if environment.launcher == "horovodrun":
        return SignedRendezvous(HorovodrunRendezvous(environment))
    if environment.launcher == "torchrun":
        return SignedRendezvous(TorchrunRendezvous(environment))
    if environment.launcher == "torch.distributed":
        return SignedRendezvous(DistributedRendezvous(environment))
    return MpiRendezvous(environment)


class MpiRendezvous:
    """Ranks that MPI connects."""

    def __init__(self, environment: LaunchEnv) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library found
            message = f"{error}; under mpirun every strategy except Horovod's own needs mpi4py"
            raise Failure(f"{message}; hint: {install.package('mpi4py')}", exits.UNREACHABLE) from error
        if not MPI.Is_initialized():  # a script may have set mpi4py.rc.initialize = False, for Horovod to do it
            MPI.Init()
            atexit.register(self.shutdown)
        self._mpi: Any = MPI
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        key = bytearray(secrets.token_bytes(KEY_BYTES))
        MPI.COMM_WORLD.Bcast(key, root=0)
        self.job_key = bytes(key)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        lengths = bytearray(8 * self.size)
        self._mpi.COMM_WORLD.Allgather(len(own).to_bytes(8, "little"), lengths)
        counts = [int.from_bytes(lengths[i : i + 8], "little") for i in range(0, len(lengths), 8)]
        joined = bytearray(sum(counts))
        self._mpi.COMM_WORLD.Allgatherv(own, [joined, counts, self._mpi.BYTE])
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        return [bytes(joined[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def shutdown(self) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.Finalize()


class StoreRendezvous(abc.ABC):
    """Ranks that share a key-value store. Each puts its message there; rank 0 reads them all and puts the list there.

    Rank 0 deletes everything once all ranks have read it. Anyone who can reach the store can read and change it.
    """

    def __init__(self, environment: LaunchEnv, store: str) -> None:
        """`store`: owner and address of the store, for error messages."""
        self.rank, self.size = environment.rank, environment.size
        self.local_rank, self.local_size = environment.local_rank, environment.local_size
        self._name, self._scope, self._gathers = store, "hvdtrain", 0

    @abc.abstractmethod
    def _put(self, key: str, value: bytes) -> None: ...

    @abc.abstractmethod
    def _get(self, key: str) -> bytes | None:
        """The value; None if there is none yet."""

    @abc.abstractmethod
    def _delete(self, key: str) -> None: ...

    def gather_bytes(self, own: bytes) -> list[bytes]:
        scope = f"{self._scope}.{self._gathers}"
        self._gathers += 1
        try:
            self._put(f"{scope}/{self.rank}", own)
            if self.rank == 0:  # only rank 0 reads every key; otherwise one store would serve size x size requests
                messages = [self._wait_for(f"{scope}/{rank}", f"rank {rank}") for rank in range(self.size)]
                self._put(f"{scope}/all", json.dumps([message.hex() for message in messages]).encode())
            else:
                messages = [bytes.fromhex(text) for text in json.loads(self._wait_for(f"{scope}/all", "rank 0"))]
            if len(messages) != self.size:
                raise RuntimeError("another program writes into it")
            self._put(f"{scope}.read/{self.rank}", b"")
            if self.rank == 0:
                for rank in range(self.size):
                    self._wait_for(f"{scope}.read/{rank}", f"rank {rank}")
                keys = [f"{part}/{rank}" for part in (scope, f"{scope}.read") for rank in range(self.size)]
                for key in [f"{scope}/all", *keys]:
                    self._delete(key)
            return messages
        except (OSError, RuntimeError, ValueError) as error:  # PyTorch raises RuntimeError
            raise self._unreachable(error) from error

    def _wait_for(self, key: str, sender: str) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        while (value := self._get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing from {sender} for {PATIENCE_S:g} s")
            time.sleep(POLL_S * max(1, self.size // 16))  # all ranks poll the same store
        return value

    def _unreachable(self, error: Exception) -> Failure:
        reason = str(error).splitlines()[0]
        return Failure(
            f"{self._name} does not answer ({reason}); hint: check that its host can be reached from the others",
            exits.UNREACHABLE,
        )

    def shutdown(self) -> None:  # noqa: B027 (the store belongs to the launcher: there is nothing to close)
        pass


class HorovodrunRendezvous(StoreRendezvous):
    """horovodrun's store: PUT, GET and DELETE of /scope/key; 404 while a value is missing."""

    def __init__(self, environment: LaunchEnv, variables: Mapping[str, str] = os.environ) -> None:
        names = [f"HOROVOD_GLOO_RENDEZVOUS_{part}" for part in ("ADDR", "PORT")]
        hint = "start the ranks with horovodrun, which sets it"
        host, port = (variables.get(name, "") for name in names)
        number(names[1], port, hint, least=1, most=65535)
        self._address = f"http://{host}:{port}"
        super().__init__(environment, f"horovodrun's store at {self._address}")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def _put(self, key: str, value: bytes) -> None:
        self._request("PUT", key, value)

    def _delete(self, key: str) -> None:
        self._request("DELETE", key)

    def _request(self, method: str, key: str, value: bytes | None = None) -> None:
        request = urllib.request.Request(f"{self._address}/{key}", data=value, method=method)
        self._open(request, timeout=PATIENCE_S).close()

    def _get(self, key: str) -> bytes | None:
        try:
            with self._open(f"{self._address}/{key}", timeout=PATIENCE_S) as answer:
                return answer.read(2 * MAX_BYTES * self.size)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return None


class TorchRendezvous(StoreRendezvous):
    """A store of torch.distributed."""

    _store: Any

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def _delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _get(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None


class DistributedRendezvous(TorchRendezvous):
    """The store of a script that has called `init_process_group` itself, as with torch.multiprocessing.spawn."""

    def __init__(self, environment: LaunchEnv) -> None:
        from torch.distributed import distributed_c10d

        super().__init__(environment, "torch.distributed's store")
        self._store = distributed_c10d._get_default_store()
        self.local_rank, self.local_size = _place(self)


class TorchrunRendezvous(TorchRendezvous):
    """torchrun's store, PyTorch's TCPStore.

    The store outlives a restart of the ranks (--max-restarts, or a host that joins) and then still holds the values of
    the previous ranks. So rank 0 gives each start a scope of its own.
    """

    def __init__(self, environment: LaunchEnv) -> None:
        hint = "start the ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT"
        host = os.environ.get("MASTER_ADDR", "")
        port = number("MASTER_PORT", os.environ.get("MASTER_PORT", ""), hint, least=1, most=65535)
        super().__init__(environment, f"torchrun's store at {host}:{port}")
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise Failure(
                f"{error}; under torchrun, ranks need PyTorch to find each other; hint: "
                f"{install.package('torch')}, or start them with horovodrun or mpirun",
                exits.UNREACHABLE,
            ) from error
        # With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 serves the store.
        serves = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience = datetime.timedelta(seconds=PATIENCE_S)
        try:
            self._store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=patience)
            self._scope += f".{self._name_of_start()}"
        except (OSError, RuntimeError) as error:
            raise self._unreachable(error) from error

    def _name_of_start(self) -> str:
        """Rank 0's random word.

        Every other rank puts a word of its own, and rank 0 answers each word. A word that it finds may belong to an
        earlier start, so rank 0 repeats this until all ranks of this start have acknowledged its answer.
        """
        own = secrets.token_hex(8)
        if self.rank:
            self._put(f"{self._scope}.word/{self.rank}", own.encode())
            first = self._wait_for(f"{self._scope}.answer/{own}", "rank 0").decode()
            self._put(f"{self._scope}.{first}.heard/{self.rank}", b"")
            return first
        deadline, missing = time.monotonic() + PATIENCE_S, set(range(1, self.size))
        while missing:
            for rank in missing:
                if word := self._get(f"{self._scope}.word/{rank}"):
                    self._put(f"{self._scope}.answer/{word.decode()}", own.encode())
            time.sleep(POLL_S)
            missing = {rank for rank in missing if self._get(f"{self._scope}.{own}.heard/{rank}") is None}
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing from ranks {sorted(missing)} for {PATIENCE_S:g} s")
        return own


class Subgroup:
    """Some ranks of a rendezvous, in the given order. All ranks of the whole create one, with the ranks of their own
    subgroup, and gather at the same times."""

    def __init__(self, whole: Rendezvous, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.rank, self.size, self.job_key = ranks.index(whole.rank), len(ranks), whole.job_key
        self.local_rank, self.local_size = _place(self)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        messages = self._whole.gather_bytes(own)
        return [messages[rank] for rank in self._ranks]

    def shutdown(self) -> None:
        """Nothing to do: the owner of the whole shuts it down."""


def _place(ranks: Any) -> tuple[int, int]:
    """This rank's number among the ranks of its host, and their number. Collective."""
    hosts = ranks.gather_bytes(socket.gethostname().encode())
    local = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    return local.index(ranks.rank), len(local)


def reserved_port(first: int) -> socket.socket:
    """A socket bound to the first port, from `first` on, that is free on all addresses.

    If the host has IPv6, the socket takes IPv6 and IPv4, like gRPC's. Raises Failure (69) if all ports are taken.
    """
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
        f"no free TCP port from {first} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}; hint: see `ss -ltn`",
        exits.UNREACHABLE,
    )


def _has_ipv6() -> bool:
    """Whether the host has IPv6's loopback address; gRPC decides the same way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False
