"""What every energy sensor is, whatever is behind it: hardware, nothing, or the log of an earlier run."""

from __future__ import annotations

import dataclasses
from collections import deque
from pathlib import Path
from typing import Protocol

from hvdtrain import records


class Sensor(Protocol):
    """One device that takes energy. The four facts are those of `records.Sensors.devices`."""

    @property
    def device(self) -> str: ...

    @property
    def name(self) -> str | None: ...

    @property
    def source(self) -> str | None: ...

    @property
    def reason(self) -> str | None: ...

    def take(self, now_s: float) -> float | None:
        """Joules since the last call, at `now_s` of the monotonic clock; None at the first, or where not measured."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Absent:
    """A device without a reading, and why."""

    device: str
    name: str | None
    reason: str
    source: None = None

    def take(self, now_s: float) -> None:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A device as `monitors/<host>.jsonl` recorded it: each call gives the energy of the next interval."""

    device: str
    name: str | None
    source: str | None
    reason: str | None
    energy_j: deque[float | None]

    def take(self, now_s: float) -> float | None:
        return self.energy_j.popleft() if self.energy_j else None


def replay(path: Path) -> list[Sensor]:
    """The twins of the sensors whose readings are in the log; those of several starts of a run follow each other."""
    devices: dict[str, Replay] = {}
    for record in records.read(path):
        if isinstance(record, records.Sensors):
            for about in record.devices:
                facts = {key: about[key] for key in ("device", "name", "source", "reason")}
                devices.setdefault(about["device"], Replay(**facts, energy_j=deque()))
            for device in devices.values():
                device.energy_j.append(None)  # the first reading of a start closes no interval
        elif isinstance(record, records.Sample):
            for device in devices.values():
                device.energy_j.append(record.energy_j.get(device.device))
    return list(devices.values())
