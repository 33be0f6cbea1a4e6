"""The command line of the throttle: `tools/throttle.sh 10mbit`, `hvdtrain throttle ...`.

Which links: those of the virtual cluster that is up; or, with --dev, one interface of this machine; or, with --hosts or
--hostfile too, that interface on other machines, where the same checkout's throttle is called through ssh.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hvdtrain.lab import virtual
from hvdtrain.lab.throttle import goodput, links, qdisc, remote, watchdog
from hvdtrain.lab.throttle.links import Link
from hvdtrain.lab.throttle.qdisc import Shape, shape_commands
from hvdtrain.lab.throttle.request import ACTIONS, Place, check, parser, places, reachable, seconds, shapes
from hvdtrain.lab.throttle.watchdog import Store, Wish
from hvdtrain.system import exits, net, proc
from hvdtrain.system.commands import become_root, calling_user, find, run, run_all
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import show_rate

SCHEMA = "hvdtrain/throttle/1"
FORCED_S = 600.0
"""A forced throttle ends by itself after this time, unless `--for` says when or `keep` that it stays"""


def document(dev: str, up: Shape | None, down: Shape | None, mtu: int = 1500) -> dict[str, Any]:
    """A host's throttle.json: rates in Mbit/s (null: unlimited), sizes in bytes of the slower direction's bucket."""
    shapes = [shape for shape in (up, down) if shape]
    slowest = min(shape.rate_bit_s for shape in shapes) if shapes else None
    netem = up or down
    return {
        "schema": SCHEMA,
        "dev": dev,
        "up_mbit": up.rate_bit_s / 1e6 if up else None,
        "down_mbit": down.rate_bit_s / 1e6 if down else None,
        "delay_ms": netem.delay_ms if netem else None,
        "loss_percent": netem.loss_percent if netem else None,
        "burst_bytes": qdisc.burst_bytes(slowest, mtu) if slowest else None,
        "limit_bytes": qdisc.limit_bytes(slowest, mtu) if slowest else None,
        "set_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "verified": None,
    }


# --- safety ----------------------------------------------------------------------------------------------------------


def session_address() -> str | None:
    """The address at the other end of the ssh session this runs in; sudo hides it, so the callers are asked too."""
    pid = os.getpid()
    variables: Mapping[str, str] = os.environ
    while not (connection := variables.get("SSH_CONNECTION", "").split()):
        if (pid := proc.stat(pid).parent) <= 1:
            return None
        variables = dict(item.split("=", 1) for item in proc.strings(pid, "environ") if "=" in item)
    return connection[0]


def danger(dev: str) -> str | None:
    """Why an interface of this machine had better not be throttled; None if nothing speaks against it."""
    address, _, zone = (session_address() or "").partition("%")
    if address and dev in _below(zone or net.route_device(address)):
        return "carries the ssh session you are in"
    for family in ("-4", "-6"):
        routes = json.loads(run(["ip", family, "-json", "route", "show", "default"]) or "[]")
        ways = [way for route in routes for way in (route, *route.get("nexthops", ()))]
        if any(dev in _below(way.get("dev")) for way in ways):
            return "carries the default route"
    return None


def _below(dev: str | None) -> set[str]:
    """The interface and those that carry it: ports of a bridge or a bond, what a VLAN is on."""
    if dev is None:
        return set()
    lower = Path("/sys/class/net", dev).glob("lower_*")
    return {dev}.union(*(_below(link.name.removeprefix("lower_")) for link in lower))


def _guard(options: argparse.Namespace) -> float | None:
    """Seconds after which the throttle is to end, None: stays. Raises Failure (1) for an interface one may need."""
    wanted = seconds(options.duration) if options.duration else None
    if not options.dev or (reason := danger(options.dev)) is None:
        return wanted
    if not options.force:
        raise Failure(
            f"{options.dev} {reason}, so a rate too low could lock you out; nothing changed. "
            "With --force it is throttled for 10 minutes (or --for TIME), until `throttle.sh keep`"
        )
    return wanted or FORCED_S


# --- actions ---------------------------------------------------------------------------------------------------------


def wishes(found: list[Place], known: Mapping[str, Link], wanted: Mapping[str, Shape | None]) -> list[Wish]:
    """What to change. Looks at each device, and raises Failure for one that is missing or could not be put back."""
    result = []
    for place in found:
        shape = wanted[place.direction]
        link = known.get(place.key)
        if link and links.identify(place.netns, place.dev)[0] != link.identity:
            link = None  # made anew since
        if shape and link is None:
            link = links.first_look(place.host, place.netns, place.dev, place.direction, detour=place.detour)
        if link:
            result.append(Wish(link, shape))
        else:
            links.identify(place.netns, place.dev)
    return result


def throttle(options: argparse.Namespace) -> int:
    wanted = shapes(options)
    store, found = places(options)
    for_s = _guard(options)
    find("tc")
    find("ip")
    if options.dry_run and os.geteuid():
        return _blind(found, wanted)
    if wanted["up"] and wanted["up"].netem and not qdisc.has_netem():
        raise Failure(
            "this kernel has no netem (module sch_netem), so --delay and --loss cannot be had; leave them out, or try: "
            "sudo modprobe sch_netem (Fedora: dnf install kernel-modules-extra)",
            exits.UNREACHABLE,
        )
    files: dict[Path, str | None] = {}
    for place in found:
        if place.direction == "up":  # named as the host sees it
            mtu = links.identify(place.netns, place.dev)[1]
            files[place.file] = json.dumps(document(place.dev, wanted["up"], wanted["down"], mtu)) + "\n"
    if options.dry_run:
        changes = wishes(found, store.links(), wanted)
        return _show_commands(changes, list(files), for_s)
    os.umask(0o022)  # anybody may read what is asked; sudo adds the caller's own umask
    store.folder.mkdir(mode=0o711, parents=True, exist_ok=True)  # who may list it could lock it
    with store.locked() as lock:
        watchdog.undo(store)
        known = store.links()
        for key, link in known.items():
            if options.dev and link.dev != options.dev:
                raise Failure(
                    f"{link.dev} is throttled already, one at a time; first: throttle.sh clear --dev {link.dev}"
                )
            if options.dev and links.current_identity(link) is None:
                known = {name: other for name, other in known.items() if name != key}
        watchdog.change(store, lock, wishes(found, known, wanted), files, for_s)
    rates = ", ".join(f"{name} {show_rate(shape.rate_bit_s)}" for name, shape in wanted.items() if shape)
    hosts = ",".join(dict.fromkeys(place.host for place in found))
    end = f"; ends in {for_s:g} s unless you call `throttle.sh keep`" if for_s else ""
    print(f"throttle: {hosts} ({options.dev or 'virtual'}): {rates}{end}", file=sys.stderr)
    return exits.OK


def _blind(found: list[Place], wanted: Mapping[str, Shape | None]) -> int:
    """A dry run by somebody who may not look: the commands for links that have not been touched."""
    for place in found:
        shape = wanted[place.direction]
        if shape and place.detour:
            run_all(qdisc.ingress_commands(None, place.dev, "hvdifb0", shape, 1500, exists=False), dry_run=True)
        elif shape:
            shaping = shape_commands(place.netns, place.dev, shape.rate_bit_s)
            run_all(shaping + qdisc.netem_commands(place.netns, place.dev, shape, 1500, []), dry_run=True)
    print("throttle: without root only the commands for untouched links are known", file=sys.stderr)
    return exits.OK


def _show_commands(changes: list[Wish], files: list[Path], for_s: float | None) -> int:
    for wish in changes:
        run_all(links.plan(wish.link, wish.shape), dry_run=True)
    for path in files:
        print(f"# writes {path}")
    if for_s:
        print(f"# puts back what was there after {for_s:g} s")
    return exits.OK


def clear(options: argparse.Namespace) -> int:
    """Puts back what was there: of --dev, of the cluster's hosts, or of whatever this tool has throttled."""
    chosen = _stores(options)
    if options.dry_run:
        for store, keys in chosen:
            some = [link for key, link in store.links().items() if keys is None or key in keys]
            files = [Path(path) for path in store.load()["files"]]
            _show_commands([Wish(link, None) for link in some], files if some else [], None)
        return exits.OK
    differences: list[str] = []
    count = 0
    for store, keys in chosen:
        with store.locked() as lock:
            if watchdog.undo(store):
                print("throttle: undid a change that had been interrupted", file=sys.stderr)
            some = [link for key, link in store.links().items() if keys is None or key in keys]
            if some:
                differences += watchdog.clear(store, lock, some)
            count += len(some)
    if differences:
        raise Failure("; ".join(differences))
    print("throttle: put back what was there" if count else "throttle: nothing was throttled", file=sys.stderr)
    return exits.OK


