"""The ranks of an elastic job, each of which breaks the protocol in its turn: rank 1 in view 0, rank 2 in view 1 ...

    launch/mpirun.sh --elastic --no-return -H 127.0.0.1,127.0.0.2,... python elastic_forging.py FORGED

FORGED is a JSON list of [sender, line, depth] for rank 1 and the following. The line is written in Latin-1, followed
by brackets: by the `agent` on its connection to the launcher, or by the `rank` to its agent. Rank 0 ends last, and its
agent prints what a login shell may. Used by test_elastic.py.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

rank = int(os.environ["HVDTRAIN_ELASTIC_RANK"])
FORGED = json.loads(sys.argv[1])
channel = socket.socket(fileno=int(os.environ["HVDTRAIN_ELASTIC_FD"]))


def send(**message: object) -> None:
    channel.sendall(b"\x1e" + json.dumps(message).encode() + b"\n")


def agent_writes(data: bytes) -> None:
    with Path(f"/proc/{os.getppid()}/fd/1").open("wb", buffering=0) as agent:
        agent.write(data)  # up to 4096 bytes are not mixed with the agent's own lines: see pipe(7)


def forge(sender: str, line: str, depth: int = 0) -> None:
    write = agent_writes if sender == "agent" else channel.sendall
    write(line.encode("latin-1") + b"[" * depth + b"\n")


if rank == 0:
    agent_writes(b'5\n{"ended": 1, "code": 0}\n\xff\nWelcome to this host! ')
send(began={})
for line in channel.makefile("rb"):
    message = json.loads(line.lstrip(b"\x1e"))
    if "view" in message:
        view = message["view"]["number"]
        send(joined=view)
        send(gather=1, of=view, data="")  # a barrier
    elif message.get("of") == view == len(FORGED):
        sys.exit(0)
    elif message.get("of") == view == rank - 1:
        forge(*FORGED[view])
