"""Finds the route to another host: a local interface and a remote address on the same network."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from hvdtrain.system import net


class Route(NamedTuple):
    device: str
    source: str
    """The local address on that device"""
    target: str
    """The remote address"""


def addresses() -> dict[str, str]:
    """The IPv4 address and network of each interface except loopback, as `{"eth0": "10.0.0.1/24"}`."""
    return {name: str(address) for name, address in net.addresses().items() if not address.is_loopback}


def preferred_networks(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The devices, or networks such as 10.0.0.0/24, named by Horovod's or Open MPI's own settings."""
    names = [environment.get("HOROVOD_GLOO_IFACE", ""), environment.get("OMPI_MCA_btl_tcp_if_include", "")]
    return [name for text in names for name in text.split(",") if name]


def route(local: dict[str, str], remote: dict[str, str], remote_name: str, preferred: list[str]) -> Route | None:
    """The route to another host; None if there is none. `local` and `remote`: see `addresses`.

    Over a common network: a `preferred` network or device first, then the one that the remote name resolves to, then
    any. Addresses that both hosts have, such as a container bridge's, are ignored. Without a common network, the
    kernel's route to the address of the remote name.
    """
    named = None
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(remote_name)
    routes = []
    for device, own in local.items():
        network = ipaddress.IPv4Interface(own).network
        for other in remote.values():
            source, target = own.partition("/")[0], other.partition("/")[0]
            if target != source and ipaddress.IPv4Address(target) in network:
                is_preferred = device in preferred or str(network) in preferred
                routes.append(((not is_preferred, target != named), Route(device, source, target)))
    if routes:
        return min(routes, key=lambda ranked: ranked[0])[1]
    known = [address.partition("/")[0] for address in remote.values()]
    if not known:
        return None
    target = named if named is not None and named in known else known[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing; the kernel chooses the route
        source = probe.getsockname()[0]
        for device, own in local.items():
            if own.partition("/")[0] == source:
                return Route(device, source, target)
    return None
