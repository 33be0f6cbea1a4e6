"""Which settings of Horovod and Open MPI suit a link, each with its reason.

What Horovod and Open MPI do by default was chosen for fast networks. On 10 to 1000 Mbit/s four things cost most, and
all of them can be set from outside (measured by tools/bench_network.py, figures in docs/LOG.md):

- Open MPI's TCP sends a large message as one "put". While it fills the connection, the other side's request for its own
  put waits behind it, so the two directions of the wire take turns and most algorithms get two thirds of the wire or
  less. In pieces (`btl_tcp_flags` without put) both directions run at once.
- Horovod's ranks talk every HOROVOD_CYCLE_TIME (1 ms) also when nothing is to do: 7 % of a 10 Mbit/s link on MPI and
  26 % on Gloo.
- With several ranks per host, the order of the exchanges decides how often the same data crosses the wire.
- Open MPI waits by polling. Under a CPU quota that time is missing in the computation.
"""

from __future__ import annotations

import dataclasses
import math

from hvdtrain.system import cgroup as quota
from hvdtrain.system.rates import goodput_both_ways, show_rate

MPI, GLOO = "mpi", "gloo"
BACKENDS = {
    MPI: "Horovod on MPI: a quarter of Gloo's idle traffic per cycle; over 4 hosts Gloo (--gloo) was at times faster",
    GLOO: "--gloo",
}
FUSION_BYTES = 128 * 1024 * 1024
IDLE_SHARE = 0.009
"""Of the link, that idle control traffic may take: under the goal of 1 %"""
LONGEST_CYCLE_MS = 200
CONTROL_BYTES = {MPI: 90, GLOO: 330}
"""A rank's control traffic per cycle and round of partners (log2 of the hosts), headers included; measured: MPI's over
2 and 4 hosts, Gloo's over 2 only"""
ASSUMED_BIT_S = 1_000_000_000
EAGER_BYTES = 1024 * 1024
"""Covers the round trip, queues included, of every link from 10 Mbit/s to 1 Gbit/s; 1 MB over 4 hosts went from 0.80 to
0.93 of the wire at 10 Mbit/s, and from 0.90 to 0.97 at 100 Mbit/s"""
POLLING_FROM_BIT_S = 50_000_000
"""At 10 Mbit/s the wire takes nearly all of a step and exchanges differ little; at 100 Mbit/s they do"""
GLOO_SLOWER = "under this CPU quota Horovod on Gloo was 1.4 times as slow over 2 hosts at 1 Gbit/s (3.7 s, 2.7 s)"
POLLING_SLOWER = (
    "MPI's polling uses up this CPU quota: twice as slow over 2 hosts at 1 Gbit/s (5.7 s, 2.7 s); `make setup` builds"
    " sleep_when_idle.so, which mends it"
)
RABENSEIFNER, RING = 6, 4
"""Of coll_tuned_allreduce_algorithm: halving and doubling (Thakur et al. 2005, doi 10.1177/1094342005051521), ring"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The facts about a link from which the settings follow."""

    hosts: int
    ranks: int
    most_ranks: int
    """On one host"""
    cores: float
    """Of the host this runs on, or its CPU share of them"""
    rate_bit_s: int | None
    """Of the slower direction of the host's link; None if nothing is known"""
    network: str | None = None
    """The interface between the hosts, or its network as 10.77.0.0/24; None on one host"""
    quota: bool = False
    """Whether a control group limits the host to `cores`, so that a thread that polls takes time from the others"""
    sleeper: str | None = None
    """Path of the library that tools/setup.sh makes of tools/sleep_when_idle.c; None if there is none"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting; a parameter of Open MPI (`mca`) or an environment variable of the ranks."""

    name: str
    value: str
    reason: str
    mca: bool = False

    @property
    def variable(self) -> str:
        """The environment variable by which a user sets it too."""
        return f"OMPI_MCA_{self.name}" if self.mca else self.name

    def __str__(self) -> str:
        return f"{self.name}={self.value}  # {self.reason}"


def settings(link: Link, backend: str) -> list[Setting]:
    """The settings for a link, for Horovod on "mpi" or on "gloo"."""
    chosen = [*host_settings(link), *horovod_settings(link, backend)]
    return chosen + (openmpi_settings(link) if backend == MPI else [])


