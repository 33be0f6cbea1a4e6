"""Parse a throttle command: which links, which rates, for how long."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle.links import LinkTarget
from hvdtrain.lab.throttle.qdisc import Shape
from hvdtrain.lab.throttle.watchdog import Store
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate

PURPOSE = """Limit the bandwidth of links in the kernel, with a token bucket (tc-tbf) that shapes every packet.

  tools/throttle.sh 10mbit                        every host of the running virtual cluster, both directions
  tools/throttle.sh --up 5mbit --down 20mbit      different directions; a missing one is unlimited
  tools/throttle.sh 10mbit --dev eth1             an interface of this machine
  tools/throttle.sh 10mbit --dev eth1 --hostfile hostfiles/lab.txt     the same on other machines, over ssh
  tools/throttle.sh 10mbit --for 10m              unlimited again after 10 minutes
  tools/throttle.sh verify                        measure the links
  tools/throttle.sh clear                         restore the original queues

1 mbit is 10^6 bit/s. mbps, which means bytes in tc, is rejected. A new rate replaces the old one without a gap.
"""
ACTIONS = ("verify", "clear")


def parser() -> Parser:
    top = Parser(prog="tools/throttle.sh", description=PURPOSE)
    add = top.add_argument
    add("what", nargs="?", metavar="RATE|verify|clear", help="a rate such as 10mbit, or an action")
    add("--up", metavar="RATE", help="rate at which a host sends; `none`: unlimited")
    add("--down", metavar="RATE", help="rate at which a host receives; `none`: unlimited")
    add("--for", dest="duration", metavar="TIME", help="restore the original queues after, e.g., 90s, 10m or 2h")
    add("--name", help="the virtual cluster (default: your only running one, except clusters of a sweep)")
    add("--host", metavar="A,B", help="only these hosts of the virtual cluster")
    add("--dev", metavar="ETH", help="an interface of this machine, or of each machine of --hosts")
    add("--hosts", metavar="A,B", help="other machines, over ssh and sudo -n; needs --dev")
    add("--hostfile", metavar="FILE", type=Path, help="like --hosts, from a file with one host per line")
    add("--force", action="store_true", help="throttle even the interface of this session, for 10 minutes")
    add("--dry-run", action="store_true", help="print the exact commands and change nothing")
    add("--json", action="store_true", help="for verify: print one JSON document")
    add("--peer", metavar="HOST", help="for verify --dev: another machine, beyond the link, to measure with")
    add("--tolerance", type=float, default=2.0, metavar="PERCENT", help="for verify (default: 2)")
    add("--seconds", type=float, default=4.0, help="for verify: measuring time per direction (default: 4)")
    return top


def seconds(text: str) -> float:
    """Parse `90s`, `10m` or `2h` to seconds. Raises Failure (2)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)", text.strip().lower(), re.ASCII)
    if match is None:
        raise Failure(f"'{text}' is not a number with a unit; hint: write for example 90s, 10m or 2h", exits.USAGE)
    duration_s = float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]
    if not 1 <= duration_s <= 7 * 86400:
        raise Failure(f"--for {text} is out of range; hint: give a time from 1s to a week", exits.USAGE)
    return duration_s


def shapes(options: argparse.Namespace) -> dict[str, Shape | None]:
    """The shape for each direction, "up" and "down". None: unlimited. Raises Failure (2)."""
    if options.what and options.what.isalpha() and options.what not in ACTIONS:
        message = f"{options.what!r} is neither a rate, as 10mbit, nor one of {', '.join(ACTIONS)}"
        raise Failure(message + near(options.what, ACTIONS), exits.USAGE)
    both = parse_rate(options.what) if options.what else None
    rates = {}
    for direction in ("up", "down"):
        text = getattr(options, direction)
        rates[direction] = both if text is None else None if text.lower() == "none" else parse_rate(text)
    if rates["up"] is rates["down"] is None:
        raise Failure("no rate given; hint: tools/throttle.sh 10mbit, or tools/throttle.sh clear", exits.USAGE)
    return {name: Shape(rate_bit_s=rate) if rate else None for name, rate in rates.items()}


def reachable() -> list[str]:
    """Names of the running virtual clusters whose links this process can change.

    None inside a virtual host: /run/netns has the names there, but nothing is mounted on them.
    """
    return [name for name, one in virtual.clusters().items() if os.path.ismount(f"/run/netns/{one.switch}")]


def targets(options: argparse.Namespace) -> tuple[Store, list[LinkTarget]]:
    """The store and the links that the command refers to. Raises Failure (69)."""
    if options.dev:
        file = virtual.SELF / "throttle.json"
        host = os.uname().nodename
        links = [LinkTarget(host, None, options.dev, direction, file) for direction in ("up", "down")]
        return Store(virtual.SELF), links
    if not reachable() and virtual.clusters():
        hint = "run this command outside of the host, or give --dev eth0 for its own interface"
        raise Failure(f"a virtual host cannot reach its cluster's links; hint: {hint}", exits.UNREACHABLE)
    if not virtual.clusters() and not options.name:
        hint = "make one (sudo hvdtrain cluster up --hosts a,b), or name an interface of this machine (--dev eth1)"
        raise Failure(f"no virtual cluster is up; hint: {hint}", exits.UNREACHABLE)
    cluster = virtual.load(options.name)
    hosts = options.host.split(",") if options.host else [host.name for host in cluster.hosts]
    for host in hosts:
        cluster.host(host)
    folder = virtual.folder(cluster.name)
    links = [
        LinkTarget(link.host, link.netns, link.dev, link.direction, folder / "hosts" / link.host / "throttle.json")
        for link in virtual.links(cluster)
        if link.host in hosts
    ]
    return Store(folder), links


def check(options: argparse.Namespace, action: str) -> None:
    """Reject empty options and options that the action would ignore. Raises Failure (2)."""
    for name in ("name", "host", "dev", "hosts", "peer"):
        if getattr(options, name) == "":
            raise Failure(f"--{name} is empty; hint: give a value or omit the option", exits.USAGE)
    if options.dev and (options.name or options.host):
        message = "--name and --host select a virtual cluster, --dev an interface of this machine"
        raise Failure(f"{message}; hint: give one of them", exits.USAGE)
    if options.hosts and options.hostfile:
        raise Failure("--hosts and --hostfile cannot be combined; hint: give one of them", exits.USAGE)
    if (options.hosts or options.hostfile) and not options.dev:
        message = "--hosts and --hostfile need the interface to throttle there"
        raise Failure(f"{message}; hint: add --dev eth1", exits.USAGE)
    if action != "throttle":
        for name in ("up", "down", "duration"):
            if getattr(options, name) is not None:
                flag = "for" if name == "duration" else name
                raise Failure(f"--{flag} needs a rate and cannot be combined with {action}", exits.USAGE)
    if not 1 <= options.seconds <= 600 or not 0 < options.tolerance <= 100:
        message = "--seconds must be 1 to 600, and --tolerance must be more than 0 and at most 100 (percent)"
        raise Failure(message, exits.USAGE)
    if options.peer and (action != "verify" or not options.dev):
        raise Failure("--peer can only be used with `verify --dev`", exits.USAGE)
    if options.dry_run and action == "verify":
        raise Failure("--dry-run can only be used with a rate or with clear, not with verify", exits.USAGE)
