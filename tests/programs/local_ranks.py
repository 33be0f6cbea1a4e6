"""Ranks of one host sum a vector in shared memory, then without it. Rank 0 prints JSON. Used by test_shared_memory.py.

The second time, rank 1 has no room left in its address space for the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hvdtrain.comm.backends.base import Endpoint
from hvdtrain.comm.backends.tcp import TcpCommunicator
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.rendezvous import join


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Allow this process less address space than the shared memory takes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


rendezvous = join(launch_env())
endpoint = Endpoint("127.0.0.1", "lo", loopback=True)
shared = TcpCommunicator(rendezvous, endpoint)
with no_room() if rendezvous.rank == 1 else contextlib.nullcontext():
    separate = TcpCommunicator(rendezvous, endpoint)
maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
files = [fields[5] for fields in maps if len(fields) == 6 and "hvdtrain-" in Path(fields[5]).name]
vector = np.random.default_rng(rendezvous.rank).normal(size=3_000_001).astype(np.float32)
sums = [hashlib.sha256(ranks.sum(vector, "sum").tobytes()).hexdigest() for ranks in (shared, separate)]
report = shared.gather(
    {"shared": [ranks._shared is not None for ranks in (shared, separate)], "files": files, "sums": sums}
)
if rendezvous.rank == 0:
    print(json.dumps({"ranks": report}))
for ranks in (shared, separate):
    ranks.shutdown()
