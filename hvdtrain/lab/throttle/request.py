"""What a throttle command asks for: which links, which rates, for how long."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle.qdisc import Shape
from hvdtrain.lab.throttle.watchdog import Store
from hvdtrain.system import exits
from hvdtrain.system.arguments import Parser, near
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import parse_rate

PURPOSE = """Limits the bandwidth of links, for real: the kernel's token bucket (tc-tbf), on every packet.

  tools/throttle.sh 10mbit                        every host of the virtual cluster that is up, both directions
  tools/throttle.sh --up 5mbit --down 20mbit      directions that differ; one that is not given is unlimited
  tools/throttle.sh 10mbit --dev eth1             an interface of this machine
  tools/throttle.sh 10mbit --dev eth1 --hostfile hostfiles/lab.txt     the same on other machines, through ssh
  tools/throttle.sh 10mbit --for 10m              and unlimited again after 10 minutes
  tools/throttle.sh show --json                   what is asked and what is set
  tools/throttle.sh verify                        measure it
  tools/throttle.sh clear                         put back what was there
  tools/throttle.sh keep                          let a throttle with an end (--for, --force) stay

mbit are 10^6 bit/s; mbps, which in tc means bytes, is refused. A rate is changed in place: nothing passes in between.
"""
ACTIONS = ("show", "verify", "clear", "keep")


@dataclasses.dataclass(frozen=True)
class Place(virtual.Link):
    """One direction of one host's link, and the file that tells the host what was asked."""

    file: Path

    @property
    def detour(self) -> bool:
        """Whether packets arrive at this device, instead of leaving through it. On a switch's port all leave."""
        return self.netns is None and self.direction == "down"


def parser() -> Parser:
    top = Parser(prog="tools/throttle.sh", description=PURPOSE, allow_abbrev=False)
    add = top.add_argument
    add("what", nargs="?", metavar="RATE|show|verify|clear|keep", help="a rate such as 10mbit, or a verb")
    add("--up", metavar="RATE", help="what a host sends; `none`: unlimited")
    add("--down", metavar="RATE", help="what a host receives; `none`: unlimited")
    add("--delay", metavar="TIME", help="of every packet a host sends, e.g. 5ms (needs the kernel's netem)")
    add("--loss", metavar="PERCENT", help="of the packets a host sends, e.g. 0.1%% (needs netem)")
    add("--for", dest="duration", metavar="TIME", help="put back what was there after e.g. 90s, 10m, 2h")
    add("--name", help="the virtual cluster (default: your only one that is up, but a sweep's)")
    add("--host", metavar="A,B", help="only these hosts of the virtual cluster")
    add("--dev", metavar="ETH", help="an interface of this machine, or of each of --hosts")
    add("--hosts", metavar="A,B", help="other machines, through ssh and sudo -n; needs --dev")
    add("--hostfile", metavar="FILE", type=Path, help="the same, from a file with a host per line")
    add("--force", action="store_true", help="even the interface that carries this session, for 10 minutes")
    add("--dry-run", action="store_true", help="print the exact commands and change nothing")
    add("--json", action="store_true", help="show, verify: one JSON document")
    add("--peer", metavar="HOST", help="verify --dev: another machine, beyond the link, to measure with")
    add("--tolerance", type=float, default=2.0, metavar="PERCENT", help="verify: default 2")
    add("--seconds", type=float, default=4.0, help="verify: of measuring, per direction (default 4)")
    return top


def _quantity(text: str, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z%]+)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in units:
        raise Failure(f"'{text}' cannot be read; write for example {example}", exits.USAGE)
    return float(match[1]) * units[match[2]]


def seconds(text: str) -> float:
    """`90s`, `10m`, `2h` in seconds. Raises Failure (2)."""
    found = _quantity(text, {"s": 1, "m": 60, "min": 60, "h": 3600}, "90s, 10m or 2h")
    if not 1 <= found <= 7 * 86400:
        raise Failure(f"--for {text}: give a time from 1s to a week", exits.USAGE)
    return found


