"""The hosts of an elastic job, and the rule for its views. Used by `launch.elastic`."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from hvdtrain.launch.agent import Line

RETURN_S = 5.0
"""Wait before a lost host is started again. It doubles with each loss of that host, up to RETURN_MAX_S"""
RETURN_MAX_S = 60.0


@dataclasses.dataclass
class Host:
    """A host of the job, and its agent."""

    name: str
    address: str
    ranks: list[int]
    process: subprocess.Popen[bytes]
    line: Line
    heard_at: float
    lost: bool = False
    running: set[int] = dataclasses.field(default_factory=set)
    """Its ranks that have not ended"""
    ready: set[int] = dataclasses.field(default_factory=set)
    """After it was lost: its new ranks that are ready to take part again"""
    place: list[Any] | None = None
    """Where its first new rank waits for the state of rank 0: see `comm.feed`"""
    pace_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """The newest report of each rank: how long it computes in a step"""
    slow: int = 0
    """Reports in a row with which the host was too slow"""
    wait_s: float = RETURN_S
    return_at: float = float("inf")
    """When it is started again"""
    probe: subprocess.Popen[bytes] | None = None
    """Tries whether the lost host answers"""

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self.ranks)

    @property
    def gone(self) -> bool:
        return self.lost or not self.running


def slowness(host: Host, others: Sequence[Host]) -> float:
    """Return how many times as long as the median of the others a host computes in a step; 0 if it is not known."""
    paces = [max(other.pace_s.values()) for other in others if other.pace_s]
    return max(host.pace_s.values()) / statistics.median(paces) if paces and host.pace_s else 0.0


class Members:
    """The rule for views: which hosts continue after a loss."""

    def __init__(self, hosts: int, min_hosts: int) -> None:
        self.number, self.present, self._least = 0, list(range(hosts)), min_hosts
        self._established = hosts
        """Hosts of the last view in which all members were connected"""
        self.returned: set[int] = set()
        """Present hosts that have come back since then"""

    def lose(self, host: int) -> str | None:
        """Remove a host. Returns why the others cannot continue, or None if they can."""
        self.present.remove(host)
        self.returned.discard(host)
        self.number += 1
        return self.refusal(len(self.present))

    def refusal(self, count: int) -> str | None:
        """Return why `count` hosts cannot continue, or None if they can."""
        if count < self._least:
            return f"{count} of at least {self._least} hosts are left (--min-hosts)"
        if 2 * count < self._established:
            return f"{count} of {self._established} hosts are left, less than half"
        return None

    def take_back(self, hosts: Sequence[int]) -> None:
        """Add hosts behind the others, so that rank 0 has the state of the run."""
        self.present += hosts
        self.returned.update(hosts)
        self.number += 1

    def establish(self, number: int) -> None:
        """All members of view `number` are connected."""
        if number == self.number:
            self._established = len(self.present)
            self.returned.clear()
