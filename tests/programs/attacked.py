"""Two ranks that connect while strangers disturb them. Rank 0 prints their sum as JSON. Used by test_security.py.

    attacked.py tcp|servers FOLDER

Rank 0 has few descriptors and writes its address to FOLDER/door. Rank 1 connects once FOLDER/go exists.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.rendezvous import join
from hvdtrain.strategies.studies.servers import ServerCommunicator


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    meeting = join(launch_env())
    gather = meeting.gather_bytes

    def told(mine: bytes) -> list[bytes]:
        found = gather(mine)
        if not (folder / "go").exists():
            if meeting.rank == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
                (folder / "part").write_text(" ".join(found[0].decode().split()[1:]))
                (folder / "part").rename(folder / "door")
            while meeting.rank == 1 and not (folder / "go").exists():
                time.sleep(0.02)
        return found

    meeting.gather_bytes = told
    ranks = {"tcp": TcpCommunicator, "servers": ServerCommunicator}[kind](
        meeting, Endpoint("127.0.0.1", "lo", loopback=True)
    )
    report = {"sum": ranks.sum(np.array([1.0, ranks.rank]), "sum").tolist(), "cpu_s": time.process_time()}
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    ranks.shutdown()


main()
