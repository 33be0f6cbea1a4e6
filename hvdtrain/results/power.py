"""Streams a run's monitors/<host>.jsonl into joules per device; and the same files as tables for figures.

A device counts if every interval has its energy. One that misses some is left out with its file and line: a sum with
holes would look like saving. The same goes for a host whose samples cover less than 95 % of the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.results.folders import Problem

COVERED = 0.95


@dataclasses.dataclass
class HostPower:
    """What the sampler of one host measured."""

    host: str
    energy_j: dict[str, float] = dataclasses.field(default_factory=dict)
    """By device, those with a whole record"""
    used: dict[str, bool] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    """Device -> why it was not measured"""
    baseline_w: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    power_asked: bool = False


def read(path: Path, problems: list[Problem]) -> HostPower:
    """The sums of one file, whose torn lines are `problems`. Raises Failure (65, 74, 77) with file:line."""
    found = HostPower(path.stem)
    samples: dict[str, int] = {}
    count = 0
    for _, cls, value in records.read_values(path, lambda line: problems.append(Problem(str(path), line, "torn line"))):
        if cls is records.Sensors:
            found.host = value["host"]
            found.power_asked |= "power" in value["monitors"]
            found.baseline_w |= value.get("idle_w", {})
            for about in devices(value["devices"]):
                found.used[about["device"]] = about.get("used") is not False  # null: not known to be idle
                if about.get("source") is None:
                    found.absent[about["device"]] = str(about.get("reason"))
                else:
                    samples.setdefault(about["device"], 0)
        elif cls is records.Sample:
            count += 1
            found.seconds += value["seconds"]
            for device, energy_j in value.get("energy_j", {}).items():
                found.energy_j[device] = found.energy_j.get(device, 0.0) + energy_j
                samples[device] = samples.get(device, 0) + 1
    for device, number in samples.items():
        if number < count:
            found.energy_j.pop(device, None)
            found.absent[device] = f"has energy in {number} of {count} intervals"
    return found


def devices(listed: Sequence[Any]) -> list[dict[str, Any]]:
    """Those entries of a Sensors record that name a device."""
    return [each for each in listed if isinstance(each, dict) and isinstance(each.get("device"), str)]


def samples(path: Path) -> Iterator[tuple[str, records.Sample]]:
    """The host and the sample of each interval."""
    host = path.stem
    for _, cls, value in records.read_values(path):
        if cls is records.Sensors:
            host = value["host"]
        elif cls is records.Sample:
            yield host, records.make(cls, value)
