"""Queues (tc(8)): the commands that shape a link, what is there now, and what puts it back.

A link is shaped by a token bucket (tc-tbf(8)) in the place of the device's root queue. Its sizes follow from the rate:

- the burst, what may pass at line speed after a pause, is what the rate sends in 2 ms, and two full frames at least;
  above 125 kB it is what the rate sends in 1 ms. Larger ones let short messages through unthrottled (a burst of 1 s
  passes 256 kB at 6.8 Gbit/s on a "10 Mbit/s" link); smaller ones lose rate whenever the kernel's timer is late, which
  on a busy machine is often.
- the queue is what the rate sends in 32 ms. Longer queues hold acknowledgements up behind data, which costs 20 % and
  more when both directions are full; shorter ones drop when several hosts send to one.

What a device *receives* cannot wait in a queue, so it takes a detour through another device (ifb) whose root is shaped.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from hvdtrain.system import exits
from hvdtrain.system.commands import Command, find, run
from hvdtrain.system.exits import Failure

Qdisc = dict[str, Any]
"""One entry of `tc -json qdisc show`"""

HANDLE = "4876:"  # "Hv": nobody else's, so what carries it is ours; one and the same for ever, so a change is in place
NETEM_HANDLE = "4877:"
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
    """What a direction of a link is to be. A delay or loss needs the kernel's netem."""

    rate_bit_s: int
    delay_ms: float | None = None
    loss_percent: float | None = None

    @property
    def netem(self) -> list[str]:
        """netem's words (tc-netem(8)); empty without delay and loss."""
        words = []
        if self.delay_ms is not None:
            words += ["delay", f"{self.delay_ms:g}ms"]
        if self.loss_percent is not None:
            words += ["loss", f"{self.loss_percent:g}%"]
        return words


def burst_bytes(rate_bit_s: int, mtu: int = 1500) -> int:
    """Bytes that may pass at once after a pause."""
    most = max(LARGE_BURST_BYTES, round(rate_bit_s * LARGE_BURST_S / 8))
    return max(LEAST_FRAMES * (mtu + ETHERNET_BYTES), min(round(rate_bit_s * BURST_S / 8), most))


def limit_bytes(rate_bit_s: int, mtu: int = 1500) -> int:
    """Bytes that may wait in the queue; more are dropped."""
    least = max(LEAST_QUEUE_BYTES, 8 * (mtu + ETHERNET_BYTES))
    return min(max(least, round(rate_bit_s * QUEUE_S / 8)), MOST_QUEUE_BYTES)


def tc(netns: str | None, *words: str) -> Command:
    return ["tc", *(["-netns", netns] if netns else []), *words]


def ip(netns: str | None, *words: str) -> Command:
    return ["ip", *(["-netns", netns] if netns else []), *words]


# --- shaping ---------------------------------------------------------------------------------------------------------


def shape_commands(netns: str | None, dev: str, rate_bit_s: int, mtu: int = 1500) -> list[Command]:
    """Limits what leaves through a device. On one that is shaped already it changes the rate in place, with no gap."""
    sizes = ["burst", str(burst_bytes(rate_bit_s, mtu)), "limit", str(limit_bytes(rate_bit_s, mtu))]
    root = ["qdisc", "replace", "dev", dev, "root", "handle", HANDLE]
    return [tc(netns, *root, "tbf", "rate", f"{rate_bit_s}bit", *sizes)]


def netem_commands(netns: str | None, dev: str, shape: Shape, mtu: int, current: list[Qdisc]) -> list[Command]:
    """Delay and loss inside the token bucket: what waits there waits for its delay and for its turn at once.

    Without them, takes away what an earlier throttle left of them.
    """
    inner = ["qdisc", "replace", "dev", dev, "parent", f"{HANDLE}1", "handle"]
    if shape.netem:
        delayed = shape.rate_bit_s * (shape.delay_ms or 0) / 8000
        frames = round((limit_bytes(shape.rate_bit_s, mtu) + delayed) / (mtu + ETHERNET_BYTES)) + 1
        return [tc(netns, *inner, NETEM_HANDLE, "netem", "limit", str(frames), *shape.netem)]
    if any(qdisc.get("handle") == NETEM_HANDLE for qdisc in current):
        return [tc(netns, *inner, "4878:", "bfifo", "limit", str(limit_bytes(shape.rate_bit_s, mtu)))]
    return []


def ingress_commands(netns: str | None, dev: str, ifb: str, shape: Shape, mtu: int, *, exists: bool) -> list[Command]:
    """Limits what arrives at a device. With `exists` the detour is there and only its rate changes."""
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


# --- what is there ---------------------------------------------------------------------------------------------------


def device(netns: str | None, dev: str) -> dict[str, Any]:
    """`ip -json link show` of one device. Raises Failure (2) if there is none, with the names there are."""
    found = json.loads(run(ip(netns, "-json", "link", "show")))
    names = [entry["ifname"] for entry in found if "ifname" in entry]
    for entry in found:
        if entry.get("ifname") == dev:
            return dict(entry)
    raise Failure(f"no interface {dev!r}{f' in {netns}' if netns else ''}; there are: {', '.join(names)}", exits.USAGE)


def read(netns: str | None, dev: str) -> list[Qdisc]:
    """The device's queues without their counters: equal lists mean that nothing about them differs.

    `-raw` adds what tc otherwise only prints as a latency, the size of a token bucket's queue.
    """
    return _settings(run(tc(netns, "-json", "-raw", "qdisc", "show", "dev", dev)))


