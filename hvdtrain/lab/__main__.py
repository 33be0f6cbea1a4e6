"""The command `hvdtrain cluster ...`, `tools/cluster.sh ...`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pwd
import sys
from pathlib import Path
from typing import Any

from hvdtrain.lab import enter, lifecycle, topology, virtual
from hvdtrain.lab.throttle import qdisc
from hvdtrain.lab.throttle.__main__ import main as run_throttle
from hvdtrain.lab.throttle.request import reachable
from hvdtrain.system import exits, net
from hvdtrain.system.arguments import Parser
from hvdtrain.system.commands import as_calling_user, calling_user, succeeds
from hvdtrain.system.exits import Failure

PURPOSE = """Create virtual hosts on this machine, on a separate network, to try out a cluster.

examples:
  sudo hvdtrain cluster up --hosts a,b,c,d --cpu-share 0.5
  hvdtrain cluster exec a -- horovodrun -np 4 -H a:2,b:2 python -m hvdtrain.resnet --epochs 1
  sudo hvdtrain cluster up --name adsl --topology hostfiles/adsl.toml
  hvdtrain cluster hostfile > hostfile
  hvdtrain cluster status --json
  sudo hvdtrain cluster down

If sudo does not find hvdtrain, use `sudo tools/cluster.sh up ...`, which runs with the system's own python3.
"""


def parser() -> Parser:
    top = Parser(prog="hvdtrain cluster", description=PURPOSE)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, purpose: str, *, dry_run: bool = True) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        one.add_argument("--name", help="the cluster's name (default: lab, or your only running one)")
        if dry_run:
            one.add_argument("--dry-run", action="store_true", help="print the exact commands and change nothing")
        return one

    up = add("up", "create a cluster (root)")
    which = up.add_mutually_exclusive_group(required=True)
    which.add_argument("--hosts", metavar="A,B,..", help="names of the hosts")
    which.add_argument(
        "--topology", metavar="FILE.toml", type=Path, help="hosts that differ, as in hostfiles/adsl.toml"
    )
    up.add_argument("--slots", type=int, default=2, help="ranks per host in the hostfile (default: 2)")
    up.add_argument("--cpu-share", type=float, metavar="CORES", help="cores each host may use, e.g. 0.5 (default: all)")
    up.add_argument("--cpus", metavar="LIST", help="cores the hosts may run on, e.g. 0-1,3 (default: all)")
    up.add_argument("--rate", metavar="RATE", help="rate of every link, e.g. 10mbit (default: unlimited)")
    up.add_argument("--own-files", action="store_true", help="hosts share neither the home folder nor the checkout")

    add("down", "remove a cluster and end all processes on its hosts (root); succeeds if there is none")
    add("status", "hosts, addresses, rates, CPU shares, processes", dry_run=False).add_argument(
        "--json", action="store_true", help="one JSON document"
    )
    add("hostfile", "print the hosts as `a slots=2` lines", dry_run=False)
    execute = add("exec", "run a command on a host, as the calling user")
    execute.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="also pass this variable (repeatable)"
    )
    execute.add_argument("host")
    execute.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")
    add("shell", "open a shell on a host").add_argument("host")
    return top


def limits(cluster: topology.Cluster) -> list[list[str]]:
    """Arguments for the throttle that give each link the topology's rate."""
    groups: dict[tuple[str | None, str | None], list[str]] = {}
    for host in cluster.hosts:
        groups.setdefault((host.up, host.down), []).append(host.name)
    return [
        ["--name", cluster.name, "--host", ",".join(names), "--up", up or "none", "--down", down or "none"]
        for (up, down), names in groups.items()
        if up or down
    ]


def create(options: argparse.Namespace) -> int:
    user = calling_user()
    if options.topology:
        if (options.slots, options.cpu_share, options.cpus, options.rate) != (2, None, None, None):
            message = "--slots, --cpu-share, --cpus and --rate cannot be combined with --topology"
            raise Failure(f"{message}; hint: set them in its file", exits.USAGE)
        with as_calling_user():
            cluster = topology.from_toml(options.topology, cluster=options.name, user=user)
    else:
        cluster = topology.from_names(
            options.hosts,
            cluster="lab" if options.name is None else options.name,
            user=user,
            slots=options.slots,
            cpu_share=options.cpu_share,
            cpus=options.cpus,
            rate=options.rate,
        )
    cluster = dataclasses.replace(cluster, own_files=options.own_files)
    lifecycle.up(cluster, dry_run=options.dry_run)
    if options.dry_run:
        for words in limits(cluster):
            print(f"tools/throttle.sh {' '.join(words)}")
    else:
        try:
            for words in limits(cluster):
                run_throttle(words)
        except BaseException:
            lifecycle.down(cluster.name)
            raise
        print(f"hvdtrain: cluster {cluster.name} is up: {', '.join(h.name for h in cluster.hosts)}", file=sys.stderr)
    return exits.OK


