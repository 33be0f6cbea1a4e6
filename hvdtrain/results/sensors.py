"""Which devices of a run have a power sensor, by what they were read, and why others have none."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from hvdtrain import records
from hvdtrain.results import power
from hvdtrain.system.exits import Failure


@dataclasses.dataclass(frozen=True)
class Sensor:
    """One device that takes energy on one host."""

    host: str
    device: str
    name: str
    source: str | None
    """What reads it; None: nothing does"""
    reason: str
    """Why nothing does"""
    used: bool
    """Whether a rank computes on it"""


def of(run_dir: str | Path) -> Iterator[Sensor]:
    """All devices that the run's samplers listed when they were asked for power; nothing for files that are refused."""
    for path in sorted((Path(run_dir) / "monitors").glob("*.jsonl")):
        with contextlib.suppress(Failure):  # a problem of the run, listed as such
            for _, cls, value in records.read_values(path):
                if cls is not records.Sensors:
                    break
                for each in power.devices(value["devices"]) if "power" in value["monitors"] else ():
                    source = each.get("source")
                    yield Sensor(
                        host=str(value["host"]),
                        device=each["device"],
                        name=str(each.get("name") or "-"),
                        source=None if source is None else str(source),
                        reason=str(each.get("reason") or "reason not recorded"),
                        used=each.get("used") is not False,
                    )
