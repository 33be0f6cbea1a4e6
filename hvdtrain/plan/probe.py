"""Measures the links of real hosts over ssh, as the doctor does, before a plan."""

from __future__ import annotations

from collections import defaultdict

from hvdtrain.doctor import __main__ as doctor
from hvdtrain.doctor.checks import FAIL
from hvdtrain.plan.network import LATENCY_S, Link
from hvdtrain.plan.prediction import Host
from hvdtrain.system import exits
from hvdtrain.system.exits import Failure
from hvdtrain.system.hosts import parse_hosts
from hvdtrain.system.rates import goodput_both_ways, goodput_one_way


def hosts_of(text: str) -> list[Host]:
    """Measure the links of the hosts `a:2,b:2`. Raises Failure (2, 69) if one does not answer.

    Each pair is measured in turn, in each direction. A host's link is as fast as its fastest pair.
    """
    slots = parse_hosts(text)
    if len(slots) < 2:
        raise Failure(f"-H {text}: one host has no link; hint: name two hosts, or leave -H out", exits.USAGE)
    options = doctor.parser().parse_args(["-H", text])
    report = doctor.Report(as_json=True)
    names = [slot.host for slot in slots]
    try:
        with doctor.connected(slots, options, report) as hosts:
            doctor.ask_all(hosts, [])
            report.add(*hosts.lost.values())
            used = {host: doctor.nic_of(host, hosts) for host in hosts.agents}
            if not hosts.lost:
                doctor.links(hosts, {host: nic for host, nic in used.items() if nic}, names)
    finally:
        report.progress("")
    if failed := next((check for check in report.checks if check.status == FAIL), None):
        raise Failure(f"{failed.where}: {failed.what}; hint: {failed.fix}", exits.UNREACHABLE)
    up, down, trips_ms = defaultdict[str, float](float), defaultdict[str, float](float), list[float]()
    for facts in (check.facts for check in report.checks if check.name == "speed"):
        a, b = facts["hosts"]
        for sender, receiver, rate in ((a, b, facts["there_mbit"]), (b, a, facts["back_mbit"])):
            up[sender], down[receiver] = max(up[sender], rate or 0.0), max(down[receiver], rate or 0.0)
        trips_ms += [facts["round_trip_ms"]] if facts["round_trip_ms"] is not None else []
    if missing := [name for name in names if not up[name] or not down[name]]:
        raise Failure(
            f"{missing[0]}: its link could not be measured; hint: hvdtrain doctor -H {text}", exits.UNREACHABLE
        )
    both = 125e3 * goodput_both_ways(1) / goodput_one_way(1)
    latency_s = max([LATENCY_S, *(trip / 2e3 for trip in trips_ms)])
    return [
        Host(
            name=slot.host,
            link=Link(up=both * up[slot.host], down=both * down[slot.host], latency_s=latency_s),
            ranks=slot.slots,
        )
        for slot in slots
    ]
