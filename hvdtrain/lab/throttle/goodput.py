"""Compare the requested rates of links with the kernel's settings (`show`) and with measurements (`verify`)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle import qdisc
from hvdtrain.lab.throttle.links import Link
from hvdtrain.lab.throttle.request import reachable
from hvdtrain.lab.throttle.watchdog import Store
from hvdtrain.lab.topology import Cluster
from hvdtrain.system import exits, files, net
from hvdtrain.system.agent import LOCAL, Agent, Unreachable, ssh_command
from hvdtrain.system.commands import Command, as_caller
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import check_name
from hvdtrain.system.rates import FRAME_BYTES, PAYLOAD_BYTES, goodput_one_way, show_rate

MESSAGES_BYTES = (64_000, 256_000)


@dataclasses.dataclass(frozen=True)
class Route:
    """A path from a sender to a receiver, with the throttled links on it."""

    name: str
    sender: Command
    """Command that runs Python on the sender."""
    receiver: Command
    """Command that runs Python on the receiver."""
    address: str
    """The receiver's address."""
    links: list[Link]
    backwards: bool = False
    """Whether data flows from the receiver to the sender, as for the receiving direction of this machine."""

    @property
    def rate_bit_s(self) -> int:
        return min(link.shape.rate_bit_s for link in self.links if link.shape)

    @property
    def burst_bytes(self) -> int:
        """Bytes that the route's slowest token bucket passes at once."""
        return min(
            qdisc.burst_bytes(link.shape.rate_bit_s, link.mtu)
            for link in self.links
            if link.shape and link.shape.rate_bit_s == self.rate_bit_s
        )


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(route: Route, seconds: float, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure a route, as `link_probe.ask` does. Raises Failure (69) if its other end does not answer."""
    # On slow links TCP needs time to find the rate, and the measurement needs a few hundred frames.
    settle_s, count_s = max(1, 2e6 / route.rate_bit_s), max(seconds, 4e6 / route.rate_bit_s)
    patience_s = settle_s + count_s + 10 * sum(sizes) / route.rate_bit_s + 60
    arguments = {"address": route.address, "settle_s": settle_s, "count_s": count_s, "sizes": list(sizes)}
    with Agent(route.name, route.receiver) as receiver, Agent(route.name, route.sender) as sender:
        try:
            receiver.hello()
            sender.hello()
            port = receiver.ask("serve_stream", address=route.address)
            return sender.ask("measure_stream", within_s=patience_s, port=port, back=route.backwards, **arguments)
        except Unreachable as problem:
            raise Failure(f"{route.name}: {problem.reason}", exits.UNREACHABLE) from None


def least_s(size_bytes: int, rate_bit_s: int, burst_bytes: int) -> float:
    """Shortest time in which a message can cross a link after a pause: all bytes after the burst wait for the rate."""
    frame_bytes = size_bytes + math.ceil(size_bytes / PAYLOAD_BYTES) * (FRAME_BYTES - PAYLOAD_BYTES)
    return max(0.0, (frame_bytes - burst_bytes) * 8 / rate_bit_s)


# --- verify ----------------------------------------------------------------------------------------------------------


def verify(options: argparse.Namespace) -> int:
    """Measure every throttled link. Returns 1 if a rate is off by more than the tolerance, or a message is too fast."""
    if options.dev:
        store, routes, peer = Store(virtual.SELF), *_to_peer(options)
    else:
        cluster = virtual.load(options.name)
        peer, store = None, Store(virtual.folder(cluster.name))
        routes = _in_a_ring(store, cluster, options.host.split(",") if options.host else None)
    with _high_priority():
        results = [_verify_route(route, options, short=peer is None) for route in routes]
    if not options.json:
        for result in results:
            _print(result)
    good = all(result["ok"] for result in results)
    _record(store, routes, results)
    if options.json:
        print(json.dumps({"schema": "hvdtrain/throttle-verify/1", "ok": good, "links": results}, indent=2))
    if not good:
        print(
            f"throttle: off by more than {options.tolerance:g} %; hint: the machine may be busy: try again with "
            "--seconds 10; if the link stays slow, the processor is the limit",
            file=sys.stderr,
        )
    return exits.OK if good else exits.FAILED


@contextlib.contextmanager
def _high_priority() -> Iterator[None]:
    """Programs started inside the block get the processor at once, so that other work does not slow the test."""
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):  # a control group may have no real-time share
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameter)


def _in_a_ring(store: Store, cluster: Cluster, hosts: list[str] | None) -> list[Route]:
    """Routes from each host to the next, so that every host sends once and receives once."""
    for name in hosts or []:
        cluster.host(name)
    names = [host.name for host in cluster.hosts]
    if len(names) < 2:
        raise Failure("a cluster of one host has no link to measure between hosts", exits.USAGE)
    known = list(store.links().values())
    routes = []
    for index, one in enumerate(names):
        other = names[(index + 1) % len(names)]
        passed = [link for link in known if (link.host, link.direction) in {(one, "up"), (other, "down")}]
        if passed and (hosts is None or one in hosts or other in hosts):
            # Outside of the hosts' CPU shares: the link is measured, not the processor.
            ends = [[*virtual.inside(cluster, host, share=False), *LOCAL] for host in (one, other)]
            routes.append(Route(f"{one} -> {other}", ends[0], ends[1], cluster.address(other), passed))
    if not routes:
        message = "nothing to verify, because no link is throttled"
        raise Failure(f"{message}; hint: run tools/throttle.sh 10mbit first", exits.USAGE)
    return routes


def _to_peer(options: argparse.Namespace) -> tuple[list[Route], str]:
    if not options.peer:
        hint = "name a machine beyond it that you can log in to with ssh: --peer HOST"
        raise Failure(f"{options.dev} cannot be verified without a peer; hint: {hint}", exits.USAGE)
    known = [link for link in Store(virtual.SELF).links().values() if link.dev == options.dev]
    if not known:
        hint = f"run throttle.sh 10mbit --dev {options.dev} first"
        raise Failure(f"{options.dev} is not throttled; hint: {hint}", exits.USAGE)
    try:
        address = net.ipv4_addresses(check_name(options.peer, "--peer: "))[0]
    except OSError as error:
        raise Failure(f"unknown host {options.peer} ({error.strerror})", exits.UNREACHABLE) from error
    device = net.route_device(address)
    if device != options.dev:
        message = f"{options.peer} is reached through {device}, not through {options.dev}"
        raise Failure(f"{message}; hint: name a machine beyond {options.dev}")
    # ssh runs as the calling user, with that user's keys, and without the real-time priority of this process.
    there = ["chrt", "--other", "0", *as_caller()]
    there += ssh_command(options.peer, sys.executable)
    routes = []
    for link in known:
        arrow = f"here -> {options.peer}" if link.direction == "up" else f"{options.peer} -> here"
        routes.append(Route(arrow, LOCAL, there, address, [link], backwards=link.direction == "down"))
    return routes, options.peer


def _verify_route(route: Route, options: argparse.Namespace, *, short: bool) -> dict[str, Any]:
    sizes = MESSAGES_BYTES if short else ()
    result = measure(route, options.seconds, sizes)
    expected = goodput_one_way(route.rate_bit_s, result["payload_bytes"])
    measured = result["bit_s"]
    off = (measured / expected - 1) * 100
    messages = []
    for size, took in zip(sizes, result["messages_s"], strict=True):
        least = least_s(size, route.rate_bit_s, route.burst_bytes)
        messages.append({"bytes": size, "took_s": took, "least_s": least, "ok": took >= 0.98 * least})
    return {
        "link": route.name,
        "asked_mbit": route.rate_bit_s / 1e6,
        "expected_mbit": expected / 1e6,
        "goodput_mbit": measured / 1e6,
        "off_percent": off,
        "messages": messages,
        "ok": abs(off) <= options.tolerance and all(message["ok"] for message in messages),
    }


def _print(result: dict[str, Any]) -> None:
    rate = show_rate(round(result["asked_mbit"] * 1e6))
    short = "".join(
        f"; {message['bytes'] // 1000} kB in {message['took_s'] * 1e3:.1f} ms (at least {message['least_s'] * 1e3:.1f})"
        for message in result["messages"]
    )
    long = f"measured {result['goodput_mbit']:.4g} ({result['off_percent']:+.2f} %)"
    expected = f"asked {rate}, expected goodput {result['expected_mbit']:.4g} Mbit/s"
    print(f"{'ok  ' if result['ok'] else 'FAIL'}  {result['link']}: {expected}, {long}{short}")


def _record(store: Store, routes: list[Route], results: list[dict[str, Any]]) -> None:
    """Write the measured rate to the sender's throttle.json."""
    with store.locked():
        for route, result in zip(routes, results, strict=True):
            file = store.folder / "throttle.json"
            if route.links[0].netns:
                file = store.folder / "hosts" / route.name.partition(" ")[0] / "throttle.json"
            elif route.backwards and len(routes) > 1:
                continue
            if not file.exists():
                continue
            rates = {name: round(result[name], 4) for name in ("goodput_mbit", "expected_mbit")}
            about = json.loads(file.read_text())
            about["verified"] = {"utc": datetime.now(UTC).isoformat(timespec="seconds"), **rates}
            files.replace_text(file, json.dumps(about) + "\n")


# --- show ------------------------------------------------------------------------------------------------------------


def show_all(options: argparse.Namespace) -> int:
    """Print the requested rates and, for root, the kernel's settings."""
    rows = []
    for name, cluster in virtual.clusters().items() if not options.dev else ():
        if options.name in {None, name}:
            for host in cluster.hosts:
                if not options.host or host.name in options.host.split(","):
                    rows.append(_row(Store(virtual.folder(name)), name, host.name))
    if not options.name and not options.host and (options.dev or Store(virtual.SELF).path.exists()):
        rows.append(_row(Store(virtual.SELF), None, os.uname().nodename, options.dev))
    if not rows and (options.name or options.host):
        cluster = virtual.load(options.name)  # raises if it is not up
        for name in options.host.split(",") if options.host else []:
            cluster.host(name)  # raises if it has no host of this name
    if options.json:
        print(json.dumps({"schema": "hvdtrain/throttle-show/1", "hosts": rows}, indent=2))
        return exits.OK
    for row in rows:
        print(_line(row))
    if not rows:
        print("nothing is throttled and no virtual cluster is up")
    return exits.OK


def _row(store: Store, cluster: str | None, host: str, dev: str | None = None) -> dict[str, Any]:
    file = store.folder / "hosts" / host / "throttle.json" if cluster else store.folder / "throttle.json"
    about = json.loads(file.read_text()) if file.exists() else None
    if about and dev and about["dev"] != dev:
        about = None
    known = [link for link in store.links().values() if (link.host == host if cluster else about)]
    if cluster:
        links = virtual.links(virtual.clusters()[cluster])
        queues = [(one.direction, one.netns, one.dev) for one in links if one.host == host]
    else:
        queues = [(link.direction, link.netns, link.ifb or link.dev) for link in known]
    actual: dict[str, float | None] = {"up_mbit": None, "down_mbit": None}
    readable = os.geteuid() == 0 and (cluster is None or cluster in reachable())
    for direction, netns, device in queues if readable else []:
        with contextlib.suppress(Failure):
            rate = qdisc.rate_of(qdisc.read(netns, device))
            actual[f"{direction}_mbit"] = rate / 1e6 if rate else None
    return {
        "cluster": cluster,
        "host": host,
        "asked": about,
        "set": actual if readable else None,
        "until_utc": next((link.until_utc for link in known if link.until_utc), None),
        "interrupted": store.load()["change"] is not None,
    }


def _line(row: dict[str, Any]) -> str:
    def rate(value: float | None) -> str:
        return "unlimited" if value is None else show_rate(round(value * 1e6))

    where = f"{row['cluster']}/{row['host']}" if row["cluster"] else row["host"]
    about = row["asked"]
    if about is None:
        text = f"{where}: not throttled"
    else:
        text = f"{where} {about['dev']}: asked up {rate(about['up_mbit'])}, down {rate(about['down_mbit'])}"
    if row["set"] is None:
        text += "; set: unknown (needs root, outside of the hosts)"
    elif about or any(row["set"].values()):
        text += f"; set up {rate(row['set']['up_mbit'])}, down {rate(row['set']['down_mbit'])}"
    if about and about["verified"]:
        text += f"; measured {about['verified']['goodput_mbit']:.4g} of {about['verified']['expected_mbit']:.4g} Mbit/s"
    if row["until_utc"]:
        overdue = datetime.now(UTC) > datetime.fromisoformat(row["until_utc"]) + timedelta(seconds=2)
        text += f"; until {row['until_utc']}" + (
            ", but its watchdog is gone; hint: run throttle.sh clear" if overdue else ""
        )
    return text + ("; a change was interrupted; hint: run throttle.sh clear" if row["interrupted"] else "")
