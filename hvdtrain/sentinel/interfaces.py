"""Which way leads to another host: the interface of ours and the address of theirs that share a network."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # netdevice(7)


class Way(NamedTuple):
    device: str
    source: str
    """Our address on that device"""
    target: str
    """Theirs"""


def addresses() -> dict[str, str]:
    """The IPv4 address and network of each interface, `{"eth0": "10.0.0.1/24"}`; loopback is left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                request = struct.pack("256s", name.encode())
                parts = [
                    socket.inet_ntoa(fcntl.ioctl(any_socket, what, request)[20:24])
                    for what in (SIOCGIFADDR, SIOCGIFNETMASK)
                ]
                interface = ipaddress.IPv4Interface("/".join(parts))
                if not interface.is_loopback:
                    found[name] = str(interface)
    return found


def asked(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The devices, or networks such as 10.0.0.0/24, that Horovod's or Open MPI's own settings name."""
    names = [environment.get("HOROVOD_GLOO_IFACE", ""), environment.get("OMPI_MCA_btl_tcp_if_include", "")]
    return [name for text in names for name in text.split(",") if name]


def way(ours: dict[str, str], theirs: dict[str, str], their_name: str, preferred: list[str]) -> Way | None:
    """How to reach another host; None if there is no way to be seen.

    Over a common network: a `preferred` one (or that of a preferred device), else the one their name resolves to, else
    the first. Addresses that both have (a container bridge, the same on each machine) lead nowhere. Without a common
    network, as the kernel routes to the address of their name.
    """
    named = None
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(their_name)
    found = []
    for device, mine in ours.items():
        network = ipaddress.IPv4Interface(mine).network
        for other in theirs.values():
            source, target = mine.partition("/")[0], other.partition("/")[0]
            if target != source and ipaddress.IPv4Address(target) in network:
                wanted = device in preferred or str(network) in preferred
                found.append(((not wanted, target != named), Way(device, source, target)))
    if found:
        return min(found, key=lambda each: each[0])[1]
    known = [address.partition("/")[0] for address in theirs.values()]
    if not known:
        return None
    target = named if named is not None and named in known else known[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing; the kernel chooses the route
        source = probe.getsockname()[0]
        for device, mine in ours.items():
            if mine.partition("/")[0] == source:
                return Way(device, source, target)
    return None
