"""Measurements between hosts: open ports, round-trip times and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hvdtrain.doctor.checks import FAIL, OK, WARN, Check
from hvdtrain.system.agent import Agent, Unreachable
from hvdtrain.system.rates import all_reduce_s

PATIENCE_S = 3.0
SETTLE_S, COUNT_S = 0.3, 1.0
"""Parts of a measurement. In the first one TCP finds the rate."""
GRADIENT_BYTES = 85_130_000
"""Gradients of ResNet-34 with 10 classes in float32."""
SLOW_MBIT = 100.0
UNEVEN = 2.0
SHARE_OF_NIC = 0.5
"""A link that carries less than this share of its interfaces' speed has a bad cable, or something slow between"""
FAR_MS = 10.0
UNSTEADY_MS = 5.0
"""Round trips that differ by more than this wait for the air, or for other traffic"""
ALL_PAIRS_UP_TO = 8
"""More hosts than this are measured along a ring, the path of an all-reduce."""
ONE_STREAM_MBIT = 10_000
"""What one TCP connection of this measurement can be expected to carry"""


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Rounds of host pairs. No host appears twice in a round, so that measurements do not disturb each other.

    Up to ALL_PAIRS_UP_TO hosts, every pair appears once (circle method of a round-robin tournament). For more hosts,
    only neighbours in a ring do.
    """
    count = len(hosts)
    if count > ALL_PAIRS_UP_TO:
        ring = [(hosts[i], hosts[(i + 1) % count]) for i in range(count)]
        parts = [ring[0 : count - count % 2 : 2], ring[1::2], ring[count - count % 2 :]]
        return [part for part in parts if part]
    seats = list(range(count + count % 2))  # with an odd count one host rests in each round
    result = []
    for _ in range(len(seats) - 1):
        pairs = sorted(tuple(sorted((seats[i], seats[-1 - i]))) for i in range(len(seats) // 2))
        result.append([(hosts[a], hosts[b]) for a, b in pairs if b < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [part for part in result if part]


def show_rate(mbit: float) -> str:
    return f"{mbit / 1e3:.1f} Gbit/s" if mbit >= 1e3 else f"{mbit:.3g} Mbit/s"


# --- ports -----------------------------------------------------------------------------------------------------------


def try_ports(agents: Mapping[str, Agent], addresses: Mapping[str, str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Connect from each host to one port of each range on every other host, all hosts at the same time.

    Returns the results by (from, to).
    """
    listening = {host: agent.start("listen", address=addresses[host]) for host, agent in agents.items()}
    ports = {host: future.result(timeout=10) for host, future in listening.items()}
    connecting = {}
    for host, agent in agents.items():
        others = [other for other in agents if other != host]
        targets = [(addresses[other], port) for other in others for port in ports[other]]
        connecting[host] = (others, agent.start("connect", targets=targets, patience_s=PATIENCE_S))
    result: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for host, (others, future) in connecting.items():
        results = iter(future.result(timeout=30))
        for other in others:
            result[host, other] = [{"port": port, **next(results)} for port in ports[other]]
    return result


def judge_ports(tried: Mapping[tuple[str, str], list[dict[str, Any]]], addresses: Mapping[str, str]) -> list[Check]:
    """One check for all open directions, and one for each closed one. `tried` is the result of `try_ports`."""
    checks = []
    for (a, b), results in tried.items():
        if is_open(results):
            continue
        closed = [result for result in results if result["result"] != "open"]
        shown = ", ".join(f"{result['port']} ({result['result']})" for result in closed)
        what = f"TCP connections to {addresses[b]} port {shown} fail"
        fix = (
            f"open TCP 1024-65535 from {addresses[a]} in {b}'s firewall (ufw allow from {addresses[a]}; firewall-cmd "
            f"--zone=trusted --add-source={addresses[a]}): Horovod and MPI choose ports at random"
        )
        data = {"from": a, "to": b, "address": addresses[b], "ports": results}
        checks.append(Check(name="ports", status=FAIL, where=f"{a} -> {b}", what=what, fix=fix, facts=data))
    good = len(tried) - len(checks)
    if good:
        hosts = ", ".join(addresses)
        what = f"high ports are open in {good} of {len(tried)} directions"
        return [
            Check(name="ports", status=OK, where=hosts, what=what, facts={"open": good, "tried": len(tried)}),
            *checks,
        ]
    return checks


def is_open(results: Sequence[Mapping[str, Any]]) -> bool:
    return all(result["result"] == "open" for result in results)


