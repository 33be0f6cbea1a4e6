"""The ranks of one host, for `hvdtrain launch torchrun`, which starts this module once on each host.

Ranks get torchrun's variables, and as under torchrun a store that outlives them. Two things differ from torchrun's
agent. The launcher passes the addresses of all hosts, so no host name is resolved. And SIGUSR1, to which the launcher
turns every signal because Open MPI forwards it without a deadline, becomes one SIGTERM for each rank. Ranks then have
as long as the launcher waits, and their exit codes decide its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from hvdtrain.comm.signed_store import LAUNCHERS_KEY, MEMORY_FILE
from hvdtrain.system import cgroup, exits, net, proc
from hvdtrain.system.exits import Failure
from hvdtrain.torchrun import key

PATIENCE_S = 120
"""How long a host waits for the store of the first one"""
POLL_S = 0.1
TERM_S = 5.0
"""Time between SIGTERM and SIGKILL for the other ranks of a host on which one has failed"""
KILLED = -signal.SIGTERM


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m hvdtrain.torchrun.host", description=__doc__)
    top.add_argument("--hosts", required=True, help="the hosts' addresses; ranks are numbered in this order")
    top.add_argument("--ranks", required=True, type=int, help="ranks on each host")
    top.add_argument("--port", required=True, type=int, help="port of the store, which the first host serves")
    top.add_argument("--job", required=True, help="a word that differs between jobs")
    top.add_argument("--key", action="store_true", help="the launcher hands over a key for the job")
    top.add_argument("--nic", help="interface between the hosts, where it exists")
    top.add_argument("command", nargs=argparse.REMAINDER)
    return top


def place(addresses: Sequence[str]) -> int:
    """Which of the addresses is this host's. Raises Failure (69)."""
    for number, address in enumerate(addresses):
        if net.is_own(address):
            return number
    what = f"host {socket.gethostname()} has none of the addresses {', '.join(addresses)}"
    raise Failure(f"{what}; hint: name the hosts in -H by addresses of their interfaces", exits.UNREACHABLE)


def variables(options: argparse.Namespace, addresses: Sequence[str], here: int) -> dict[str, str]:
    """Variables that all ranks of this host share: torchrun's variables, the interface, and threads."""
    world = str(len(addresses) * options.ranks)
    chosen = {
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(options.port),
        "GROUP_RANK": str(here),
        "GROUP_WORLD_SIZE": str(len(addresses)),
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "TORCHELASTIC_RUN_ID": options.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if len(addresses) > 1:
        devices = net.addresses()
        device = options.nic if options.nic in devices else None
        device = device or next((name for name, own in devices.items() if str(own.ip) == addresses[here]), None)
        # The last one is Horovod's; hvdtrain's own backend follows it too.
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
        defaults |= dict.fromkeys(names, device) if device else {}
    cores = cgroup.process_cores()
    if options.ranks > 1 or cores < (os.cpu_count() or 1):  # PyTorch would start a thread for each core of the machine
        defaults["OMP_NUM_THREADS"] = str(cgroup.threads(cores, options.ranks))
    return {**defaults, **os.environ, **chosen}


def memory_file(content: bytes) -> int:
    """A descriptor of a file without a place on a disk."""
    descriptor = os.memfd_create(MEMORY_FILE)
    os.write(descriptor, content)
    return descriptor


class Ranks:
    """The ranks of this host."""

    def __init__(self) -> None:
        self.stopping = False
        self._running: list[subprocess.Popen[bytes]] = []
        signal.signal(signal.SIGUSR1, self._stop)
        signal.signal(signal.SIGTERM, self._end)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._kill()
        os._exit(128 + number)

    def start(self, command: Sequence[str], common: Mapping[str, str], first: int, count: int, *inherited: int) -> None:
        """`inherited`: descriptors that the ranks keep."""
        for local in range(count):
            own = {"RANK": str(first + local), "ROLE_RANK": str(first + local), "LOCAL_RANK": str(local)}
            # In a new session, because Open MPI sends signals to this process's group.
            options: dict[str, Any] = {"start_new_session": True, "env": {**common, **own}, "pass_fds": inherited}
            end = functools.partial(proc.end_with_parent, signal.SIGKILL)
            self._running.append(subprocess.Popen(command, preexec_fn=end, **options))

    def wait(self) -> list[int]:
        """Wait until all ranks have ended. Returns their exit codes.

        If a rank fails although none was asked to stop, the others are ended and its exit code is the only one.
        """
        told = False
        while not self._all_ended():
            if self.stopping and not told:
                told = True
                self._terminate()
            failed = next((rank.returncode for rank in self._running if rank.returncode), None)
            if failed is not None and not self.stopping:
                self._terminate()
                deadline = time.monotonic() + TERM_S
                while not self._all_ended() and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                self._kill()
                return [failed]
            time.sleep(POLL_S)
        return [rank.returncode for rank in self._running]

    def _all_ended(self) -> bool:
        return None not in [rank.poll() for rank in self._running]

    def _terminate(self) -> None:
        for rank in self._running:
            rank.terminate()  # not its group: data loaders serve it while it saves

    def _kill(self) -> None:
        for rank in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)


