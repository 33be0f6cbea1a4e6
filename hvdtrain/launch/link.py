"""Find the hosts of a job, the interface that connects them, and the rate of their link."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence

from hvdtrain.launch import tuning
from hvdtrain.system import exits, hosts, net, ssh
from hvdtrain.system.commands import find, run
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import Slots
from hvdtrain.system.rates import parse_rate, show_rate


def find_hosts(options: argparse.Namespace, environment: Mapping[str, str]) -> tuple[list[Slots], str]:
    """(hosts, their source)."""
    if options.np is not None and options.np < 1:
        raise Failure(f"-np is {options.np}; hint: give 1 or more", exits.USAGE)
    if options.hosts is not None and options.hostfile:
        raise Failure("-H and --hostfile cannot be combined; hint: give one of them", exits.USAGE)
    if options.hosts is not None:
        return hosts.parse_hosts(options.hosts), "-H"
    if options.hostfile:
        return hosts.read_hostfile(options.hostfile), str(options.hostfile)
    from_slurm = hosts.from_slurm(environment)
    if from_slurm:
        return from_slurm, f"Slurm job {environment.get('SLURM_JOB_ID', '?')}"
    if options.np is not None:
        return [Slots("localhost", options.np)], "-np: this machine"
    hint = "give -H a:2,b:2 or -H localhost:2, or --hostfile FILE, or start it in a Slurm allocation"
    raise Failure(f"no hosts given; hint: {hint}", exits.USAGE)


def assign(slots: Sequence[Slots], ranks: int) -> list[Slots]:
    """Fill the hosts' slots with ranks, in order. Hosts without ranks are omitted."""
    result, left = [], ranks
    for slot in slots:
        if left > 0:
            result.append(Slots(slot.host, min(slot.slots, left)))
            left -= slot.slots
    return result


def address_of(host: str) -> str:
    """The IPv4 address of a host, which may be a name that only ssh knows. Raises Failure (69)."""
    try:
        return net.ipv4_addresses(host)[0]
    except OSError as error:
        with contextlib.suppress(OSError):
            if known := ssh.endpoint(host):
                return net.ipv4_addresses(known[0])[0]
        message, hint = f"host {host} has no IPv4 address ({error.strerror or error})", "check the spelling, or add it"
        with contextlib.suppress(OSError):
            socket.getaddrinfo(host, None, socket.AF_INET6)
            message, hint = f"host {host} has only IPv6 addresses, and ranks connect over IPv4", "add an IPv4 address"
        raise Failure(f"{message}; hint: {hint} to /etc/hosts", exits.UNREACHABLE) from error


def choose_interface(names: Sequence[str], nic: str | None) -> tuple[str | None, str]:
    """(interface to the other hosts, reason for it). None if all ranks are on this host.

    Raises Failure: 69 for a host without address or route, 78 for an unknown interface.
    """
    others = [name for name in names if not net.is_own(address_of(name))]
    if not others and not nic:
        return None, "all ranks are on this host"
    find("ip")  # raises if it is missing
    if nic:
        known = [name for _, name in socket.if_nameindex()]
        if nic not in known:
            raise Failure(f"no network interface {nic} here; hint: choose one of {', '.join(known)}", exits.BAD_CONFIG)
        return nic, "--nic"
    devices: dict[str, str] = {}
    for name in others:
        device = net.route_device(address_of(name))
        if device is None:
            raise Failure(f"no route from this machine to host {name} ({address_of(name)})", exits.UNREACHABLE)
        devices.setdefault(device, name)
    first, host = next(iter(devices.items()))
    more = [f"{device} to {name}" for device, name in devices.items() if device != first]
    return first, f"route to {host}" + (f"; also {', '.join(more)}: choose with --nic" if more else "")


def network_of(device: str, names: Sequence[str]) -> str:
    """Open MPI's name for the interface: its network if it contains all hosts, else the device.

    The network is better, because the interface may have another name on other hosts.
    """
    own = net.addresses().get(device)
    # On Debian this host's own name resolves to 127.0.1.1.
    others = [address for address in map(address_of, names) if not net.is_own(address)]
    inside = own is not None and all(ipaddress.ip_address(address) in own.network for address in others)
    return str(own.network) if own and inside else device


def find_rate(rate: str | None, device: str) -> tuple[int | None, str]:
    """(rate of the link's slower direction in bit/s, its source). None if the rate is unknown."""
    if rate:
        return parse_rate(rate), "--rate"
    shape = net.requested_throttle()
    if shape and shape.get("dev") in (device, None):
        rates = [shape[key] for key in ("up_mbit", "down_mbit") if shape.get(key)]
        if rates:
            return round(min(rates) * 1e6), "the throttle"
    with contextlib.suppress(Failure, ValueError):
        for queue in json.loads(run(["tc", "-json", "qdisc", "show", "dev", device]) or "[]"):
            bytes_per_s = queue.get("options", {}).get("rate")
            if queue.get("kind") == "tbf" and isinstance(bytes_per_s, int):
                return bytes_per_s * 8, f"tc on {device}"
    if speed := net.speed_mbit(device):
        return speed * 1_000_000, f"{device}'s hardware"
    return None, f"assuming {show_rate(tuning.ASSUMED_BIT_S)} (override with --rate)"
