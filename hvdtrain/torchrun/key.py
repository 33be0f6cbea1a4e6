"""The job key on its way from the launcher to the hosts: over ssh, in parallel to mpirun.

mpirun starts the ranks of each host, but its messages to them are not encrypted. So the launcher also starts `serve` on
each host, and writes the key to its standard input. There `receive` fetches it through a socket of that host alone,
which has no file (unix(7), abstract). Both ends check that the other is a process of the same user.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.launch.agent import on_host
from hvdtrain.launch.link import address_of
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure

KEY_BYTES = 32
PATIENCE_S = 60.0
POLL_S = 0.05
ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = f"import sys; sys.path.insert(0, {ROOT!r}); from hvdtrain.torchrun.key import serve; serve()"


@contextlib.contextmanager
def handed_over(names: Sequence[str], job: str) -> Iterator[None]:
    """Give each host a new key for the job, under which its ranks prove that they belong to it."""
    line = json.dumps({"job": job, "key": secrets.token_hex(KEY_BYTES)}).encode() + b"\n"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            words = on_host(name, address_of(name), [sys.executable, "-I", "-S", "-c", PROGRAM])
            quiet = subprocess.DEVNULL  # what ssh has to say, mpirun's ssh says too
            one = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, process_group=0)
            started.append(one)
            assert one.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                one.stdin.write(line)
                one.stdin.flush()
        yield
    finally:
        for one in started:  # `serve` ends with its input
            one.kill()
            one.wait()
            assert one.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                one.stdin.close()


def _name(job: str) -> str:
    return f"\0hvdtrain-{os.geteuid()}-{job}"


def _same_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def serve() -> None:
    """Read a job and its key, and give the key to the first process of this user that asks for it.

    Runs on a host, until then or until its input ends.
    """
    order = json.loads(sys.stdin.buffer.readline())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_name(order["job"]))
        listener.listen()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            with listener.accept()[0] as connection:
                if _same_user(connection):
                    connection.sendall(bytes.fromhex(order["key"]))
                    return


def receive(job: str) -> bytes:
    """The job's key. Raises Failure (69) if `serve` has not brought it in time."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_name(job))
            if _same_user(connection) and len(key := connection.recv(KEY_BYTES, socket.MSG_WAITALL)) == KEY_BYTES:
                return key
        time.sleep(POLL_S)
    what = f"host {socket.gethostname()} did not get the job's key over ssh within {PATIENCE_S:g} s"
    raise Failure(f"{what}; hint: `hvdtrain doctor -H` tries ssh to each host", exits.UNREACHABLE)
