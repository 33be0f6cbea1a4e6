"""The interface of energy sensors."""

from __future__ import annotations


class Sensor:
    """A device that consumes energy. This base class has no reading, and `reason` explains why.

    device, name, source and reason are the fields of `records.Sensors.devices`.
    """

    source: str | None = None

    def __init__(self, device: str, name: str | None, reason: str | None = None) -> None:
        self.device, self.name, self.reason = device, name, reason

    def take(self, now_s: float) -> float | None:
        """Joules since the last call, at `now_s` of the monotonic clock; None at first and without a reading."""
        return None
