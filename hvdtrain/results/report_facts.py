"""Where the runs ran and what measured them, as tables: software and machines, links, power sensors, problems.

All of it is read from the runs' own manifests, points and sensor records. What runs differ in is listed with the number
of runs for each value.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from hvdtrain import records
from hvdtrain.results import groups, load, missing, sensors
from hvdtrain.results.folders import Problem
from hvdtrain.results.load import Loaded
from hvdtrain.results.runs import WIRE_SHARE
from hvdtrain.results.table import Column, Table


def environment(loaded: Loaded) -> Table:
    """Software, hosts, devices, NICs, model and data of the complete runs."""
    counted: dict[str, Counter[str]] = {}
    for run_dir in loaded.complete["run_dir"]:
        for name, value in dict.fromkeys(facts(load.manifest(run_dir))):
            counted.setdefault(name, Counter())[value] += 1
    rows = [
        {"what": name, "value": value, "runs": number}
        for name, values in counted.items()
        for value, number in sorted(values.items(), key=lambda item: (-item[1], item[0]))
    ]
    columns = [Column("what", "what"), Column("value", "as recorded"), Column("runs", "runs")]
    return Table("environment", "Software and machines", columns, rows)


def facts(manifest: records.Manifest) -> Iterator[tuple[str, str]]:
    """(name, value) of everything about the surroundings that a manifest records."""
    yield from ((str(name), str(version)) for name, version in manifest.versions.items() if version is not None)
    yield "git commit", str(manifest.git_commit or "not recorded")
    yield "hosts", ", ".join(manifest.hosts) or "not recorded"
    for rank in manifest.ranks:
        yield "ranks compute on", str(rank.get("device") or "not recorded")
        yield "CPU threads per rank", str(rank.get("threads") or "not recorded")
        if rank.get("cpu"):
            share = f", of which the host may use {rank['cores']}" if rank.get("cores") else ""
            yield "processor", f"{rank['cpu']}{share}"
    yield "collectives carried by", manifest.collectives
    for link in manifest.links:
        speed = f"{link['speed_mbit']} Mbit/s negotiated" if link.get("speed_mbit") else "speed not told by the NIC"
        yield "NIC", f"{link.get('nic')} ({speed})"
    yield "data set", named(manifest.data, ("train", "validation", "test"))
    yield "data set's SHA-256", str(manifest.data.get("fingerprint") or "not recorded")
    yield "model", named(manifest.model, ("parameters",))


def named(about: Mapping[str, Any], numbers: Sequence[str]) -> str:
    """`digits, 1,437 train, 126 validation`: the name, and each number that is there."""
    known = [f"{about[name]:,} {name}" for name in numbers if isinstance(about.get(name), int)]
    return ", ".join([str(about.get("name")), *known])


def links(runs: pd.DataFrame) -> Table:
    """What was asked of the throttle, and what the slowest link of each run then let through."""
    several = runs[(runs["state"] == "complete") & (runs["hosts"] > 1)]
    rows: list[dict[str, Any]] = []
    for group in groups.by(several, ("rate_mbit",)):
        asked = group.key["rate_mbit"]
        got = group.statistic("goodput_mbit")
        expected = None if asked is None else WIRE_SHARE * asked
        off = None if got is None or expected is None else 100 * (got.mean - expected) / expected
        low, high = (None, None) if got is None else (got.min, got.max)
        asked_text = "no throttle" if asked is None else f"{asked:g}"
        rows.append(
            {"rate": asked_text, "runs": group.n, "expected": expected, "got": got, "min": low, "max": high, "off": off}
        )
    columns = [
        Column("rate", "rate asked (Mbit/s)"),
        Column("runs", "runs"),
        Column("expected", "payload it allows", "Mbit/s"),
        Column("got", "payload measured", "Mbit/s"),
        Column("min", "least", "Mbit/s"),
        Column("max", "most", "Mbit/s"),
        Column("off", "mean off by", "%"),
    ]
    notes = [
        "measured: TCP payload of each run's slowest link before step 0, while every host sends to its next",
        f"a link full both ways carries {WIRE_SHARE} of its rate as payload, beside headers and acknowledgements",
    ]
    return Table("links", "Links: throttle asked and payload measured", columns, rows, notes)


def power_sensors(loaded: Loaded) -> Table:
    """What measured power, and which devices went without and why."""
    counted = Counter(sensor for run_dir in loaded.complete["run_dir"] for sensor in set(sensors.of(run_dir)))
    rows = [
        vars(sensor) | {"source": sensor.source or f"none here: {sensor.reason}", "runs": number}
        for sensor, number in sorted(counted.items(), key=lambda item: (item[0].host, item[0].device, repr(item)))
    ]
    columns = [Column(key, key) for key in ("host", "device", "name")]
    columns += [Column("source", "measured by"), Column("used", "a rank computes on it"), Column("runs", "runs")]
    return Table("sensors", "Power sensors", columns, rows)


def problems(found: Sequence[Problem]) -> Table:
    """What was refused, left out or odd, with its file and line."""
    rows = [{"path": problem.path, "line": problem.line, "what": problem.what} for problem in found]
    columns = [Column("path", "file or folder"), Column("line", "line"), Column("what", "what")]
    return Table("problems", f"{len(rows)} problems", columns, rows)


def commands(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Of the first run of each group of complete runs: as a comment, the hosts, ranks and throttle that it needs; and
    the command that a sweep launched, else what each rank ran."""
    for group in groups.by(loaded.complete):
        run_dir = missing.group_run(group)
        point = load.point(run_dir)
        hosts, per_host, rate = (group.key[name] for name in ("hosts", "ranks_per_host", "rate_mbit"))
        needs = "hosts not recorded" if hosts is None else f"hosts: {hosts:g}, ranks: {hosts * per_host:g}"
        if rate is not None:
            needs += f", links: tools/throttle.sh {rate:g}mbit"
        yield f"# {needs}", shlex.join(map(str, point.command) if point else missing.program(load.manifest(run_dir)))