def keep(options: argparse.Namespace) -> int:
    kept = 0
    for store, _ in _stores(options):
        with store.locked():
            kept += watchdog.keep(store)
    print("throttle: it stays until `throttle.sh clear`" if kept else "throttle: nothing had an end", file=sys.stderr)
    return exits.OK


def _stores(options: argparse.Namespace) -> list[tuple[Store, set[str] | None]]:
    """Where this tool has done something, and the links that are meant there; None: all of them."""
    if options.dev or options.name or options.host:
        if options.dev and not Store(virtual.SELF).path.exists():
            qdisc.device(None, options.dev)  # a wrong name is told from one that is not throttled
        store, found = places(options)
        keys = {place.key for place in found} if options.dev or options.host else None
        return [(store, keys)] if store.path.exists() else []
    known, user = virtual.whose(), calling_user()
    there = [name for name in reachable() if known[name] == user]  # another's are named, or left alone
    throttled = [name for name in there if Store(virtual.folder(name)).path.exists()]
    if throttled and len(there) > 1:
        raise Failure(f"several clusters are up ({', '.join(there)}); choose one with --name", exits.USAGE)
    stores = [Store(virtual.SELF), *(Store(virtual.folder(name)) for name in throttled)]
    stores = [store for store in stores if store.path.exists()]
    if not stores and known and not reachable():
        places(options)  # raises: a virtual host cannot reach its cluster's links
    return [(store, None) for store in stores]


# --- entry -----------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Returns the exit code; raises Failure, whose message is for the user."""
    options = parser().parse_args(arguments)
    verb = options.what if options.what in ACTIONS else "throttle"
    check(options, verb)
    if options.hosts or options.hostfile:
        return remote.main(options, arguments)
    if verb == "throttle":
        shapes(options)  # a bad rate is told before a missing permission
        if options.duration:
            seconds(options.duration)
    if verb == "show":
        return goodput.show_all(options)
    if os.geteuid() and not options.dry_run:
        become_root("changing queues needs root: put sudo before it", "throttle.sh", arguments)
    return {"throttle": throttle, "verify": goodput.verify, "clear": clear, "keep": keep}[verb](options)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "throttle")
