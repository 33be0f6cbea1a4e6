"""Energy of CPU packages and their DRAM: RAPL counters (Intel, AMD) as Linux's powercap shows them.

`/sys/class/powercap` has a folder per zone, `intel-rapl:0` and, for a part of it, `intel-rapl:0:1`, with `name`,
`energy_uj` (a counter in microjoules) and `max_energy_range_uj` (the largest value it shows before it starts again at
0). Not every zone is energy of its own: a package contains its core and uncore, psys contains the packages, and
intel-rapl-mmio shows the packages of intel-rapl once more. Counted are packages, one per die where a package has
several, and DRAM, which no package contains.
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
# As flat links in sysfs, or as the tree that they lead to
PLACES = ("intel-rapl*:*", "intel-rapl*/intel-rapl*:*", "intel-rapl*/intel-rapl*/intel-rapl*:*")
LARGEST_W = 1000.0
"""More than any one package or its DRAM takes: tells how soon a counter may pass its whole range"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zone:
    """One power zone: a device of its own, or left out for a reason."""

    path: Path
    name: str
    device: str | None
    left_out: str | None


def difference_uj(before: int, after: int, range_uj: int) -> int:
    """Microjoules from one reading to the next, of a counter that shows 0 to `range_uj` and then 0 again.

    Exact if it wrapped at most once in between; see `Rapl.safe_s`.
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
            raise ValueError("its range is not known, so a wrap-around cannot be told")
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
    """All zones that can be seen, each with its device or why it is left out; intel-rapl before intel-rapl-mmio."""
    paths: dict[str, Path] = {}
    for place in PLACES:
        for path in root.glob(place):
            if ZONE.fullmatch(path.name):
                paths.setdefault(path.name, path)
    names = {key: name for key, path in paths.items() if (name := _text_or_none(path / "name"))}
    order = sorted(names, key=lambda key: ("-mmio" in key, [int(number) for number in key.split(":")[1:]]))
    labels: dict[str, str] = {}  # of package zones: 0, 0-die1
    keys: dict[str, str] = {}  # the zone that each device is
    found = []
    for key in order:
        name, above = names[key], key.rpartition(":")[0]
        device: str | None = None
        left_out: str | None = None
        if package := PACKAGE.fullmatch(name):
            labels[key] = package[1] + (package[2] or "").replace("die-", "die")
            if keys.get(f"cpu{labels[key]}", "").partition(":")[0] == key.partition(":")[0]:
                labels[key] += f"-zone{key.rpartition(':')[2]}"  # kernels before 5.3 call every die package-0
            device = f"cpu{labels[key]}"
        elif name == "dram" and above in labels:
            device = f"dram{labels[above]}"
        else:
            whole = "contains the packages" if name.startswith("psys") else "no kind of zone that is known here"
            left_out = f"part of {names[above]}" if above in labels else whole
        if device is not None and device in keys:
            left_out = f"the same energy as {keys[device]}"
            device = None
        elif device is not None:
            keys[device] = key
        found.append(Zone(path=paths[key], name=name, device=device, left_out=left_out))
    return found


def sensors(root: Path, interval_s: float) -> list[Sensor]:
    """A sensor for each package and its DRAM, absent ones with the reason; read every `interval_s`."""
    model = proc.processor() or "CPU"
    found: list[Sensor] = []
    counted = {zone.device: zone for zone in zones(root) if zone.device}
    for device, zone in counted.items():
        if device.startswith("cpu"):
            found.append(_sensor(zone, device, f"{model}, {zone.name}", interval_s))
            memory, name = device.replace("cpu", "dram"), f"DRAM of {zone.name}"
            if memory in counted:
                found.append(_sensor(counted[memory], memory, name, interval_s))
            else:
                found.append(Sensor(memory, name, "this CPU's RAPL has no dram zone"))
    if found:
        return found
    reason = _why_no_zones(root)
    for number in _packages():
        found.append(Sensor(f"cpu{number}", model, reason))
        found.append(Sensor(f"dram{number}", f"DRAM of package-{number}", reason))
    return found


def _sensor(zone: Zone, device: str, name: str, interval_s: float) -> Sensor:
    try:
        sensor = Rapl(zone, device, name)
    except PermissionError as error:
        reason = f"{error.filename}: only root may read it; sudo chmod a+r {zone.path.parent}/*/energy_uj allows all"
        return Sensor(device, name, reason)
    except OSError as error:
        return Sensor(device, name, f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return Sensor(device, name, f"{zone.path}: {error}")
    if interval_s > sensor.safe_s:
        reason = (
            f"its counter starts again after {sensor.range_uj / 1e6:.0f} J, perhaps twice in {interval_s:g} s: "
            f"lower --monitor-ms to {sensor.safe_s * 1000:.0f}"
        )
        return Sensor(device, name, reason)
    return sensor


def _why_no_zones(root: Path) -> str:
    if not root.is_dir():
        return f"no {root}: this kernel shows no power zones (usual in a virtual machine)"
    if any(ZONE.fullmatch(path.name) for path in root.iterdir()):
        return (
            f"the zones in {root} lead nowhere: this container hides them (Docker: --security-opt "
            "systempaths=unconfined)"
        )
    return f"no RAPL zone in {root}: sudo modprobe intel_rapl_msr, if the CPU is Intel's or AMD's and no virtual one"


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