def _settings(said: str) -> list[Qdisc]:
    """What tc printed, without counters."""
    found = [{key: value for key, value in qdisc.items() if key not in VOLATILE} for qdisc in json.loads(said or "[]")]
    for qdisc in found:
        qdisc.get("options", {}).pop("direct_packets_stat", None)  # of HTB, a counter too
    return found


def root_of(qdiscs: list[Qdisc]) -> Qdisc:
    return next((qdisc for qdisc in qdiscs if qdisc.get("root")), {})


def is_ours(qdiscs: list[Qdisc]) -> bool:
    """Whether the root is a token bucket with our handle."""
    root = root_of(qdiscs)
    return root.get("handle") == HANDLE and root.get("kind") == "tbf"


def is_ingress(qdisc: Qdisc) -> bool:
    return qdisc["kind"] in {"ingress", "clsact"}


def rate_of(qdiscs: list[Qdisc]) -> int | None:
    """bit/s of our token bucket at the root, None if there is none."""
    return int(root_of(qdiscs)["options"]["rate"]) * 8 if is_ours(qdiscs) else None


def has_netem() -> bool:
    """Tries it on the loopback device of a network namespace that ends with the command. Needs root."""
    try:
        run(["unshare", "--net", find("tc"), "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"])
    except Failure as failure:
        if failure.code == exits.NO_PERMISSION:
            raise
        return False
    return True


# --- putting back ----------------------------------------------------------------------------------------------------


def _tbf_words(options: dict[str, Any]) -> Iterator[list[str]]:
    # tc keeps a burst as the time it takes, in ticks of 64 ns, and shows less than what it was given
    exact = int(options["burst_raw"], 16) * 64 * options["rate"] // 10**9
    for burst in (exact + 1, exact, exact + 2, options["burst"]):
        words = ["tbf", "rate", f"{options['rate'] * 8}bit", "burst", str(burst)]
        yield [*words, "limit", str(options["limit"])]


def _fq_codel_words(options: dict[str, Any]) -> Iterator[list[str]]:
    sizes = [
        (name, options[name]) for name in ("limit", "flows", "quantum", "memory_limit", "drop_batch") if name in options
    ]
    for more in (1, 0, 2):  # times are kept in units of 1.024 us and read rounded down
        times = [
            (name, f"{options[name] + more}us") for name in ("target", "interval", "ce_threshold") if name in options
        ]
        words = [str(word) for pair in (*sizes, *times) for word in pair]
        yield ["fq_codel", *words, "ecn" if options.get("ecn") else "noecn"]


def _words(qdisc: Qdisc) -> list[list[str]]:
    """Words that might make this qdisc again, the likeliest first; empty if this tool does not know how."""
    kind, options = qdisc["kind"], qdisc.get("options", {})
    if kind in {"pfifo", "bfifo"} and set(options) == {"limit"}:
        return [[kind, "limit", str(options["limit"])]]
    needed = {"rate", "burst_raw", "limit"}
    if kind == "tbf" and needed <= set(options) <= needed | {"burst", "lat"}:
        return list(_tbf_words(options))
    if kind == "fq_codel":
        return list(_fq_codel_words(options))
    if kind == "htb":
        words = ["htb", "r2q", str(options["r2q"]), "default", str(options["default"])]
        return [[*words, "direct_qlen", str(options["direct_qlen"])]]
    return []


def rebuild_words(netns: str | None, dev: str, found: list[Qdisc]) -> list[str] | None:
    """`handle H: KIND OPTIONS` that makes the device's root queue again; None where it is the kernel's default.

    Proved before anything is touched: the queue is made on the loopback device of a network namespace of its own and
    must read exactly the same. Raises Failure (1) for a queue that cannot be made again: classes, filters, other kinds.
    """
    root = root_of(found)
    if not root or root["handle"] == "0:":
        return None
    others = [qdisc["kind"] for qdisc in found if qdisc is not root and not is_ingress(qdisc)]
    # HTB without classes shows no children; its classes have no entry of their own in this list
    classes = run(tc(netns, "class", "show", "dev", dev)).strip() if root["kind"] == "htb" else ""
    filters = run(tc(netns, "filter", "show", "dev", dev)).strip()
    if not others and not classes and not filters:
        for words in _words(root):
            if _trial(["handle", root["handle"], *words]) == root:
                return ["handle", root["handle"], *words]
    what = f"{root['kind']} {root['handle']}" + (f" with {', '.join(others)}" if others else "")
    place = f"{dev} in {netns}" if netns else dev
    raise Failure(
        f"{place} has a queue of its own ({what}) that could not be put back afterwards; nothing changed. "
        f"Remove it first if it may go: sudo {' '.join(tc(netns, 'qdisc', 'del', 'dev', dev, 'root'))}"
    )


def _trial(words: list[str]) -> Qdisc:
    batch = f"qdisc add dev lo root {' '.join(words)}\nqdisc show dev lo\n"
    try:
        said = run(["unshare", "--net", find("tc"), "-json", "-raw", "-batch", "-"], stdin=batch)
    except Failure:
        return {}
    return root_of(_settings(said))


def remove_ingress_commands(netns: str | None, dev: str, ifb: str, *, ingress: bool, detour: bool) -> list[Command]:
    """Takes away what ingress_commands made, whole or in part."""
    commands = [tc(netns, "qdisc", "del", "dev", dev, "ingress")] if ingress else []
    return commands + ([ip(netns, "link", "del", "dev", ifb)] if detour else [])
