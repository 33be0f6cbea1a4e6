"""Links between hosts, as the TCP payload that they carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.system.rates import goodput_both_ways, goodput_one_way

LATENCY_S = 2e-4
"""Time of an empty message between two hosts of a local network, including the wake-up of its receiver"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A host's link. Goodputs are payload bytes per second while both directions carry data."""

    up: float
    down: float
    latency_s: float = LATENCY_S

    @staticmethod
    def of_rate(up_bit_s: float, down_bit_s: float | None = None, latency_s: float = LATENCY_S) -> Link:
        """Return a link with these rates of Ethernet frames, which are equal by default."""
        up, down = (goodput_both_ways(rate) / 8 for rate in (up_bit_s, down_bit_s or up_bit_s))
        return Link(up=up, down=down, latency_s=latency_s)

    def seconds(self, sent: float, received: float) -> float:
        """Return the seconds that the link needs to send and to receive these payload bytes at once."""
        alone = 1.0 if sent and received else goodput_both_ways(1) / goodput_one_way(1)
        return alone * max(sent / self.up, received / self.down)


def measured(links: Sequence[Mapping[str, Any]]) -> dict[Any, Link]:
    """Return the link of each host from a measurement of goodput, see `records.Manifest.links`.

    Each host sends to the next one in a ring, so a goodput is that of a sender's uplink or of a receiver's downlink.
    A host's link is taken to be as fast as the faster of its two goodputs. If that does not explain the slower one,
    the direction of the slower host is. Hosts that were not measured are as fast as the slowest goodput. Empty if
    nothing was measured.
    """
    edges = [
        (link["host"], link.get("goodput_to"), link["goodput_mbit"] * 125e3)
        for link in links
        if link.get("goodput_mbit")
    ]
    if not edges:
        return {}
    slowest = min(rate for *_, rate in edges)
    hosts = [link["host"] for link in links]
    fastest = {host: max((rate for *ends, rate in edges if host in ends), default=slowest) for host in hosts}
    up, down = dict(fastest), dict(fastest)
    for sender, receiver, rate in edges:
        if rate < min(fastest[sender], fastest.get(receiver, rate)):
            if fastest[sender] <= fastest[receiver]:
                up[sender] = rate
            else:
                down[receiver] = rate
    return {host: Link(up=up[host], down=down[host]) for host in hosts}
