"""Rank 0 prints as JSON the sockets that a job listens on, and whether strangers get in. Used by test_security.py.

    listening.py FRAMEWORK BACKEND

A stranger connects from each address of this machine, except loopback, to each TCP port that is open on every address.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import numpy as np

from hvdtrain.comm.world import connect
from hvdtrain.sentinel import interfaces
from hvdtrain.strategies.studies import servers as servers  # registers its backend
from hvdtrain.system.proc import children


def sockets(process: int) -> set[str]:
    """The inodes of a process's sockets."""
    found = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def listening(inodes: set[str]) -> list[tuple[str, str, int]]:
    """(protocol, address, port) of these sockets if they listen, from /proc/net (proc(5)). Every address is 0.0.0.0."""
    found = []
    for protocol, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in inodes:
                address, port = words[1].split(":")
                number = bytes.fromhex(address)[::-1] if len(address) == 8 else b"\0" * 4
                found.append((protocol[:3], socket.inet_ntoa(number), int(port, 16)))
    return found


def connects(source: str, target: str, port: int) -> bool:
    """Whether the server greets a client, as TensorFlow's does."""
    with contextlib.suppress(OSError), socket.create_connection((target, port), 1, (source, 0)) as made:
        return made.recv(1) != b""
    return False


def main() -> None:
    framework, backend = sys.argv[1:]
    world = connect(framework, backend=backend)
    total = world.sum(np.array([1.0, world.rank]), "sum").tolist()
    mine = os.getpid()
    inodes = set().union(*(sockets(process) for process in (mine, *children(mine))))
    report = {"sum": total, "listening": sorted(set(listening(inodes))), "strangers": [], "ranks": []}
    own = [address.partition("/")[0] for address in interfaces.addresses().values()]
    for protocol, address, port in report["listening"] if world.rank == 0 else ():
        if protocol == "tcp" and address == "0.0.0.0":
            report["strangers"] += [connects(one, one, port) for one in own]
            report["ranks"].append(connects("127.0.0.1", "127.0.0.1", port))
    if world.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    world.gather("looked")
    world.shutdown()


main()
