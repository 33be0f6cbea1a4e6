"""Energy of CPU packages and their DRAM: RAPL counters (Intel, AMD) through Linux powercap.

`/sys/class/powercap` has a folder for each zone, such as `intel-rapl:0`, and for its parts, such as `intel-rapl:0:1`.
A folder contains `name`, `energy_uj` (a counter in microjoules) and `max_energy_range_uj` (its largest value before it
wraps to 0). Zones overlap: a package contains its core and uncore, psys contains the packages, and intel-rapl-mmio
repeats the packages of intel-rapl. This module counts packages (or the dies of a package) and DRAM, which is not part
of a package.
Source: Linux, Documentation/power/powercap/powercap.rst and drivers/powercap/intel_rapl_common.c.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from hvdtrain.monitors.sensors import Sensor
from hvdtrain.system import proc

ZONE = re.compile(r"intel-rapl(-mmio)?(:\d+)+")
PACKAGE = re.compile(r"package-(\d+)(-die-\d+)?")
# Flat links in sysfs, or the tree that they point to
PATTERNS = ("intel-rapl*:*", "intel-rapl*/intel-rapl*:*", "intel-rapl*/intel-rapl*/intel-rapl*:*")
LARGEST_W = 1000.0
"""Upper limit of the power of a package or its DRAM. Determines how soon a counter may wrap"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zone:
    """One power zone. Either `device` or `left_out` (the reason for not counting it) is set."""

    path: Path
    name: str
    device: str | None
    left_out: str | None


def difference_uj(before: int, after: int, range_uj: int) -> int:
    """Microjoules between two readings of a counter that wraps after `range_uj`.

    Exact if the counter wrapped at most once; see `Rapl.safe_s`.
    """
    return after - before if after >= before else after - before + range_uj + 1


class Rapl(Sensor):
    """The sensor of one zone. Raises OSError or ValueError if the zone cannot be read."""

    source = "rapl"

    def __init__(self, zone: Zone, device: str, name: str) -> None:
        super().__init__(device, name)
        self._path = zone.path / "energy_uj"
        self.range_uj = int(_text(zone.path / "max_energy_range_uj"))
        if self.range_uj <= 0:
            raise ValueError("the range of its counter is unknown")
        int(_text(self._path))
        self.safe_s = self.range_uj / 1e6 / LARGEST_W
        self._before: int | None = None
        self._before_s = 0.0

    def take(self, now_s: float) -> float | None:
        try:
            after: int | None = int(_text(self._path))
        except (OSError, ValueError):
            after = None
        before, self._before = self._before, after
        seconds, self._before_s = now_s - self._before_s, now_s
        if before is None or after is None or seconds > self.safe_s:
            return None
        return difference_uj(before, after, self.range_uj) / 1e6


def zones(root: Path) -> list[Zone]:
    """All visible zones. intel-rapl comes before intel-rapl-mmio."""
    paths: dict[str, Path] = {}
    for pattern in PATTERNS:
        for path in root.glob(pattern):
            if ZONE.fullmatch(path.name):
                paths.setdefault(path.name, path)
    names = {key: name for key, path in paths.items() if (name := _text_or_none(path / "name"))}
    order = sorted(names, key=lambda key: ("-mmio" in key, [int(number) for number in key.split(":")[1:]]))
    labels: dict[str, str] = {}  # package zone -> 0, 0-die1 ...
    keys: dict[str, str] = {}  # device -> zone
    result = []
    for key in order:
        name, above = names[key], key.rpartition(":")[0]
        device: str | None = None
        left_out: str | None = None
        if package := PACKAGE.fullmatch(name):
            labels[key] = package[1] + (package[2] or "").replace("die-", "die")
            if keys.get(f"cpu{labels[key]}", "").partition(":")[0] == key.partition(":")[0]:
                labels[key] += f"-zone{key.rpartition(':')[2]}"  # before Linux 5.3, every die is called package-0
            device = f"cpu{labels[key]}"
        elif name == "dram" and above in labels:
            device = f"dram{labels[above]}"
        else:
            whole = "contains the packages" if name.startswith("psys") else "unknown kind of zone"
            left_out = f"part of {names[above]}" if above in labels else whole
        if device is not None and device in keys:
            left_out = f"the same energy as {keys[device]}"
            device = None
        elif device is not None:
            keys[device] = key
        result.append(Zone(path=paths[key], name=name, device=device, left_out=left_out))
    return result


def sensors(root: Path) -> list[Sensor]:
    """A sensor for each package and its DRAM. Missing sensors have a reason."""
    model = proc.processor() or "CPU"
    result: list[Sensor] = []
    counted = {zone.device: zone for zone in zones(root) if zone.device}
    for device, zone in counted.items():
        if device.startswith("cpu"):
            result.append(_sensor(zone, device, f"{model}, {zone.name}"))
            memory, name = device.replace("cpu", "dram"), f"DRAM of {zone.name}"
            if memory in counted:
                result.append(_sensor(counted[memory], memory, name))
            else:
                result.append(Sensor(memory, name, "this CPU's RAPL has no dram zone"))
    if result:
        return result
    reason = _why_no_zones(root)
    for number in _packages():
        result.append(Sensor(f"cpu{number}", model, reason))
        result.append(Sensor(f"dram{number}", f"DRAM of package-{number}", reason))
    return result


def _sensor(zone: Zone, device: str, name: str) -> Sensor:
    try:
        return Rapl(zone, device, name)
    except PermissionError as error:
        reason = f"{error.filename}: only root can read it; hint: sudo chmod a+r {zone.path.parent}/*/energy_uj"
        return Sensor(device, name, reason)
    except OSError as error:
        return Sensor(device, name, f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return Sensor(device, name, f"{zone.path}: {error}")


def _why_no_zones(root: Path) -> str:
    if not root.is_dir():
        return f"no {root}: the kernel provides no power zones (as usual in a virtual machine)"
    if any(ZONE.fullmatch(path.name) for path in root.iterdir()):
        return f"this container hides the zones in {root}; hint: with Docker, use --security-opt systempaths=unconfined"
    return f"no RAPL zone in {root}; hint: on a physical Intel or AMD CPU, run sudo modprobe intel_rapl_msr"


def _packages() -> list[int]:
    """Numbers of the CPU packages in this machine."""
    ids = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    texts = {_text_or_none(path) or "" for path in ids}
    return sorted({int(text) for text in texts if text.isdigit()}) or [0]


def _text(path: Path) -> str:
    return path.read_text().strip()


def _text_or_none(path: Path) -> str | None:
    try:
        return _text(path)
    except OSError:
        return None
