"""One of four ranks on two hosts dies while the others sum a vector; each of them tells how it knew.

    streams_dying.py FOLDER RANK DYING streams|calls

No launcher, which would end the others: ranks meet in FOLDER, and RANK.json is left there. Used by test_streams.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hvdtrain.comm.backends.base import Alone, Reach, lost_peer
from hvdtrain.comm.backends.tcp import StreamRanks
from hvdtrain.horovod_api.calls import Calls

SIZE = 4


class FolderMeeting(Alone):
    """Each rank leaves a file for all to read."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._meetings = folder, 0
        self.rank, self.size = rank, SIZE

    def gather(self, mine: bytes) -> list[bytes]:
        self._meetings += 1
        files = [self._folder / f"meeting{self._meetings}.{rank}" for rank in range(SIZE)]
        part = self._folder / f"part{self.rank}"
        part.write_bytes(mine)
        part.rename(files[self.rank])
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return [file.read_bytes() for file in files]


folder, rank, dying = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
meeting = FolderMeeting(folder, rank)
ranks = {"streams": StreamRanks, "calls": Calls}[sys.argv[4]](
    meeting, Reach(f"127.0.0.{1 + rank // 2}", "lo", loopback=True)
)
meeting.gather(b"all are connected")
if rank == dying:
    time.sleep(0.5)  # the others are in the midst of it
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if isinstance(ranks, Calls):
        ranks.call("allreduce", np.ones(5_000_000))
    else:
        ranks.sum(np.ones(5_000_000), "in vain")
except Exception as error:
    told = {"error": type(error).__name__, "text": str(error), "lost_peer": lost_peer(error)}
    (folder / f"{rank}.json").write_text(json.dumps(told))
