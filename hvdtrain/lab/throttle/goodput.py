"""`verify`: compare the requested rates of links with measurements."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle import qdisc
from hvdtrain.lab.throttle.links import Link
from hvdtrain.lab.throttle.watchdog import Store
from hvdtrain.lab.topology import Cluster
from hvdtrain.system import exits, net
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
        routes = _to_peer(options)
    else:
        routes = _in_a_ring(virtual.load(options.name), options.host.split(",") if options.host else None)
    with _high_priority():
        results = [_verify_route(route, options, short=not options.dev) for route in routes]
    if not options.json:
        for result in results:
            _print(result)
    good = all(result["ok"] for result in results)
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


def _in_a_ring(cluster: Cluster, hosts: list[str] | None) -> list[Route]:
    """Routes from each host to the next, so that every host sends once and receives once."""
    for name in hosts or []:
        cluster.host(name)
    names = [host.name for host in cluster.hosts]
    if len(names) < 2:
        raise Failure("a cluster of one host has no link to measure between hosts", exits.USAGE)
    known = list(Store(virtual.folder(cluster.name)).links().values())
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


def _to_peer(options: argparse.Namespace) -> list[Route]:
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
    return routes


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
