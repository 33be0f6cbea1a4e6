"""One machine plays several hosts, for programs on real ranks: hosts differ by their address, 127.0.0.1, 127.0.0.2 ...,
and their name, host0, host1 ...

So the strategies' reducers work here without virtual hosts, for which one must be root. No sentinel watches.
"""

from __future__ import annotations

import socket

from hvdtrain.comm import world
from hvdtrain.comm.backends.base import Endpoint, RankGroup, Rendezvous
from hvdtrain.comm.launch_env import launch_env
from hvdtrain.comm.rendezvous import join


class Kept:
    """A meeting that outlives the worlds that are built on it: MPI can be left once only."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self.local_rank, self.local_size = meeting.local_rank, meeting.local_size
        self.job_key, self.gather_bytes = meeting.job_key, meeting.gather_bytes

    def shutdown(self) -> None:
        pass


def prepared_once(framework: str) -> None:
    """For several trainings in one process: TensorFlow can be prepared once only."""
    if framework == "tensorflow":
        from hvdtrain.frameworks import tensorflow

        device = tensorflow.prepare("cpu", 0, 1)
        tensorflow.prepare = lambda *told, **named: device


def joined(per_host: int) -> Rendezvous:
    """The ranks, `per_host` of them on each host in every `World` that is made from now on."""
    meeting = join(launch_env())
    host = meeting.rank // per_host
    socket.gethostname = lambda: f"host{host}"
    reach = Endpoint(f"127.0.0.{1 + host}", "lo", loopback=True)

    def met(ranks: Rendezvous, stall_limit_s: float = 0.0) -> RankGroup:
        return RankGroup(ranks, None, reach)

    world.join = lambda *place: Kept(meeting)
    world.watched = met
    return meeting
