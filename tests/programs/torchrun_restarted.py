"""Two ranks of torchrun meet, and the last one fails at its first start, which makes torchrun start both again beside
what they left in its store. Used by test_native.py."""

from __future__ import annotations

import json
import os

from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.rendezvous import join

where = launch_env()
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
meeting = join(where)
told = [json.loads(each) for each in meeting.gather_bytes(json.dumps([where.rank, start]).encode())]
if where.rank == 0:
    print(json.dumps({"told": told}), flush=True)
meeting.gather_bytes(b"")  # so that no rank fails before another has read its word
if start == "0" and where.rank == where.size - 1:
    raise SystemExit(1)
