"""Choose settings of Horovod and Open MPI that suit a link, each with its reason.

The defaults of Horovod and Open MPI suit fast networks. At 10 to 1000 Mbit/s, four of them cost most time. All four can
be changed from outside (measured with `make bench-network`; see docs/project/decisions.md):

- Open MPI's TCP sends a large message as one "put". The other side's request for its own put waits behind it, so the
  two directions of the link take turns, and most algorithms reach at most two thirds of the bandwidth. If messages are
  sent in pieces (`btl_tcp_flags` without put), both directions work at the same time.
- Horovod's ranks communicate every HOROVOD_CYCLE_TIME (1 ms), even when idle. This takes 7 % of a 10 Mbit/s link on MPI
  and 26 % on Gloo.
- With several ranks per host, the algorithm decides how often the same data crosses the network.
- Open MPI polls while it waits. Under a CPU quota, computation loses this time.
"""

from __future__ import annotations

import dataclasses
import math

from hvdtrain.system import cgroup
from hvdtrain.system.rates import goodput_both_ways, show_rate

MPI, GLOO = "mpi", "gloo"
BACKENDS = {
    MPI: "Horovod on MPI: a quarter of Gloo's idle traffic per cycle; over 4 hosts Gloo (--gloo) was sometimes faster",
    GLOO: "--gloo",
}
FUSION_BYTES = 128 * 1024 * 1024
IDLE_SHARE = 0.009
"""Share of the link for idle control traffic, below the goal of 1 %."""
MMAP_THRESHOLD_BYTES = 128 * 1024**2
LONGEST_CYCLE_MS = 200
CONTROL_BYTES = {MPI: 90, GLOO: 330}
"""A rank's control traffic per cycle and round of partners (log2 of the hosts), including headers.

Measured over 2 and 4 hosts for MPI, and over 2 hosts for Gloo.
"""
ASSUMED_BIT_S = 1_000_000_000
EAGER_BYTES = 1024 * 1024
"""Covers the round trip, including queues, of links from 10 Mbit/s to 1 Gbit/s.

With it, 1 MB over 4 hosts used 0.93 instead of 0.80 of a 10 Mbit/s link, and 0.97 instead of 0.90 at 100 Mbit/s.
"""
POLLING_FROM_BIT_S = 50_000_000
"""Rate from which polling matters. At 10 Mbit/s the transfer dominates a step, at 100 Mbit/s it does not."""
GLOO_SLOWER = "under this CPU quota Horovod on Gloo was 1.4 times as slow over 2 hosts at 1 Gbit/s (3.7 s, 2.7 s)"
POLLING_SLOWER = (
    "MPI's polling uses up this CPU quota: 1.9 times as slow over 2 hosts at 1 Gbit/s (3.9 s, 2.0 s); `make setup` "
    "builds sleep_when_idle.so, which prevents this"
)
RABENSEIFNER, RING = 6, 4
"""Values of coll_tuned_allreduce_algorithm. Halving and doubling: Thakur et al. 2005, doi 10.1177/1094342005051521."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """Facts about a link and its hosts that determine the settings."""

    hosts: int
    ranks: int
    most_ranks: int
    """Largest number of ranks on one host."""
    cores: float
    """Cores of this host, or its CPU share."""
    rate_bit_s: int | None
    """Rate of the slower direction of the host's link. None if it is unknown."""
    network: str | None = None
    """Interface between the hosts, or its network, e.g. 10.77.0.0/24. None on one host."""
    quota: bool = False
    """Whether a control group limits the host to `cores`. A polling thread then takes time from the others."""
    sleeper: str | None = None
    """Path of the library that build_horovod compiles from sleep_when_idle.c. None if it does not exist."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A parameter of Open MPI (`mca`) or an environment variable of the ranks."""

    name: str
    value: str
    reason: str
    mca: bool = False

    @property
    def variable(self) -> str:
        """The environment variable with which a user can override it."""
        return f"OMPI_MCA_{self.name}" if self.mca else self.name

    def __str__(self) -> str:
        return f"{self.name}={self.value}  # {self.reason}"


def settings(link: Link, backend: str) -> list[Setting]:
    """The settings for a link, for Horovod on "mpi" or on "gloo"."""
    chosen = [*host_settings(link), *horovod_settings(link, backend)]
    return chosen + (openmpi_settings(link) if backend == MPI else [])


def host_settings(link: Link) -> list[Setting]:
    """Settings for the threads and memory of each rank."""
    return [
        Setting(
            "OMP_NUM_THREADS",
            str(cgroup.threads(link.cores, link.most_ranks)),
            f"{link.cores:g} cores here, shared by up to {link.most_ranks} ranks",
        ),
        Setting(
            "MALLOC_MMAP_THRESHOLD_",
            str(MMAP_THRESHOLD_BYTES),
            "bytes; smaller tensors stay in the heap, without mmap and munmap: torch's CPU steps were 6-8 % faster "
            "(ResNet-34, 32x32); larger tensors would leave holes there, which large models cannot afford",
        ),
        Setting("MALLOC_TRIM_THRESHOLD_", str(16 * 1024**3), "bytes; keeps the heap between steps"),
    ]


