"""One direction of a device: what was there before this tool touched it, what it is to be, and how to get there."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link(virtual.Link):
    """One direction of a device, with what was there before this tool touched it."""

    ifb: str | None
    """The detour through which `dev` receives; None: the root queue of `dev` is shaped"""
    mtu: int
    identity: str
    """Of the network namespace and the device: a device that was made anew is not ours to restore"""
    found: list[Qdisc]
    words: list[str] | None
    """What makes the root queue again (qdisc.rebuild_words)"""
    shape: Shape | None = None
    token: str = ""
    """Of the change that set the shape"""
    until_utc: str | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Link:
        shape = Shape(**document["shape"]) if document["shape"] else None
        return cls(**{**document, "shape": shape})


def identify(netns: str | None, dev: str) -> tuple[str, int]:
    """The identity of this device, which no other of its name has, and its MTU. Raises Failure (2) if there is none."""
    about = qdisc.device(netns, dev)
    space = Path(f"/run/netns/{netns}" if netns else "/proc/self/ns/net").stat()
    return f"{space.st_ino}.{about['ifindex']}", int(about["mtu"])


def current_identity(link: Link) -> str | None:
    """The link's identity if its device is still the one that was throttled, None if it is gone or another."""
    try:
        identity, _ = identify(link.netns, link.dev)
    except (Failure, FileNotFoundError):
        return None
    return identity if identity == link.identity else None


def first_look(host: str, netns: str | None, dev: str, direction: str, *, detour: bool) -> Link:
    """A link not touched so far. Raises Failure if it could not be put back afterwards; changes nothing."""
    identity, mtu = identify(netns, dev)
    found = _part(netns, dev, detour)
    ifb = f"hvdifb{identity.partition('.')[2]}" if detour else None
    if detour and found:
        raise Failure(
            f"{dev} has an ingress queue of its own, whose filters could not be put back; limit only what it sends "
            "(--down none), or remove it first if it may go"
        )
    words = None if detour else qdisc.rebuild_words(netns, dev, found)
    return Link(host, netns, dev, direction, ifb=ifb, mtu=mtu, identity=identity, found=found, words=words)


def _part(netns: str | None, dev: str, detour: bool) -> list[Qdisc]:
    """The device's queues of one direction."""
    return [entry for entry in qdisc.read(netns, dev) if qdisc.is_ingress(entry) == detour]


def plan(link: Link, shape: Shape | None) -> list[Command]:
    """The commands that give the link this shape; None: the one it was found with. Empty for a device that is gone."""
    if current_identity(link) is None:
        return []
    netns, dev = link.netns, link.dev
    current = qdisc.read(netns, dev)
    if link.ifb is None:
        if shape:
            shaping = qdisc.shape_commands(netns, dev, shape.rate_bit_s, link.mtu)
            return shaping + qdisc.netem_commands(netns, dev, shape, link.mtu, current)
        words = ["del", "dev", dev, "root"] if link.words is None else ["replace", "dev", dev, "root", *link.words]
        # What is not ours any more was put there by somebody else, and is left alone.
        return [qdisc.tc(netns, "qdisc", *words)] if qdisc.is_ours(current) else []
    there = json.loads(run(qdisc.ip(netns, "-json", "link", "show")))
    detour = any(entry.get("ifname") == link.ifb for entry in there)
    ingress = any(map(qdisc.is_ingress, current))
    whole = detour and ingress and link.ifb in run(qdisc.tc(netns, "filter", "show", "dev", dev, "parent", "ffff:"))
    if shape and whole:
        return qdisc.ingress_commands(netns, dev, link.ifb, shape, link.mtu, exists=True)
    commands = qdisc.remove_ingress_commands(netns, dev, link.ifb, ingress=ingress, detour=detour)
    return commands + (qdisc.ingress_commands(netns, dev, link.ifb, shape, link.mtu, exists=False) if shape else [])


def difference(link: Link) -> str | None:
    """A line for a user if the device is not as it was found; None if it is, or is gone."""
    place = f"{link.dev} in {link.netns}" if link.netns else link.dev
    if current_identity(link) is None:
        return None
    current = _part(link.netns, link.dev, link.ifb is not None)
    if current == link.found:
        return None
    named = [
        " ".join(f"{entry['kind']} {entry['handle']}" for entry in part) or "none" for part in (current, link.found)
    ]
    now, before = named
    return (
        f"{place}: its queue was {before} before the throttle and is {now} now: changed by somebody else, and left so"
    )
