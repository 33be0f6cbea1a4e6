"""The sampler process: reads sensors and counters at fixed times and writes one line per interval.

It receives lines on its standard input: an order (JSON, see `Monitor`), `begin`, `end`. It answers `ready`, followed by
a message if it has nothing to measure, and `began`. It ends when the rank that started it ends, because its input
closes or its parent changes. After an error it prints one line on stderr, stops sampling and waits for that end, since
a process that exits before its parent becomes a zombie.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import records
from hvdtrain.monitors import rapl, say
from hvdtrain.monitors.nvml import Nvml
from hvdtrain.monitors.sensors import Sensor
from hvdtrain.system.exits import Failure

PARENT_CHECK_S = 1.0


class Line:
    """Lines from the rank that started this process."""

    def __init__(self) -> None:
        self._received = b""
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._parent = os.getppid()

    def word(self, until_s: float | None = None) -> str | None:
        """The next line; None if there is none until `until_s` of the monotonic clock. `end` if the rank has ended."""
        while b"\n" not in self._received:
            left_s = PARENT_CHECK_S if until_s is None else until_s - time.monotonic()
            # A forked child of the rank may keep our input open.
            if os.getppid() != self._parent:
                return "end"
            if left_s <= 0:
                return None
            # poll(2) waits whole milliseconds. Wake up after the deadline rather than before it.
            if self._poll.poll(int(min(left_s, PARENT_CHECK_S) * 1000) + 1):
                part = os.read(0, 65536)
                if not part:
                    return "end"
                self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()


class Host:
    """The sensors and counters of this host. `sensors` is empty without the power monitor."""

    def __init__(self, sensors: Sequence[Sensor], resources: Any, *, name: str) -> None:
        self._sensors, self._resources, self._name = sensors, resources, name
        self._before_ns: int | None = None
        self._lost: set[str] = set()

    def take(self) -> records.Sample | None:
        """The interval since the last call. The first call starts an interval and returns None."""
        now_ns, unix_s = time.monotonic_ns(), time.time()
        before_ns, self._before_ns = self._before_ns, now_ns
        seconds = 0.0 if before_ns is None else (now_ns - before_ns) / 1e9
        energy_j = {}
        for sensor in self._sensors:
            joules = sensor.take(now_ns / 1e9)
            if joules is not None:
                energy_j[sensor.device] = joules
            elif before_ns is not None and sensor.source and sensor.device not in self._lost:
                self._lost.add(sensor.device)
                say(self._name, f"{sensor.device} has no reading; its energy is missing until it returns")
        counters = self._resources.take(seconds) if self._resources else {}
        if before_ns is None:
            return None
        return records.Sample(unix_s=unix_s, seconds=seconds, energy_j=energy_j, **counters)


def answer(word: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, word.encode() + b"\n")


def in_use(sensor: Sensor, order: Mapping[str, Any], nvml: Nvml) -> bool | None:
    """Whether a rank uses the device; None if unknown."""
    if sensor.device.startswith("gpu"):
        on_gpu = any(rank["device"] != "cpu" for rank in order["sharing"])
        return nvml.used(order["sharing"]).get(sensor.device, on_gpu)
    return any(rank["device"] == "cpu" for rank in order["neighbours"])


def recorded_here(sensors: list[Sensor], recorder: str, host: str) -> list[Sensor]:
    """The sensors, or replacements without readings if another host on this machine records them."""
    if recorder == host:
        return sensors
    reason = f"recorded by host {recorder}, on the same machine"
    return [Sensor(sensor.device, sensor.name, reason) for sensor in sensors]


def idle_w(host: Host, idle_s: float, interval_s: float, line: Line) -> dict[str, float]:
    """Mean power of each device over the next `idle_s`. Devices with missing readings are left out."""
    began_s = time.monotonic()
    host.take()
    energy_j: dict[str, list[float]] = {}
    seconds, count = 0.0, 0
    while seconds < idle_s:
        if line.word(min(began_s + (count + 1) * interval_s, began_s + idle_s)) == "end":
            break
        sample = host.take()
        assert sample is not None
        seconds, count = seconds + sample.seconds, count + 1
        for device, joules in sample.energy_j.items():
            energy_j.setdefault(device, []).append(joules)
    return {device: sum(parts) / seconds for device, parts in energy_j.items() if len(parts) == count}


def watch(order: dict[str, Any], line: Line) -> None:
    """Executes the order until the word `end`. Raises Failure if the file cannot be written."""
    name, interval_s, monitors = order["host"], order["interval_s"], order["monitors"]
    nvml = Nvml()
    sensors: list[Sensor] = []
    resources = None
    if "power" in monitors:
        cpu, gpu = rapl.sensors(Path(order["powercap"])), nvml.sensors()
        sensors = [
            *recorded_here(cpu, order["recorder"]["cpu"], name),
            *recorded_here(gpu, order["recorder"]["gpu"], name),
        ]
    if "resources" in monitors:
        from hvdtrain.monitors.resources import Resources

        resources = Resources(order["ranks"], nvml)
    devices = [
        {"device": s.device, "name": s.name, "source": s.source, "reason": s.reason, "used": in_use(s, order, nvml)}
        for s in sensors
    ]
    writer = records.Writer(Path(order["path"]))
    baseline = idle_w(Host(sensors, None, name=name), order["idle_s"], interval_s, line) if order["idle_s"] else {}
    unavailable = sensors and order["recorder"]["cpu"] == name and not any(sensor.source for sensor in sensors)
    reasons = "; ".join(dict.fromkeys(sensor.reason or "" for sensor in sensors))
    answer(f"ready power: no sensor can be read on {name} ({reasons})" if unavailable else "ready")
    if line.word() != "begin":
        return
    host = Host(sensors, resources, name=name)
    began_s = time.monotonic()
    host.take()
    answer("began")
    writer.write(
        records.Sensors(
            host=name,
            unix_s=time.time() - (time.monotonic() - began_s),
            interval_s=interval_s,
            monitors=monitors,
            devices=devices,
            resources=resources.describe() if resources else {},
            idle_s=order["idle_s"] or None,
            idle_w=baseline,
        )
    )
    word, intervals = None, 0
    while word != "end":  # a delay does not shift later samples
        intervals = max(intervals, int((time.monotonic() - began_s) / interval_s)) + 1
        word = line.word(began_s + intervals * interval_s)
        sample = host.take()
        assert sample is not None
        writer.write(sample)


def main() -> None:
    """Runs the process. The first line of its input is the order."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # Slurm signals all processes of a step, but the rank needs time to save a checkpoint
    line = Line()
    first = line.word()
    if not first or first == "end":
        return
    order = json.loads(first)
    try:
        watch(order, line)
    except Failure as failure:
        cause = failure.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else str(failure)
        say(order["host"], f"{order['path']}: {reason}; sampling stops, the run continues")
    except Exception as error:
        say(order["host"], f"{type(error).__name__}: {error}; sampling stops, the run continues")
    else:
        return
    os.close(1)
    while line.word() != "end":
        pass
