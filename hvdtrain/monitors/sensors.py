"""What every energy sensor is, whether hardware is behind it or nothing."""

from __future__ import annotations


class Sensor:
    """One device that takes energy: this one without a reading, `reason` says why. The four facts are those of
    `records.Sensors.devices`. `take`: joules since the last call, at `now_s` of the monotonic clock; None at the first,
    or where not measured."""

    source: str | None = None

    def __init__(self, device: str, name: str | None, reason: str | None = None) -> None:
        self.device, self.name, self.reason = device, name, reason

    def take(self, now_s: float) -> float | None:
        return None
