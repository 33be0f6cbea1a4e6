"""Network interfaces of the machine, or of the namespace, that this process runs in."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import socket
import struct
from pathlib import Path
from typing import Any

from hvdtrain.system import files
from hvdtrain.system.commands import run

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # netdevice(7)


def addresses() -> dict[str, ipaddress.IPv4Interface]:
    """The first IPv4 address of each interface that has one, with its network, without any program (netdevice(7))."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                request = struct.pack("256s", name.encode())
                answers = [fcntl.ioctl(control, what, request)[20:24] for what in (SIOCGIFADDR, SIOCGIFNETMASK)]
                found[name] = ipaddress.IPv4Interface("/".join(map(socket.inet_ntoa, answers)))
    return found


def route_device(address: str) -> str | None:
    """Interface through which packets to `address` (IPv4) leave: `lo` for this machine, None without a route."""
    try:
        routes = json.loads(run(["ip", "-json", "route", "get", address]))
    except Exception:
        return None
    return routes[0].get("dev") if routes else None


def is_own(address: str) -> bool:
    """Whether an IPv4 address belongs to this machine. Only such an address can be bound (bind(2))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def ipv4_addresses(host: str) -> list[str]:
    """IPv4 addresses of a host name, in the resolver's order. Raises OSError if the name is unknown."""
    entries = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def counters(device: str) -> tuple[int, int]:
    """(bytes sent, bytes received) by the interface since it came up, with all headers but Ethernet's preamble.

    Reads /proc/self/net/dev (proc(5)), which is also right inside a network namespace. Raises KeyError if the
    interface does not exist.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            columns = numbers.split()
            return int(columns[8]), int(columns[0])
    raise KeyError(device)


def speed_mbit(device: str) -> int | None:
    """Speed that the hardware negotiated, in Mbit/s. None for virtual interfaces: a veth always reports 10000."""
    entry = Path("/sys/class/net", device)
    try:
        speed = int((entry / "speed").read_text())
    except (OSError, ValueError):
        return None
    return speed if speed > 0 and (entry / "device").exists() else None


THROTTLE = Path("/run/hvdtrain/self/throttle.json")
"""What `tools/throttle.sh` has set on this host; `lab.throttle` writes it"""


def requested_throttle(path: Path = THROTTLE) -> dict[str, Any] | None:
    """The throttle requested for this host, readable by any user. None if it is not throttled.

    `lab.throttle.__main__.document` describes the fields.
    """
    try:
        document = files.from_json(files.read(path, files.SETTINGS_BYTES))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