def store(address: str, port: int, *, serves: bool) -> Any:
    """PyTorch's store, at which the ranks find each other. Raises Failure (69)."""
    from torch.distributed import TCPStore  # takes seconds to load

    patience = datetime.timedelta(seconds=PATIENCE_S)
    try:
        return TCPStore(address, port, is_master=serves, multi_tenant=True, wait_for_workers=False, timeout=patience)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        what = f"host {socket.gethostname()} cannot {'open' if serves else 'reach'} {address}, port {port} ({reason})"
        raise Failure(f"{what}; hint: open TCP between the hosts, see `hvdtrain doctor`", exits.UNREACHABLE) from error


def outcome(codes: Sequence[int], *, stopped: bool) -> int:
    """The job's exit code: 75 if a rank ended in order after it was asked to stop, 143 if all were ended by that."""
    failed = [code for code in codes if code not in (exits.OK, exits.RESUMABLE, KILLED)]
    orderly = any(code in (exits.OK, exits.RESUMABLE) for code in codes)
    if not stopped:
        return next((code if code > 0 else 128 - code for code in codes if code), exits.OK)
    if failed and (orderly or KILLED not in codes):  # else ranks lost contact with one that SIGTERM had ended
        return failed[0] if failed[0] > 0 else 128 - failed[0]
    return exits.RESUMABLE if orderly else 128 + signal.SIGTERM


def main(arguments: list[str]) -> int:
    """Start the ranks of this host, and return the job's exit code on the first one. Raises Failure (69)."""
    try:
        return run(arguments)
    finally:  # the launcher repeats its signal, and while Python ends, its handlers are gone before the process is
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def run(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    addresses = options.hosts.split(",")
    proc.rename("hvdhost")  # the launcher distinguishes it from a rank by this name
    ranks = Ranks()
    here = place(addresses)
    shared = store(addresses[0], options.port, serves=not here)
    common, inherited = variables(options, addresses, here), []
    if options.key:
        inherited = [memory_file(key.receive(options.job))]
        common[LAUNCHERS_KEY] = str(inherited[0])
    if ranks.stopping:  # before there was anything to stop
        return 128 + signal.SIGTERM
    ranks.start(options.command, common, here * options.ranks, options.ranks, *inherited)
    codes = ranks.wait()
    if any(codes) and not ranks.stopping:
        return outcome(codes, stopped=False)
    # The first exit code but 0 makes mpirun end the other hosts, so only the first host returns one, after all others.
    ended = f"hvdtrain.ended/{options.job}"
    if here:
        with contextlib.suppress(RuntimeError):  # the first host has failed
            shared.set(f"{ended}/{here}", " ".join(map(str, [int(ranks.stopping), *codes])))
        return exits.OK
    others = [f"{ended}/{number}" for number in range(1, len(addresses))]
    while not all(shared.check([name]) for name in others):
        time.sleep(POLL_S)
    answers = [[int(word) for word in shared.get(name).split()] for name in others]
    stopped = ranks.stopping or any(answer[0] for answer in answers)
    return outcome([*codes, *(code for answer in answers for code in answer[1:])], stopped=stopped)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