def round_trips_ms(results: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The shortest of the median round trips to the open ports, and what four of five took at most there. None if no
    port was open."""
    opened = [each for each in results if "round_trip_ms" in each]
    return min(((each["round_trip_ms"], each["slow_round_trip_ms"]) for each in opened), default=None)


# --- speed -----------------------------------------------------------------------------------------------------------


def measure(a: Agent, b: Agent, address: str) -> float | str:
    """TCP payload from a to b in Mbit/s, or the reason why it could not be measured."""
    try:
        port = b.ask("serve_stream", address=address)
        result = a.ask("measure_stream", address=address, port=port, settle_s=SETTLE_S, count_s=COUNT_S)
        return float(result["bit_s"]) / 1e6
    except Unreachable as problem:
        return problem.reason


def speeds(
    agents: Mapping[str, Agent],
    addresses: Mapping[str, str],
    tried: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    nic_mbit: Mapping[str, int | None],
    progress: Callable[[str], None],
    report: Callable[[Check], None],
) -> None:
    """Measure each pair in both directions, one after the other, and report each pair when it is done.

    A pair that looks slow or uneven is measured again, and the better result counts for each direction: other load on
    the hosts can only make a link look slower. `tried` is the result of `try_ports`. Pairs with a closed port are
    skipped, because they have been reported already. `nic_mbit`: the speed of each host's interface, if it is known.
    """
    hosts = list(agents)
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:

        def both_ways(pairs: list[tuple[str, str]]) -> list[tuple[float | str, float | str]]:
            there = list(pool.map(lambda pair: measure(agents[pair[0]], agents[pair[1]], addresses[pair[1]]), pairs))
            back = list(pool.map(lambda pair: measure(agents[pair[1]], agents[pair[0]], addresses[pair[0]]), pairs))
            return list(zip(there, back, strict=True))

        for chosen in rounds(hosts):
            pairs = [(a, b) for a, b in chosen if is_open(tried[a, b]) and is_open(tried[b, a])]
            if not pairs:
                continue
            progress("bandwidth between " + ", ".join(f"{a} and {b}" for a, b in pairs))
            rates = dict(zip(pairs, both_ways(pairs), strict=True))
            said = {(a, b): min((mbit for host in (a, b) if (mbit := nic_mbit[host])), default=None) for a, b in pairs}
            doubtful = [
                pair for pair in pairs if judge_speed(*pair, *rates[pair], None, len(hosts), said[pair]).status != OK
            ]
            for pair, (there, back) in zip(doubtful, both_ways(doubtful), strict=True):
                rates[pair] = better(rates[pair][0], there), better(rates[pair][1], back)
            for a, b in pairs:
                report(judge_speed(a, b, *rates[a, b], round_trips_ms(tried[a, b]), len(hosts), said[a, b]))


def better(one: float | str, other: float | str) -> float | str:
    """The higher of two rates. A rate wins over an error message."""
    return max(one, other, key=lambda rate: rate if isinstance(rate, float) else -1.0)


def judge_speed(
    a: str,
    b: str,
    there: float | str,
    back: float | str,
    trips_ms: tuple[float, float] | None,
    hosts: int,
    nic_mbit: float | None = None,
) -> Check:
    """Judge a pair of hosts by both rates, its round trips and the speed of the slower interface, if it is known.

    A rate that could not be measured is an error message. `trips_ms`: see `round_trips_ms`.
    """
    where = f"{a} <-> {b}"
    delay_ms, slow_ms = trips_ms or (None, None)
    data = {
        "hosts": [a, b],
        "there_mbit": there if isinstance(there, float) else None,
        "back_mbit": back if isinstance(back, float) else None,
        "round_trip_ms": delay_ms,
        "slow_round_trip_ms": slow_ms,
        "nic_mbit": nic_mbit,
    }
    for way, result in ((f"{a} to {b}", there), (f"{b} to {a}", back)):
        if isinstance(result, str):
            what = f"bandwidth from {way} could not be measured: {result}"
            fix = "run the doctor again; if that fails too, compare with a smaller MTU: ip link set DEV mtu 1400"
            return Check(name="speed", status=WARN, where=where, what=what, fix=fix, facts=data)
    assert isinstance(there, float) and isinstance(back, float)
    what, slowest, fixes = f"{show_rate(there)} there, {show_rate(back)} back", min(there, back), list[str]()
    if delay_ms is not None:
        what += f", {delay_ms:.2g} ms round trip"
    if trips_ms is not None and trips_ms[1] - trips_ms[0] > UNSTEADY_MS:
        what += f", but one of five takes {slow_ms:.2g} ms or more: Wi-Fi, or other traffic"
        fixes.append("use a cable, or a strategy that waits seldom (--strategy fast)")
    if nic_mbit and slowest < SHARE_OF_NIC * min(nic_mbit, ONE_STREAM_MBIT):
        what += f"; the interfaces have {show_rate(nic_mbit)}"
        fixes.append("check throttles, the cables, the switch's port and the load of the link (ethtool, iperf3)")
    if slowest < SLOW_MBIT:
        seconds = all_reduce_s(GRADIENT_BYTES, hosts, slowest * 1e6)
        data["allreduce_s"] = seconds
        what += f"; ResNet-34's gradients (85 MB) take at least {seconds:.3g} s per step over {hosts} hosts"
        fixes.append("use a faster interface (--nic) or a smaller model; remove a throttle: tools/throttle.sh clear")
    if max(there, back) > UNEVEN * slowest:
        slow_way = f"{a} to {b}" if there < back else f"{b} to {a}"
        what += f"; {slow_way} is {max(there, back) / slowest:.1f} times slower than the other way"
        fixes.append("check the cable, the duplex mode (ethtool) and throttles: a ring is as slow as its slowest link")
    if delay_ms is not None and delay_ms > FAR_MS:
        what += (
            "; the hosts are far apart or a queue between them is full, and each exchange waits for several round trips"
        )
        fixes.append("send fewer, larger messages (HOROVOD_CYCLE_TIME)")
    status = WARN if fixes else OK
    return Check(name="speed", status=status, where=where, what=what, fix="; ".join(fixes), facts=data)
