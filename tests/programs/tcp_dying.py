"""One of four ranks on two hosts dies while the others sum a vector; each of the others reports its exception.

    tcp_dying.py FOLDER RANK DYING tcp|calls

There is no launcher, which would end the others. The ranks find each other through FOLDER and leave RANK.json there.
Used by test_tcp.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hvdtrain.comm.backends.base import Communicator, Endpoint
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.errors import lost_peer
from hvdtrain.horovod_api.calls import Calls

SIZE = 4


class FolderRendezvous(Communicator):
    """Each rank writes a file that all ranks read."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._gathers = folder, 0
        self.rank, self.size = rank, SIZE

    def gather_bytes(self, own: bytes) -> list[bytes]:
        self._gathers += 1
        files = [self._folder / f"gather{self._gathers}.{rank}" for rank in range(SIZE)]
        part = self._folder / f"part{self.rank}"
        part.write_bytes(own)
        part.rename(files[self.rank])
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [file.read_bytes() for file in files]


folder, rank, dying = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rendezvous = FolderRendezvous(folder, rank)
ranks = {"tcp": TcpCommunicator, "calls": Calls}[sys.argv[4]](
    rendezvous, Endpoint(f"127.0.0.{1 + rank // 2}", "lo", loopback=True)
)
rendezvous.gather_bytes(b"all are connected")
if rank == dying:
    time.sleep(0.5)  # the others are in the middle of the sum
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if isinstance(ranks, Calls):
        ranks.call("allreduce", np.ones(5_000_000))
    else:
        ranks.sum(np.ones(5_000_000), "in vain")
except Exception as error:
    report = {"error": type(error).__name__, "text": str(error), "lost_peer": lost_peer(error)}
    (folder / f"{rank}.json").write_text(json.dumps(report))
