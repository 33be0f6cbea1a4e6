"""What every energy sensor is, whether hardware is behind it or nothing."""

from __future__ import annotations

import dataclasses
from typing import Protocol


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
