"""Queueing disciplines (tc(8)): the commands that shape a link, and the current state of a device.

A token bucket (tc-tbf(8)) replaces the device's root queue. Its sizes follow from the rate:

- The burst is the data that may pass at line speed after a pause: 2 ms of the rate, at least two full frames, and 1 ms
  of the rate above 125 kB. Larger bursts let short messages through unthrottled: a burst of 1 s passes 256 kB at
  6.8 Gbit/s on a "10 Mbit/s" link. Smaller bursts lose rate when the kernel's timer is late, which is common on a busy
  machine.
- The queue holds 32 ms of the rate. Longer queues delay acknowledgements behind data, which costs 20 % or more when
  both directions are full. Shorter queues drop packets when several hosts send to one.

Packets that a device *receives* cannot wait in a queue of the device. They are redirected through an ifb device, whose
root queue is shaped.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hvdtrain.system import exits
from hvdtrain.system.commands import Command, run
from hvdtrain.system.exits import Failure

Qdisc = dict[str, Any]
"""One entry of `tc -json qdisc show`."""

HANDLE = "4876:"
""""Hv" in hexadecimal. It marks the throttle's own queue. It is constant, so a new rate changes the queue in place."""
BURST_S = 0.002
LARGE_BURST_BYTES = 125_000
LARGE_BURST_S = 0.001
QUEUE_S = 0.032
LEAST_FRAMES = 2
LEAST_QUEUE_BYTES = 32_000
ETHERNET_BYTES = 14
MOST_QUEUE_BYTES = 256_000_000
VOLATILE = {"bytes", "packets", "drops", "overlimits", "requeues", "backlog", "qlen", "refcnt"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Target state of one direction of a link."""

    rate_bit_s: int


def burst_bytes(rate_bit_s: int, mtu: int = 1500) -> int:
    """Bytes that may pass at line speed after a pause."""
    most = max(LARGE_BURST_BYTES, round(rate_bit_s * LARGE_BURST_S / 8))
    return max(LEAST_FRAMES * (mtu + ETHERNET_BYTES), min(round(rate_bit_s * BURST_S / 8), most))


def limit_bytes(rate_bit_s: int, mtu: int = 1500) -> int:
    """Bytes that may wait in the queue. Further packets are dropped."""
    least = max(LEAST_QUEUE_BYTES, 8 * (mtu + ETHERNET_BYTES))
    return min(max(least, round(rate_bit_s * QUEUE_S / 8)), MOST_QUEUE_BYTES)


def tc(netns: str | None, *words: str) -> Command:
    return ["tc", *(["-netns", netns] if netns else []), *words]


def ip(netns: str | None, *words: str) -> Command:
    return ["ip", *(["-netns", netns] if netns else []), *words]


# --- shaping ---------------------------------------------------------------------------------------------------------


def shape_commands(netns: str | None, dev: str, rate_bit_s: int, mtu: int = 1500) -> list[Command]:
    """Limit the rate at which a device sends. If it is throttled already, this changes the rate in place."""
    sizes = ["burst", str(burst_bytes(rate_bit_s, mtu)), "limit", str(limit_bytes(rate_bit_s, mtu))]
    root = ["qdisc", "replace", "dev", dev, "root", "handle", HANDLE]
    return [tc(netns, *root, "tbf", "rate", f"{rate_bit_s}bit", *sizes)]


def ingress_commands(netns: str | None, dev: str, ifb: str, shape: Shape, mtu: int, *, exists: bool) -> list[Command]:
    """Limit the rate at which a device receives. With `exists` the ifb device exists and only its rate changes."""
    shaping = shape_commands(netns, ifb, shape.rate_bit_s, mtu)
    if exists:
        return shaping
    everything = ["protocol", "all", "prio", "1", "u32", "match", "u32", "0", "0"]
    return [
        ip(netns, "link", "add", "name", ifb, "type", "ifb"),
        ip(netns, "link", "set", "dev", ifb, "mtu", str(mtu), "addrgenmode", "none", "up"),
        *shaping,
        tc(netns, "qdisc", "add", "dev", dev, "ingress"),
        [
            *tc(netns, "filter", "add", "dev", dev, "parent", "ffff:", *everything),
            *("action", "mirred", "egress", "redirect", "dev", ifb),
        ],
    ]


# --- current state ---------------------------------------------------------------------------------------------------


def device(netns: str | None, dev: str) -> dict[str, Any]:
    """`ip -json link show` of one device. Raises Failure (2) that lists the existing devices if it does not exist."""
    entries = json.loads(run(ip(netns, "-json", "link", "show")))
    names = [entry["ifname"] for entry in entries if "ifname" in entry]
    for entry in entries:
        if entry.get("ifname") == dev:
            return dict(entry)
    where = f" in {netns}" if netns else ""
    raise Failure(f"no interface {dev!r}{where}; hint: choose one of: {', '.join(names)}", exits.USAGE)


def read(netns: str | None, dev: str) -> list[Qdisc]:
    """The device's queues without their counters. Equal lists mean equal queues.

    With `-raw` tc also prints the queue size of a token bucket, otherwise only its latency.
    """
    text = run(tc(netns, "-json", "-raw", "qdisc", "show", "dev", dev)) or "[]"
    qdiscs = [{key: value for key, value in qdisc.items() if key not in VOLATILE} for qdisc in json.loads(text)]
    for qdisc in qdiscs:
        qdisc.get("options", {}).pop("direct_packets_stat", None)  # a counter of HTB
    return qdiscs


def root_of(qdiscs: list[Qdisc]) -> Qdisc:
    return next((qdisc for qdisc in qdiscs if qdisc.get("root")), {})


def is_ours(qdiscs: list[Qdisc]) -> bool:
    """Whether the root queue is the throttle's token bucket."""
    root = root_of(qdiscs)
    return root.get("handle") == HANDLE and root.get("kind") == "tbf"


def is_ingress(qdisc: Qdisc) -> bool:
    return qdisc["kind"] in {"ingress", "clsact"}


def rate_of(qdiscs: list[Qdisc]) -> int | None:
    """Rate of the throttle's token bucket in bit/s. None if the device has none."""
    return int(root_of(qdiscs)["options"]["rate"]) * 8 if is_ours(qdiscs) else None


def remove_ingress_commands(netns: str | None, dev: str, ifb: str, *, ingress: bool, redirect: bool) -> list[Command]:
    """Undo `ingress_commands`, also after an interruption. The flags say which parts exist."""
    commands = [tc(netns, "qdisc", "del", "dev", dev, "ingress")] if ingress else []
    return commands + ([ip(netns, "link", "del", "dev", ifb)] if redirect else [])
