"""The command `tools/throttle.sh 10mbit`, `hvdtrain throttle ...`.

It throttles the links of the running virtual cluster; with --dev, one interface of this machine; and with --hosts or
--hostfile, that interface on other machines, where it runs the throttle of the same checkout over ssh.
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
from hvdtrain.lab.throttle.links import Link, LinkTarget
from hvdtrain.lab.throttle.qdisc import Shape, shape_commands
from hvdtrain.lab.throttle.request import ACTIONS, check, parser, reachable, seconds, shapes, targets
from hvdtrain.lab.throttle.watchdog import LinkChange, Store
from hvdtrain.system import exits, net, proc
from hvdtrain.system.commands import become_root, calling_user, find, run, run_all
from hvdtrain.system.exits import Failure
from hvdtrain.system.rates import show_rate

SCHEMA = "hvdtrain/throttle/1"
FORCED_S = 600.0
"""Duration of a forced throttle, unless `--for` sets it."""


def document(dev: str, up: Shape | None, down: Shape | None) -> dict[str, Any]:
    """Content of a host's throttle.json: rates in Mbit/s (null: unlimited)."""
    return {
        "schema": SCHEMA,
        "dev": dev,
        "up_mbit": up.rate_bit_s / 1e6 if up else None,
        "down_mbit": down.rate_bit_s / 1e6 if down else None,
        "set_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# --- safety ----------------------------------------------------------------------------------------------------------


def session_address() -> str | None:
    """Address of the other end of this ssh session. None outside of one.

    sudo removes the variable, so the parent processes are searched too.
    """
    pid = os.getpid()
    variables: Mapping[str, str] = os.environ
    while not (connection := variables.get("SSH_CONNECTION", "").split()):
        if (pid := proc.stat(pid).parent) <= 1:
            return None
        variables = dict(item.split("=", 1) for item in proc.strings(pid, "environ") if "=" in item)
    return connection[0]


def danger(dev: str) -> str | None:
    """Why throttling this interface could harm more than the user's job. None if it is safe."""
    if dev == "lo":
        return "is the loopback, over which the programs of this machine talk to each other"
    address, _, zone = (session_address() or "").partition("%")
    if address and dev in _with_lower(zone or net.route_device(address)):
        return "carries the ssh session you are in, so a low rate could lock you out"
    for family in ("-4", "-6"):
        routes = json.loads(run(["ip", family, "-json", "route", "show", "default"]) or "[]")
        hops = [hop for route in routes for hop in (route, *route.get("nexthops", ()))]
        if any(dev in _with_lower(hop.get("dev")) for hop in hops):
            return "carries the default route, so a low rate could lock you out"
        if any(_is_tunnel(hop.get("dev")) for hop in hops):
            beyond = json.loads(run(["ip", family, "-json", "route", "show"]) or "[]")
            if any("gateway" in route and dev in _with_lower(route.get("dev")) for route in beyond):
                return "may carry the tunnel of the default route, so a low rate could lock you out"
    return None


def _is_tunnel(dev: str | None) -> bool:
    """Whether packets leave the interface inside others: a VPN. The kernel does not say over which interface."""
    links = json.loads(run(["ip", "-json", "link", "show", "dev", dev])) if dev else []
    return any("POINTOPOINT" in link["flags"] for link in links)


def _with_lower(dev: str | None) -> set[str]:
    """The interface and those below it: ports of a bridge or bond, the base of a VLAN."""
    if dev is None:
        return set()
    lower = Path("/sys/class/net", dev).glob("lower_*")
    return {dev}.union(*(_with_lower(link.name.removeprefix("lower_")) for link in lower))


def _duration_s(options: argparse.Namespace) -> float | None:
    """Seconds until the throttle ends. None: it stays. Raises Failure (1) for a dangerous interface without --force."""
    requested = seconds(options.duration) if options.duration else None
    if not options.dev or (reason := danger(options.dev)) is None:
        return requested
    if not options.force:
        raise Failure(
            f"{options.dev} {reason}; nothing changed; hint: --force throttles it for 10 minutes (or --for TIME)"
        )
    return requested or FORCED_S


# --- actions ---------------------------------------------------------------------------------------------------------


def link_changes(
    selected: list[LinkTarget], known: Mapping[str, Link], requested: Mapping[str, Shape | None]
) -> list[LinkChange]:
    """The changes to make. Raises Failure if a device is missing or its queue could not be restored."""
    changes = []
    for target in selected:
        shape = requested[target.direction]
        link = known.get(target.key)
        if link and links.identify(target.netns, target.dev)[0] != link.identity:
            link = None  # the device was recreated
        if shape and link is None:
            link = links.inspect(target)
        if link:
            changes.append(LinkChange(link, shape))
        else:
            links.identify(target.netns, target.dev)
    return changes


def throttle(options: argparse.Namespace) -> int:
    requested = shapes(options)
    store, selected = targets(options)
    for_s = _duration_s(options)
    find("tc")
    find("ip")
    if options.dry_run and os.geteuid():
        return _dry_run_without_root(selected, requested)
    files: dict[Path, str | None] = {}
    for target in selected:
        if target.direction == "up":  # this device has the name that the host sees
            files[target.file] = json.dumps(document(target.dev, requested["up"], requested["down"])) + "\n"
    if options.dry_run:
        changes = link_changes(selected, store.links(), requested)
        return _show_commands(changes, list(files), for_s)
    os.umask(0o022)  # any user may read the request; sudo adds the caller's own umask
    store.folder.mkdir(mode=0o711, parents=True, exist_ok=True)  # a user who may list the folder could lock it
    with store.locked() as lock:
        watchdog.undo(store)
        known = store.links()
        for key, link in known.items():
            if options.dev and link.dev != options.dev:
                hint = f"run throttle.sh clear --dev {link.dev} first"
                raise Failure(f"{link.dev} is already throttled, and only one interface can be; hint: {hint}")
            if options.dev and links.current_identity(link) is None:
                known = {name: other for name, other in known.items() if name != key}
        watchdog.change(store, lock, link_changes(selected, known, requested), files, for_s)
    rates = ", ".join(f"{name} {show_rate(shape.rate_bit_s)}" for name, shape in requested.items() if shape)
    hosts = ",".join(dict.fromkeys(target.host for target in selected))
    end = f"; ends in {for_s:g} s" if for_s else ""
    print(f"throttle: {hosts} ({options.dev or 'virtual'}): {rates}{end}", file=sys.stderr)
    return exits.OK


def _dry_run_without_root(selected: list[LinkTarget], requested: Mapping[str, Shape | None]) -> int:
    """Print the commands for links that are not throttled yet: only root may read their state."""
    for target in selected:
        shape = requested[target.direction]
        if shape and target.redirect:
            run_all(qdisc.ingress_commands(None, target.dev, "hvdifb0", shape, 1500, exists=False), dry_run=True)
        elif shape:
            run_all(shape_commands(target.netns, target.dev, shape.rate_bit_s), dry_run=True)
    print("throttle: without root, these are the commands for links that are not throttled yet", file=sys.stderr)
    return exits.OK


def _show_commands(changes: list[LinkChange], files: list[Path], for_s: float | None) -> int:
    for change in changes:
        run_all(links.plan(change.link, change.shape), dry_run=True)
    for path in files:
        print(f"# writes {path}")
    if for_s:
        print(f"# restores the original queues after {for_s:g} s")
    return exits.OK


def clear(options: argparse.Namespace) -> int:
    """Restore the links of --dev or of the cluster's hosts, or all that the throttle has changed."""
    stores = _stores(options)
    if options.dry_run:
        for store, keys in stores:
            selected = [link for key, link in store.links().items() if keys is None or key in keys]
            files = [Path(path) for path in store.load()["files"]]
            _show_commands([LinkChange(link, None) for link in selected], files if selected else [], None)
        return exits.OK
    differences: list[str] = []
    count = 0
    for store, keys in stores:
        with store.locked() as lock:
            if watchdog.undo(store):
                print("throttle: undid an interrupted change", file=sys.stderr)
            selected = [link for key, link in store.links().items() if keys is None or key in keys]
            if selected:
                differences += watchdog.clear(store, lock, selected)
            count += len(selected)
    if differences:
        raise Failure("; ".join(differences))
    print("throttle: restored the original queues" if count else "throttle: nothing was throttled", file=sys.stderr)
    return exits.OK


def _stores(options: argparse.Namespace) -> list[tuple[Store, set[str] | None]]:
    """The stores that exist, each with the keys of the selected links. None: all links of the store."""
    if options.dev or options.name or options.host:
        if options.dev and not Store(virtual.SELF).path.exists():
            qdisc.device(None, options.dev)  # an unknown name is an error, an unthrottled interface is not
        store, selected = targets(options)
        keys = {target.key for target in selected} if options.dev or options.host else None
        return [(store, keys)] if store.path.exists() else []
    owners, user = virtual.owners(), calling_user()
    own = [name for name in reachable() if owners[name] == user]  # other users' clusters must be named
    throttled = [name for name in own if Store(virtual.folder(name)).path.exists()]
    if throttled and len(own) > 1:
        raise Failure(f"several clusters are up ({', '.join(own)}); hint: choose one with --name", exits.USAGE)
    stores = [Store(virtual.SELF), *(Store(virtual.folder(name)) for name in throttled)]
    stores = [store for store in stores if store.path.exists()]
    if not stores and owners and not reachable():
        targets(options)  # raises: a virtual host cannot reach its cluster's links
    return [(store, None) for store in stores]


# --- entry -----------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code. Raises Failure."""
    options = parser().parse_args(arguments)
    action = options.what if options.what in ACTIONS else "throttle"
    check(options, action)
    if options.hosts or options.hostfile:
        return remote.main(options, arguments)
    if action == "throttle":
        shapes(options)  # report a bad rate and a dangerous interface before a missing permission
        _duration_s(options)
    if os.geteuid() and not options.dry_run:
        undo = f"throttle.sh clear{f' --dev {options.dev}' if options.dev else ''}"
        notice = f"throttle: sudo makes this root, to change queues; to undo it: {undo}" if action == "throttle" else ""
        refusal = "changing queues needs root; hint: run it with sudo"
        become_root(refusal, "throttle.sh", "hvdtrain.lab.throttle", arguments, notice=notice)
    return {"throttle": throttle, "verify": goodput.verify, "clear": clear}[action](options)


if __name__ == "__main__":
    exits.end(main, sys.argv[1:], "throttle")