def cycle_ms(link: Link, backend: str) -> int:
    """Shortest cycle whose control traffic stays below IDLE_SHARE of the link: 1 ms (Horovod's default) to 200 ms."""
    rounds = math.ceil(math.log2(max(2, link.hosts)))
    bits = 8 * CONTROL_BYTES[backend] * rounds * link.most_ranks
    return max(1, min(LONGEST_CYCLE_MS, math.ceil(1000 * bits / (IDLE_SHARE * (link.rate_bit_s or ASSUMED_BIT_S)))))


def horovod_settings(link: Link, backend: str) -> list[Setting]:
    if link.hosts < 2:
        return []
    rate = link.rate_bit_s or ASSUMED_BIT_S
    shown = show_rate(rate)
    cycle = cycle_ms(link, backend)
    share = "under 1 %" if cycle < LONGEST_CYCLE_MS else "above 1 %"
    idle = f"ms; idle control traffic {share} of {shown} over {link.hosts} hosts (a shorter cycle makes small"
    flat = "bytes; sends all ready gradients in one buffer (ResNet-34: 85 MB), which"
    chosen = [
        Setting("HOROVOD_CYCLE_TIME", str(cycle), f"{idle} all-reduces faster, but adds traffic)"),
        Setting("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES), f"{flat} reached 97 % of the link, 110 tensors 88-92 %"),
    ]
    if backend == GLOO:
        timeout_s = max(60, math.ceil(4 * FUSION_BYTES * 8 / goodput_both_ways(rate)))
        reason = f"twice the time of {FUSION_BYTES >> 20} MiB at {shown}; with the default of 30 s slow transfers fail"
        chosen.append(Setting("HOROVOD_GLOO_TIMEOUT_SECONDS", str(timeout_s), reason))
    return chosen


def openmpi_settings(link: Link) -> list[Setting]:
    """Settings for Open MPI 4.1."""
    chosen = [("mpi_yield_when_idle", "1", "a waiting rank polls, but yields to computing threads")]
    if link.hosts > 1:
        rate, eager = link.rate_bit_s or ASSUMED_BIT_S, str(EAGER_BYTES)
        pieces = "no put: sends large messages in pieces, in both directions at once (+50 % from 5 MB)"
        chosen += [
            ("pml", "ob1", "plain TCP between hosts, as the settings below require"),
            ("btl_tcp_flags", "send,inplace,need-ack,need-csum", pieces),
            (
                "btl_tcp_eager_limit",
                eager,
                "bytes; smaller messages are sent without a handshake",
            ),
            (
                "btl_tcp_rndv_eager_limit",
                eager,
                "bytes of a larger message that are sent with the handshake, so that the link is never idle",
            ),
        ]
        if link.ranks > 2:
            chosen += [
                ("coll_tuned_use_dynamic_rules", "1", "required for the next parameter to take effect"),
                algorithm(link),
            ]
        if link.network:
            reason = "use only the network between the hosts"
            chosen += [(f"{layer}_tcp_if_include", link.network, reason) for layer in ("btl", "oob")]
        if rate < 200_000_000:
            size = max(65_536, 131_072 * rate // 100_000_000)
            reason = f"bytes, {1000 * size * 8 / rate:.0f} ms of {show_rate(rate)}: limits the queue ahead of an answer"
            chosen.append(("btl_tcp_sndbuf", str(size), reason))
        # No keep-alive here: with Open MPI's own, mpirun 4.1.8 crashes when a link is cut. The sentinel handles that.
        chosen.append(("orte_keep_fqdn_hostnames", "1", "node.a.lab and node.b.lab are two hosts"))
        reason = "ssh fails instead of prompting for a password"
        chosen.append(("plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10", reason))
    result = [Setting(*one, mca=True) for one in chosen]
    if link.hosts > 1 and link.quota and link.sleeper:
        reason = f"waiting ranks sleep instead of polling, which would use up the quota of {link.cores:g} cores"
        result.append(Setting("LD_PRELOAD", link.sleeper, reason))
    return result


def advice(link: Link, backend: str) -> str | None:
    """Advice to use PyTorch's DistributedDataParallel, if it is known to be faster than Horovod on this link.

    The seconds in the advice are those of an epoch in docs/benchmarks/strategies.md.
    """
    if link.hosts < 2 or not link.quota or (link.rate_bit_s or ASSUMED_BIT_S) < POLLING_FROM_BIT_S:
        return None
    if backend == GLOO:
        why = GLOO_SLOWER
    elif link.sleeper is None:
        why = POLLING_SLOWER
    else:
        return None
    return f"advice=--strategy native  # {why}"


def algorithm(link: Link) -> tuple[str, str, str]:
    """The setting for the all-reduce that sends least over the network. Ranks are placed host by host."""
    number, reason = RING, "ring: every host sends and receives all the time"
    if link.ranks & (link.ranks - 1) == 0 and link.most_ranks > 1:
        number = RABENSEIFNER
        reason = "halving and doubling: neighbours share a host, so each byte crosses the network once (a ring: 1.5x)"
    return "coll_tuned_allreduce_algorithm", str(number), reason
