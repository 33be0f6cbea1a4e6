"""Network interfaces of the machine (or namespace) this process is in, by what the kernel says of them."""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path

from hvdtrain.system.commands import run


def network(device: str) -> ipaddress.IPv4Network | None:
    """The network of the interface's first IPv4 address; None without one. Raises Failure (69) without iproute2."""
    found = json.loads(run(["ip", "-json", "-4", "address", "show", "dev", device]) or "[]")
    first = next((address for entry in found for address in entry.get("addr_info", [])), None)
    return first and ipaddress.IPv4Network(f"{first['local']}/{first['prefixlen']}", strict=False)


def route_device(address: str) -> str | None:
    """The interface through which packets to `address` (IPv4) leave, None if there is no route. `lo` for our own."""
    try:
        routes = json.loads(run(["ip", "-json", "route", "get", address]))
    except Exception:
        return None
    return routes[0].get("dev") if routes else None


def is_own(address: str) -> bool:
    """Whether it is an address (IPv4) of this machine: only such a one can be bound (bind(2))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        try:
            door.bind((address, 0))
        except OSError:
            return False
    return True


def counters(device: str) -> tuple[int, int]:
    """(bytes sent, bytes received) by the interface since it came up, all headers but Ethernet's preamble included.

    From /proc/self/net/dev (proc(5)), which is right inside a network namespace too. Raises KeyError if there is none.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        if name.strip() == device:
            columns = figures.split()
            return int(columns[8]), int(columns[0])
    raise KeyError(device)


def speed_mbit(device: str) -> int | None:
    """The speed the hardware negotiated in Mbit/s; None where there is none to know (virtual interfaces)."""
    try:
        speed = int(Path(f"/sys/class/net/{device}/speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None
