"""RAPL: counters are exact to the microjoule across wrap-arounds, and every tree of zones counts each joule once."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import finished

from hvdtrain.monitors import rapl

RANGE_UJ = 262143328850  # of Intel's packages


class Tree:
    """A fake /sys/class/powercap: the kernel's tree of zones, and sysfs's flat links to them."""

    def __init__(self, folder: Path, *, links: bool = True) -> None:
        self.root = folder / "class"
        self._devices, self._links = folder / "devices", links
        self.root.mkdir(parents=True)

    def zone(self, key: str, name: str, energy_uj: int = 0, range_uj: int = RANGE_UJ) -> None:
        control, *numbers = key.split(":")
        path = (self._devices if self._links else self.root) / control
        for depth in range(len(numbers)):
            path /= ":".join([control, *numbers[: depth + 1]])
        path.mkdir(parents=True)
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
        (path / "energy_uj").write_text(f"{energy_uj}\n")
        if self._links:
            (self.root / key).symlink_to(path)

    def file(self, key: str) -> Path:
        return next(path / "energy_uj" for path in self.root.glob(key if self._links else f"**/{key}"))

    def set(self, key: str, energy_uj: int) -> None:
        with self.file(key).open("r+") as stream:  # without truncating: ext4 syncs such a file as it is closed
            stream.write(f"{energy_uj:<20}\n")


INTEL, MMIO = "intel-rapl", "intel-rapl-mmio"
TREES = {
    "laptop": (
        {f"{INTEL}:0": "package-0", f"{INTEL}:0:0": "core", f"{INTEL}:0:1": "uncore", f"{INTEL}:1": "psys"}
        | {f"{MMIO}:0": "package-0"},
        {"cpu0": f"{INTEL}:0"},
    ),
    "server": (  # psys is numbered between the sockets, as on some machines
        {f"{INTEL}:0": "package-0", f"{INTEL}:0:0": "dram", f"{INTEL}:1": "psys"}
        | {f"{INTEL}:2": "package-1", f"{INTEL}:2:0": "core", f"{INTEL}:2:1": "dram"},
        {"cpu0": f"{INTEL}:0", "dram0": f"{INTEL}:0:0", "cpu1": f"{INTEL}:2", "dram1": f"{INTEL}:2:1"},
    ),
    "dies": (
        {f"{INTEL}:0": "package-0-die-0", f"{INTEL}:0:0": "dram", f"{INTEL}:1": "package-0-die-1"},
        {"cpu0-die0": f"{INTEL}:0", "dram0-die0": f"{INTEL}:0:0", "cpu0-die1": f"{INTEL}:1"},
    ),
    "mmio": ({f"{MMIO}:0": "package-0", f"{MMIO}:0:0": "dram"}, {"cpu0": f"{MMIO}:0", "dram0": f"{MMIO}:0:0"}),
    "dies before Linux 5.3": (  # the same name twice
        {f"{INTEL}:0": "package-0", f"{INTEL}:1": "package-0"},
        {"cpu0": f"{INTEL}:0", "cpu0-zone1": f"{INTEL}:1"},
    ),
}
"""Name -> zones with their names, and the zone of each device"""


def laptop(tree: Tree) -> None:
    for key, name in TREES["laptop"][0].items():
        tree.zone(key, name)


@pytest.mark.parametrize("links", [True, False], ids=["links", "tree"])
@pytest.mark.parametrize("name", TREES)
def test_each_joule_is_counted_once(name: str, links: bool, tmp_path: Path) -> None:
    """Every counter grows by a different amount; the sensors measure exactly the amounts of the expected zones."""
    tree = Tree(tmp_path, links=links)
    for key, zone in TREES[name][0].items():
        tree.zone(key, zone)
    sensors = rapl.sensors(tree.root)
    for sensor in sensors:
        assert sensor.take(0.0) is None
    zones = sorted(zone.path.name for zone in rapl.zones(tree.root))
    amounts = {key: 1000003 * 3**place for place, key in enumerate(zones)}
    for key, amount in amounts.items():
        tree.set(key, amount)
    measured = {sensor.device: joules for sensor in sensors if (joules := sensor.take(0.5)) is not None}
    assert measured == {device: amounts[key] / 1e6 for device, key in TREES[name][1].items()}
    # every zone is a device or left out with a reason, and each package's DRAM is there or absent with a reason
    assert all((zone.device is None) != (zone.left_out is None) for zone in rapl.zones(tree.root))
    packages = {s.device for s in sensors if s.device.startswith("cpu")}
    assert {s.device for s in sensors} == packages | {name.replace("cpu", "dram") for name in packages}
    assert all(s.reason for s in sensors if s.source is None)


def test_a_thousand_sequences_with_wraps_are_exact_to_the_microjoule(tmp_path: Path) -> None:
    chance = random.Random(20261121)
    trees = {range_uj: Tree(tmp_path / str(range_uj)) for range_uj in (1, 7, 65532610987, 65712999613, RANGE_UJ)}
    for range_uj, tree in trees.items():
        tree.zone("intel-rapl:0", "package-0", range_uj=range_uj)
    wraps = 0
    for _ in range(1000):
        range_uj, tree = chance.choice(list(trees.items()))
        true_uj = began_uj = chance.randrange(range_uj + 1)
        tree.set("intel-rapl:0", true_uj)
        sensor = rapl.Rapl(rapl.zones(tree.root)[0], "cpu0", "package-0")
        assert sensor.take(0.0) is None
        measured_uj = 0
        for _ in range(10):
            shown = true_uj % (range_uj + 1)
            # to the end of the range, beyond it, a whole round, or anywhere: at most one wrap per interval
            steps = [0, 1, range_uj, range_uj - shown, range_uj - shown + 1, chance.randrange(range_uj + 1)]
            true_uj += min(chance.choice(steps), range_uj)
            wraps += true_uj % (range_uj + 1) < shown
            tree.set("intel-rapl:0", true_uj % (range_uj + 1))
            joules = sensor.take(0.0)
            assert joules is not None
            measured_uj += round(joules * 1e6)
        assert measured_uj == true_uj - began_uj
    assert wraps > 1000


def test_an_interval_that_may_hide_a_second_wrap_is_missing(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.zone("intel-rapl:0", "package-0")
    sensor = rapl.sensors(tree.root)[0]
    sensor.take(0.0)
    tree.set("intel-rapl:0", 5)
    assert sensor.take(RANGE_UJ / 1e6 / rapl.LARGEST_W + 1) is None  # for example, the host slept
    tree.set("intel-rapl:0", 9)
    assert sensor.take(263.5) == 4e-6


def test_a_zone_that_disappears_for_a_while(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.zone("intel-rapl:0", "package-0", 100)
    sensor, file = rapl.sensors(tree.root)[0], tree.file("intel-rapl:0")
    sensor.take(0.0)
    file.rename(file.with_name("away"))
    assert sensor.take(0.5) is None
    file.with_name("away").rename(file)
    assert sensor.take(1.0) is None
    tree.set("intel-rapl:0", 350)
    assert sensor.take(1.5) == 250e-6


@pytest.mark.parametrize(
    ("energy", "range_uj", "reason"),
    [
        ("", RANGE_UJ, "invalid literal"),
        ("abc", RANGE_UJ, "invalid literal"),
        ("5", 0, "range of its counter is unknown"),
    ],
)
def test_zones_with_invalid_values_are_absent(energy: str, range_uj: int, reason: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.zone("intel-rapl:0", "package-0", range_uj=range_uj)
    tree.file("intel-rapl:0").write_text(energy)
    sensor = rapl.sensors(tree.root)[0]
    assert sensor.device == "cpu0"
    assert sensor.source is None
    assert reason in (sensor.reason or "")


def listed(root: Path, *flags: str, before: Sequence[str] = ()) -> str:
    """The output of `hvdtrain monitors`."""
    command = [sys.executable, "-m", "hvdtrain.monitors"]
    done = finished([*before, *command, *flags], extra={"HVDTRAIN_POWERCAP": str(root)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_counters_that_only_root_may_read_are_absent_with_a_hint(tmp_path: Path) -> None:
    """As seen by an ordinary user. Root gives up its privilege over file modes."""
    tree = Tree(tmp_path)
    laptop(tree)
    for key in ("intel-rapl:0", "intel-rapl:0:0"):
        tree.file(key).chmod(0)
    caps = "-dac_override,-dac_read_search"
    without = ["setpriv", "--bounding-set", caps, "--inh-caps", caps] if os.geteuid() == 0 else []
    if without and shutil.which("setpriv") is None:
        pytest.skip("no setpriv on this machine (Debian: apt-get install util-linux)")
    device = json.loads(listed(tree.root, "--json", before=without))["devices"][0]
    assert (device["device"], device["source"], device["power_w"]) == ("cpu0", None, None)
    assert f"sudo chmod a+r {tree.root}/*/energy_uj" in device["reason"]
    assert "/etc/udev/rules.d" in listed(tree.root, before=without)


def test_no_powercap_no_zones_and_hidden_zones_have_reasons(tmp_path: Path) -> None:
    def reason() -> str:
        sensors = rapl.sensors(tmp_path / "powercap")
        assert {s.device[:3] for s in sensors} == {"cpu", "dra"}
        assert all(s.source is None and s.take(0.0) is None for s in sensors)
        return sensors[0].reason or ""

    assert "no power zones" in reason()
    (tmp_path / "powercap").mkdir()
    assert "modprobe" in reason()
    (tmp_path / "powercap" / "intel-rapl:0").symlink_to(tmp_path / "masked")
    assert "container hides" in reason()