def remove(options: argparse.Namespace) -> int:
    name = virtual.choose(options.name) or "lab"
    existed = lifecycle.down(name, dry_run=options.dry_run)
    if not options.dry_run:
        print(f"hvdtrain: cluster {name} {'is down' if existed else 'does not exist'}", file=sys.stderr)
    return exits.OK


def status(cluster: topology.Cluster) -> dict[str, Any]:
    """The document of `status --json`. Only root, outside of the hosts, can read the kernel's rates and processes."""
    root = os.geteuid() == 0 and cluster.name in reachable()
    hosts = []
    for host in cluster.hosts:
        here, netns = virtual.folder(cluster.name) / "hosts" / host.name, cluster.netns(host.name)
        pid = (here / "sshd.pid").read_text().strip() if (here / "sshd.pid").exists() else ""
        rates = net.requested_throttle(here / "throttle.json")
        hosts.append(
            {
                "host": host.name,
                "address": cluster.address(host.name),
                "slots": host.slots,
                "cpu_share": host.cpu_share,
                "cpus": host.cpus,
                "sshd": bool(pid) and Path(f"/proc/{pid}").exists(),
                "link_up": succeeds(["ip", "-n", netns, "route", "get", "10.77.0.254"]) if root else None,
                "rates_asked": rates and {way: rates.get(way) for way in ("up_mbit", "down_mbit")},
                "rates_set": _rates_set(cluster, host.name) if root else None,
                "processes": len(lifecycle.processes(netns)) if root else None,
            }
        )
    return {"schema": "hvdtrain/cluster/1", "name": cluster.name, "user": cluster.user, "hosts": hosts}


def _rates_set(cluster: topology.Cluster, host: str) -> dict[str, float | None]:
    """Rates at which the kernel's queues limit the host's link, in Mbit/s."""
    result: dict[str, float | None] = {}
    for link in (link for link in virtual.links(cluster) if link.host == host):
        rate_bit_s = qdisc.rate_of(qdisc.read(link.netns, link.dev))
        result[f"{link.direction}_mbit"] = rate_bit_s and rate_bit_s / 1e6
    return result


def show_status(document: dict[str, Any]) -> None:
    def text(value: Any, none: str) -> str:
        return none if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    def rates(pair: dict[str, Any] | None, none: str) -> str:
        if pair is None:
            return none
        return "/".join(text(pair[f"{direction}_mbit"], "-") for direction in ("up", "down"))

    rows = [("host", "address", "slots", "cores", "requested up/down", "actual up/down", "link", "sshd", "processes")]
    for host in document["hosts"]:
        cores = text(host["cpu_share"], "all") + (f" of {host['cpus']}" if host["cpus"] else "")
        link = {True: "up", False: "DOWN", None: "?"}[host["link_up"]]
        rows.append(
            (
                *(host["host"], host["address"], str(host["slots"]), cores),
                *(rates(host["rates_asked"], "-"), rates(host["rates_set"], "?")),
                *(link, "up" if host["sshd"] else "DOWN", text(host["processes"], "?")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"cluster {document['name']} of {document['user']}; rates in Mbit/s; ? needs root, outside of the hosts")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code. Raises Failure."""
    options = parser().parse_args(arguments)
    if options.command == "up":
        return create(options)
    if options.command == "down":
        return remove(options)
    cluster = virtual.load(options.name)
    if options.command == "hostfile":
        print("\n".join(f"{host.name} slots={host.slots}" for host in cluster.hosts))
        return exits.OK
    if options.command == "status":
        document = status(cluster)
        print(json.dumps(document, indent=2)) if options.json else show_status(document)
        return exits.OK
    cluster.host(options.host)
    if options.command == "shell":
        words, extra = [pwd.getpwnam(calling_user()).pw_shell or "/bin/sh"], []
    else:
        words, extra = options.words[1:] if options.words[:1] == ["--"] else options.words, options.env
    if not words:
        raise Failure("exec needs a command; hint: hvdtrain cluster exec a -- hostname", exits.USAGE)
    if os.geteuid() and not options.dry_run:
        enter.through_sudo(arguments, extra)
    enter.become(cluster, options.host, words, extra=extra, dry_run=options.dry_run)
    return exits.OK


if __name__ == "__main__":
    exits.end(main, sys.argv[1:])