def host_settings(link: Link) -> list[Setting]:
    """Threads and memory of each rank."""
    return [
        Setting(
            "OMP_NUM_THREADS",
            str(quota.threads(link.cores, link.most_ranks)),
            f"{link.cores:g} cores here, shared by {link.most_ranks} of the ranks at most",
        ),
        Setting(
            "MALLOC_MMAP_THRESHOLD_",
            str(128 * 1024**2),
            "tensors stay in the heap: torch's CPU steps were 6-8 % faster (ResNet-34, 32x32) without mmap and munmap; "
            "larger ones would leave holes there that a model of gigabytes cannot spare",
        ),
        Setting("MALLOC_TRIM_THRESHOLD_", str(16 * 1024**3), "and the heap is not given back between steps"),
    ]


def cycle_ms(link: Link, backend: str) -> int:
    """The shortest cycle whose control traffic stays under IDLE_SHARE of the link; 1 ms (Horovod's) to 200 ms."""
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
    idle = f"ms; idle control traffic {share} of {shown} over {link.hosts} hosts (longer: less; shorter: small"
    flat = "bytes; what is ready goes in one piece, up to all gradients of ResNet-34 (85 MB): one flat buffer"
    chosen = [
        Setting("HOROVOD_CYCLE_TIME", str(cycle), f"{idle} allreduces answer sooner)"),
        Setting("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES), f"{flat} reached 97 % of the wire, 110 tensors 88-92 %"),
    ]
    if backend == GLOO:
        timeout_s = max(60, math.ceil(4 * FUSION_BYTES * 8 / goodput_both_ways(rate)))
        reason = f"twice what {FUSION_BYTES >> 20} MiB take at {shown}; at its default of 30 s slow transfers fail"
        chosen.append(Setting("HOROVOD_GLOO_TIMEOUT_SECONDS", str(timeout_s), reason))
    return chosen


def openmpi_settings(link: Link) -> list[Setting]:
    """For Open MPI 4.1; the same parameters exist, unused, where ranks share one host."""
    told = [("mpi_yield_when_idle", "1", "a waiting rank polls; it lets threads that compute go first")]
    if link.hosts > 1:
        rate, eager = link.rate_bit_s or ASSUMED_BIT_S, str(EAGER_BYTES)
        pieces = "no put: large messages in pieces, so that both directions run at once (+50 % on 5 MB and more)"
        told += [
            ("pml", "ob1", "plain TCP between hosts, so that the settings below count"),
            ("btl_tcp_flags", "send,inplace,need-ack,need-csum", pieces),
            (
                "btl_tcp_eager_limit",
                eager,
                "bytes; smaller messages go at once, without a question and its answer first",
            ),
            (
                "btl_tcp_rndv_eager_limit",
                eager,
                "bytes of larger ones that go with the question, so the wire never waits",
            ),
        ]
        if link.ranks > 2:
            told += [("coll_tuned_use_dynamic_rules", "1", "makes the next line count"), algorithm(link)]
        if link.network:
            reason = "the way to the other hosts, and no other"
            told += [(f"{layer}_tcp_if_include", link.network, reason) for layer in ("btl", "oob")]
        if rate < 200_000_000:
            size = max(65_536, 131_072 * rate // 100_000_000)
            reason = f"bytes, {1000 * size * 8 / rate:.0f} ms of {show_rate(rate)}: what queues ahead of an answer"
            told.append(("btl_tcp_sndbuf", str(size), reason))
        # ssh, not Open MPI's keep-alive, which with a cut link makes mpirun crash (4.1.8): the sentinel sees to that.
        reason = "ssh that would ask for a password fails, as nobody could answer"
        told.append(("plm_rsh_args", "-o BatchMode=yes -o ConnectTimeout=10", reason))
    chosen = [Setting(*one, mca=True) for one in told]
    if link.hosts > 1 and link.quota and link.sleeper:
        reason = f"waiting ranks sleep instead of polling, which would take from the quota of {link.cores:g} cores"
        chosen.append(Setting("LD_PRELOAD", link.sleeper, reason))
    return chosen


def advice(link: Link, backend: str) -> str | None:
    """What to take instead where Horovod is known to be slower than PyTorch's DistributedDataParallel, with the figures
    of an epoch of docs/RESULTS.md; None elsewhere."""
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
    """Which allreduce sends least over the wire, ranks being placed host by host."""
    number, reason = RING, "ring: every host sends and receives all the time"
    if link.ranks & (link.ranks - 1) == 0 and link.most_ranks > 1:
        number = RABENSEIFNER
        reason = "halving and doubling: neighbours are on one host, so the wire carries each byte once (a ring: 1.5x)"
    return "coll_tuned_allreduce_algorithm", str(number), reason