def shapes(options: argparse.Namespace) -> dict[str, Shape | None]:
    """The shape that each direction is to have. Raises Failure (2)."""
    if options.what and options.what.isalpha() and options.what not in ACTIONS:
        told = f"{options.what!r} is neither a rate, as 10mbit, nor one of {', '.join(ACTIONS)}"
        raise Failure(told + near(options.what, ACTIONS), exits.USAGE)
    both = parse_rate(options.what) if options.what else None
    rates = {}
    for direction in ("up", "down"):
        text = getattr(options, direction)
        rates[direction] = both if text is None else None if text.lower() == "none" else parse_rate(text)
    delay = _quantity(options.delay, {"us": 0.001, "ms": 1, "s": 1000}, "--delay 5ms") if options.delay else None
    loss = _quantity(options.loss, {"%": 1}, "--loss 0.1%") if options.loss else None
    if delay is not None and not 0 < delay <= 60_000:
        raise Failure(f"--delay {options.delay}: give more than 0 and at most 60s", exits.USAGE)
    if loss is not None and not 0 < loss < 100:
        raise Failure(f"--loss {options.loss}: give more than 0% and less than 100%", exits.USAGE)
    if rates["up"] is None and (delay is not None or loss is not None):
        raise Failure("--delay and --loss belong to what a host sends: give its rate too, e.g. 1gbit", exits.USAGE)
    if rates["up"] is rates["down"] is None:
        raise Failure("no rate given; e.g. tools/throttle.sh 10mbit, or tools/throttle.sh clear", exits.USAGE)
    found: dict[str, Shape | None] = {name: Shape(rate_bit_s=rate) if rate else None for name, rate in rates.items()}
    if found["up"]:
        found["up"] = dataclasses.replace(found["up"], delay_ms=delay, loss_percent=loss)
    return found


def reachable() -> list[str]:
    """The virtual clusters that are up and whose links this process sees; none of them from inside a virtual host,
    where /run/netns has their names, with nothing mounted on them."""
    return [name for name, one in virtual.clusters().items() if os.path.ismount(f"/run/netns/{one.switch}")]


def places(options: argparse.Namespace) -> tuple[Store, list[Place]]:
    """The links that are meant, and where they are remembered. Raises Failure (2, 69)."""
    if options.dev:
        if options.name or options.host:
            raise Failure("--name and --host belong to a virtual cluster, --dev to this machine: give one", exits.USAGE)
        file = virtual.SELF / "throttle.json"
        here = os.uname().nodename
        return Store(virtual.SELF), [Place(here, None, options.dev, direction, file) for direction in ("up", "down")]
    if not reachable() and virtual.clusters():
        raise Failure(
            "a virtual host cannot reach its cluster's links; call this outside of it, or give --dev eth0 for this one",
            exits.UNREACHABLE,
        )
    if not virtual.clusters() and not options.name:
        hint = "make one (sudo hvdtrain cluster up --hosts a,b), or name an interface of this machine: --dev eth1"
        raise Failure(f"no virtual cluster is up; {hint}", exits.UNREACHABLE)
    cluster = virtual.load(options.name)
    chosen = options.host.split(",") if options.host else [host.name for host in cluster.hosts]
    for host in chosen:
        cluster.host(host)
    found = []
    folder = virtual.folder(cluster.name)
    for link in virtual.links(cluster):
        if link.host in chosen:
            file = folder / "hosts" / link.host / "throttle.json"
            found.append(Place(link.host, link.netns, link.dev, link.direction, file))
    return Store(folder), found


def check(options: argparse.Namespace, verb: str) -> None:
    """Empty options, and those that do not go together, are refused: one that is ignored would mislead."""
    for name in ("name", "host", "dev", "hosts", "peer"):
        if getattr(options, name) == "":
            raise Failure(f"--{name} is empty; leave it out or say which", exits.USAGE)
    if options.hosts and options.hostfile:
        raise Failure("give --hosts or --hostfile, not both", exits.USAGE)
    if (options.hosts or options.hostfile) and not options.dev:
        raise Failure("--hosts and --hostfile need the interface to throttle there: --dev eth1", exits.USAGE)
    if verb != "throttle":
        for name in ("up", "down", "delay", "loss", "duration"):
            if getattr(options, name) is not None:
                flag = "for" if name == "duration" else name
                raise Failure(f"--{flag} goes with a rate, not with {verb}", exits.USAGE)
    if not 1 <= options.seconds <= 600 or not 0 < options.tolerance <= 100:
        raise Failure("--seconds must be 1 to 600, --tolerance more than 0 and at most 100 (percent)", exits.USAGE)
    if options.peer and (verb != "verify" or not options.dev):
        raise Failure("--peer goes with `verify --dev`", exits.USAGE)
    if options.dry_run and verb in ("keep", "verify"):
        raise Failure(f"--dry-run goes with a rate or with clear, not with {verb}", exits.USAGE)
