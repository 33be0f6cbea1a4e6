"""One direction of a device: its original queue, its target shape, and the commands that lead to either."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle import qdisc
from hvdtrain.lab.throttle.qdisc import Qdisc, Shape
from hvdtrain.system.commands import Command, run
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class LinkTarget(virtual.Link):
    """A link that a command refers to, and the file in which its host finds the requested rates."""

    file: Path

    @property
    def redirect(self) -> bool:
        """Whether packets arrive at this device instead of leaving through it. On a switch's port all leave."""
        return self.netns is None and self.direction == "down"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link(virtual.Link):
    """A link with the state that the throttle needs to restore it."""

    ifb: str | None
    """Device through which the packets that `dev` receives are redirected. None: the root queue of `dev` is shaped."""
    mtu: int
    identity: str
    """Identifies the network namespace and the device. A recreated device differs and must not be restored."""
    original: list[Qdisc]
    """Queues before the first throttle."""
    shape: Shape | None = None
    token: str = ""
    """Identifies the change that set the shape."""
    until_utc: str | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Link:
        shape = Shape(rate_bit_s=document["shape"]["rate_bit_s"]) if document["shape"] else None
        return cls(**{**document, "shape": shape})


def identify(netns: str | None, dev: str) -> tuple[str, int]:
    """(unique identity, MTU) of a device. Raises Failure (2) if it does not exist."""
    about = qdisc.device(netns, dev)
    namespace = Path(f"/run/netns/{netns}" if netns else "/proc/self/ns/net").stat()
    return f"{namespace.st_ino}.{about['ifindex']}", int(about["mtu"])


def current_identity(link: Link) -> str | None:
    """The identity if the throttled device still exists. None if it is gone or was recreated."""
    try:
        identity, _ = identify(link.netns, link.dev)
    except (Failure, FileNotFoundError):
        return None
    return identity if identity == link.identity else None


def inspect(target: LinkTarget) -> Link:
    """Read the state of a link that is not throttled yet. Changes nothing.

    Raises Failure (1) if the device has a queue that somebody configured. The throttle could not restore such a queue;
    deleting its own token bucket brings back the kernel's default.
    """
    netns, dev = target.netns, target.dev
    identity, mtu = identify(netns, dev)
    original = _of_direction(netns, dev, target.redirect)
    configured = original if target.redirect else [q for q in original if q.get("root") and q["handle"] != "0:"]
    if configured:
        parent = "ingress" if target.redirect else "root"
        remove = " ".join(qdisc.tc(netns, "qdisc", "del", "dev", dev, parent))
        raise Failure(
            f"{_place(netns, dev)} has its own queue ({_names(original)}), which the throttle cannot restore; nothing "
            f"changed; hint: note how to set it up again, remove it with `sudo {remove}`, then throttle"
            + (", or limit only what the interface sends (--down none)" if target.redirect else "")
        )
    ifb = f"hvdifb{identity.partition('.')[2]}" if target.redirect else None
    return Link(target.host, netns, dev, target.direction, ifb=ifb, mtu=mtu, identity=identity, original=original)


def _of_direction(netns: str | None, dev: str, ingress: bool) -> list[Qdisc]:
    """The device's queues for one direction."""
    return [entry for entry in qdisc.read(netns, dev) if qdisc.is_ingress(entry) == ingress]


def plan(link: Link, shape: Shape | None) -> list[Command]:
    """The commands that give the link this shape, or restore it if `shape` is None. Empty if the device is gone."""
    if current_identity(link) is None:
        return []
    netns, dev = link.netns, link.dev
    current = qdisc.read(netns, dev)
    if link.ifb is None:
        if shape:
            return qdisc.shape_commands(netns, dev, shape.rate_bit_s, link.mtu)
        # If another program has replaced the token bucket, its queue is left alone.
        return [qdisc.tc(netns, "qdisc", "del", "dev", dev, "root")] if qdisc.is_ours(current) else []
    devices = json.loads(run(qdisc.ip(netns, "-json", "link", "show")))
    redirect = any(entry.get("ifname") == link.ifb for entry in devices)
    ingress = any(map(qdisc.is_ingress, current))
    complete = (
        redirect and ingress and link.ifb in run(qdisc.tc(netns, "filter", "show", "dev", dev, "parent", "ffff:"))
    )
    if shape and complete:
        return qdisc.ingress_commands(netns, dev, link.ifb, shape, link.mtu, exists=True)
    commands = qdisc.remove_ingress_commands(netns, dev, link.ifb, ingress=ingress, redirect=redirect)
    return commands + (qdisc.ingress_commands(netns, dev, link.ifb, shape, link.mtu, exists=False) if shape else [])


def difference(link: Link) -> str | None:
    """Describe how the device's queues differ from the original ones. None if they are equal or the device is gone."""
    if current_identity(link) is None:
        return None
    current = _of_direction(link.netns, link.dev, link.ifb is not None)
    if current == link.original:
        return None
    return (
        f"{_place(link.netns, link.dev)}: its queue was {_names(link.original)} before the throttle and is now "
        f"{_names(current)}: another program changed it; left unchanged"
    )


def _place(netns: str | None, dev: str) -> str:
    return f"{dev} in {netns}" if netns else dev


def _names(qdiscs: list[Qdisc]) -> str:
    return " ".join(f"{entry['kind']} {entry['handle']}" for entry in qdiscs) or "none"
