"""Adds up a run's monitors/<host>.jsonl into joules per device.

A device counts only if every interval has its energy, because a sum with gaps would look like a saving. For the same
reason a host counts only if its samples cover at least 95 % of the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.results.read.folders import Problem
from hvdtrain.system.exits import printable

COVERED = 0.95
ELSEWHERE = "recorded by host"
"""Start of the reason for a device that another host of the same machine records"""


@dataclasses.dataclass
class HostEnergy:
    """The measurements of one host's sampler."""

    host: str
    energy_j: dict[str, float] = dataclasses.field(default_factory=dict)
    """By device, for devices without a gap"""
    used: dict[str, bool] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    """Device -> why it was not measured"""
    baseline_w: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    power_requested: bool = False


def columns(folder: Path, manifest: records.Manifest, expected_s: float, problems: list[Problem]) -> dict[str, Any]:
    """The energy columns of a complete run that took `expected_s`; empty if power was not sampled completely."""
    hosts = [read_host(path, problems) for path in sorted((folder / "monitors").glob("*.jsonl"))]
    if not any(host.power_requested for host in hosts):
        return {}
    if reason := _incomplete(hosts, manifest, expected_s):
        problems.append(Problem(str(folder / "monitors"), None, f"energy ignored: {reason}"))
        return {}
    return _totals(hosts)


def read_host(path: Path, problems: list[Problem]) -> HostEnergy:
    """The sums of one file; adds its incomplete lines to `problems`. Raises Failure (65, 74, 77) with file:line."""
    host = HostEnergy(path.stem)
    samples: dict[str, int] = {}
    count = 0

    def incomplete(line: int) -> None:
        problems.append(Problem(str(path), line, "incomplete line ignored"))

    for _, record in records.read_lines(path, incomplete):
        if isinstance(record, records.Sensors):
            host.host = record.host
            host.power_requested |= "power" in record.monitors
            host.baseline_w |= record.idle_w
            for device in (each for each in record.devices if isinstance(each.get("device"), str)):
                name = device["device"]
                host.used[name] = device.get("used") is not False  # null: unknown
                if device.get("source") is None:
                    host.absent[name] = str(device.get("reason"))
                else:
                    samples.setdefault(name, 0)
        elif isinstance(record, records.Sample):
            count += 1
            host.seconds += record.seconds
            for name, energy_j in record.energy_j.items():
                host.energy_j[name] = host.energy_j.get(name, 0.0) + energy_j
                samples[name] = samples.get(name, 0) + 1
    for name, measured in samples.items():
        if measured < count:
            host.energy_j.pop(name, None)
            host.absent[name] = f"has energy in {measured} of {count} intervals"
    return host


def _incomplete(hosts: Sequence[HostEnergy], manifest: records.Manifest, expected_s: float) -> str | None:
    missing = set(manifest.hosts) - {host.host for host in hosts}
    if missing:
        return f"no samples of host {printable(min(missing))}"
    named = [(device, f"{host.host}:{device}") for host in hosts for device in host.energy_j]
    known = {device[:3]: name for device, name in named if not device.startswith("dram")}  # few processors count DRAM
    for host in hosts:
        if host.seconds < COVERED * expected_s:
            return f"samples of {printable(host.host)} cover {host.seconds:.1f} of {expected_s:.1f} s"
        for device, reason in host.absent.items():
            if reason.startswith("has energy in"):
                return f"{printable(host.host)}: {printable(device)} {reason}"
            other = known.get(device[:3])
            if other and host.used.get(device, True) and not reason.startswith(ELSEWHERE):
                return printable(f"{host.host}:{device} was not measured, but {other} was ({reason})")
    return None


def _totals(hosts: Sequence[HostEnergy]) -> dict[str, Any]:
    by_device = {f"{host.host}:{name}": joules for host in hosts for name, joules in host.energy_j.items()}
    by_reason: dict[str, dict[str, None]] = {}
    for host in hosts:
        for name, reason in host.absent.items():
            if not reason.startswith(ELSEWHERE):
                by_reason.setdefault(reason, {})[name] = None
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    if not by_device:
        return {"energy_absent": printable(reasons) or None}
    unused = {f"{host.host}:{name}" for host in hosts for name in host.energy_j if not host.used.get(name, True)}
    used_j = [joules for name, joules in by_device.items() if name not in unused]
    seconds = max(host.seconds for host in hosts)
    baselines_w = [watts for host in hosts for watts in host.baseline_w.values()]
    return {
        "energy_absent": printable(reasons) or None,
        "energy_j": math.fsum(by_device.values()),
        "energy_used_j": math.fsum(used_j) if used_j else None,
        "power_w": math.fsum(by_device.values()) / seconds if seconds else None,
        "baseline_w": math.fsum(baselines_w) if baselines_w else None,
        "idle_devices": printable(",".join(sorted(unused))),
        "energy_by_device": {printable(name): joules for name, joules in by_device.items()},
    }
