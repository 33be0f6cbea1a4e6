"""The sampler process: its records are correct, it always ends with its rank, and it never disturbs the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import LIMIT_S, PROGRAMS, ROOT, environment, until

from hvdtrain import records
from hvdtrain.monitors import sampler
from hvdtrain.monitors.nvml import Nvml
from hvdtrain.monitors.resources import TICK_S, Resources, group_cpu_s
from hvdtrain.monitors.sensors import Sensor
from hvdtrain.system import cgroup


def command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / "monitored.py"), str(folder), *words]


def settings(extra: Mapping[str, str] | None = None, **options: Any) -> dict[str, str]:
    return environment({"PYTHONPATH": str(ROOT), "MONITORED": json.dumps(options), **(extra or {})})


def watched(
    folder: Path, *words: str, before: tuple[str, ...] = (), extra: Mapping[str, str] | None = None, **options: Any
) -> tuple[dict[str, Any], list[Any], str]:
    """Runs the program to its end. Returns its own measurements, the sampler's records, and stderr."""
    done = subprocess.run(
        [*before, *command(folder, *words)],
        env=settings(extra, **options),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["left"] == {}, "processes are left behind"
    return facts, recorded(folder), done.stderr


def recorded(folder: Path) -> list[Any]:
    (path,) = folder.glob("monitors/*.jsonl")
    return list(records.read(path))


def samples(found: list[Any]) -> list[records.Sample]:
    return [record for record in found if isinstance(record, records.Sample)]


def test_power_alone_and_resources_alone(tmp_path: Path) -> None:
    _, (sensors, sample, *_), _ = watched(tmp_path / "p", "sleep=0.15", names="power")
    assert sensors.monitors == ["power"]
    assert sensors.devices
    assert sample.cpu_percent is None
    assert sample.ranks == sample.nics == []
    (tmp_path / "psutil.py").write_text("")  # modules of the current folder must not be imported
    there = ("env", "-C", str(tmp_path))
    facts, (sensors, sample, *_), _ = watched(tmp_path / "r", "sleep=0.15", before=there, names="resources")
    assert (sensors.monitors, sensors.devices, sample.energy_j) == (["resources"], [], {})
    assert sample.ranks[0]["rss_bytes"] > 0
    assert facts["nothing"] is None


# --- the end of a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["sleep=0.25", "die"], ["fork", "sleep=0.25", "die"]], ids=["alone", "forked"])
def test_the_sampler_ends_with_a_killed_rank(words: list[str], tmp_path: Path) -> None:
    """Even if a forked child of the rank survives and holds the sampler's input open."""
    with subprocess.Popen(
        command(tmp_path, *words), env=settings(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout
        facts = json.loads(rank.stdout.readline())
        assert rank.wait() == -signal.SIGKILL
        sampler, *forked = map(int, facts["children"])
        try:
            until(lambda: not _alive(sampler), 60, lambda: "the sampler outlives its rank")
        finally:
            for pid in forked:
                os.kill(pid, signal.SIGKILL)
    (path,) = tmp_path.glob("monitors/*.jsonl")
    assert path.read_bytes().endswith(b"\n")
    assert samples(recorded(tmp_path))[-1].unix_s >= facts["unix_s"]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_writable_folder_samples_are_missing_and_the_run_continues(tmp_path: Path) -> None:
    (tmp_path / "monitors").write_text("a file instead of the folder")
    done = subprocess.run(command(tmp_path, "sleep=0.1"), env=settings(), capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "sampling stops, the run continues" in done.stderr


def test_a_killed_or_hanging_sampler_does_not_disturb_the_run(tmp_path: Path) -> None:
    _, found, stderr = watched(tmp_path / "killed", "samples=2", f"kill={signal.SIGKILL:d}")
    assert samples(found)
    assert "ended early (-9); later samples are missing" in stderr
    _, _, stderr = watched(tmp_path / "hangs", f"kill={signal.SIGSTOP:d}", "impatient=")
    assert "did not end" in stderr
    # launchers send signals to all processes, but only the rank must react
    words = [f"kill={number:d}" for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
    facts, found, stderr = watched(tmp_path / "signalled", *words, "sleep=0.1")
    assert stderr == ""
    assert samples(found)[-1].unix_s >= facts["ended"]["unix_s"]


def test_samples_missed_during_a_pause_are_not_caught_up(tmp_path: Path) -> None:
    """A pause of ten intervals gives one long sample; the later samples come at their usual times."""
    words = ("samples=2", f"kill={signal.SIGSTOP:d}", "sleep=1", f"kill={signal.SIGCONT:d}", "samples=2")
    _, (_, *rest), _ = watched(tmp_path, *words, names="power")
    seconds = [sample.seconds for sample in rest]
    assert max(seconds) >= 1 and len(rest) <= (sum(seconds) - max(seconds)) / 0.1 + 3


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for _ in range(2):
        watched(tmp_path, "sleep=0.15", names="power")
    kinds = [record.type for record in recorded(tmp_path)]
    assert kinds.count("sensors") == 2
    assert kinds[0] == "sensors"
    assert kinds[-1] == "sample"


# --- sensors, from the folder and the driver to the file -------------------------------------------------------------


@pytest.fixture
def hardware(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with one package, at rest, and a GPU without an energy counter."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    # The range is so large that a sample may be a minute late.
    for name, text in (("name", "package-0"), ("energy_uj", "59999999999"), ("max_energy_range_uj", "60000000000")):
        (zone / name).write_text(text)
    gpu = {"name": "Tesla", "uuid": "GPU-1", "power_mw": 100_000, "utilisation": 7, "memory_bytes": 5}
    (tmp_path / "nvml.json").write_text(json.dumps({"gpus": [gpu]}))
    return {
        "HVDTRAIN_POWERCAP": str(tmp_path / "powercap"),
        "FAKE_NVML": str(tmp_path / "nvml.json"),
        "PYTHONPATH": f"{PROGRAMS / 'fake_nvml'}{os.pathsep}{ROOT}",
    }


def test_energy_from_sensor_to_file_and_replayed(hardware: dict[str, str], tmp_path: Path) -> None:
    counter = f"{hardware['HVDTRAIN_POWERCAP']}/intel-rapl:0/energy_uj"
    lost = json.dumps({"gpus": [{"power_mw": "ValueError", "name": "Tesla", "uuid": "GPU-1"}]})
    words = [f"replace={counter} 60000000000", "samples=2", f"replace={counter} 0", "samples=2"]
    words += [f"replace={hardware['FAKE_NVML']} {lost}", f"replace={counter} 123456", "samples=3"]
    ranks = [{"device": "cuda:0", "visible": None, "order": None}]
    facts, found, stderr = watched(tmp_path / "run", *words, extra=hardware, ranks=ranks, idle_s=0.25)
    sensors, rest = found[0], samples(found)
    about = {device["device"]: (device["source"], device["used"]) for device in sensors.devices}
    assert about == {"cpu0": ("rapl", False), "dram0": (None, False), "gpu0": ("nvml-power", True)}
    assert facts["nothing"] is None
    # idle: measured before, not among the samples
    assert sensors.idle_s == 0.25
    assert sensors.idle_w == {"cpu0": 0.0, "gpu0": pytest.approx(100)}
    assert facts["ready"]["s"] - facts["before"]["s"] > 0.25
    # package: 59,999,999,999 -> 60,000,000,000 -> 0 -> 123,456 with a range of 60,000,000,000
    assert round(sum(sample.energy_j["cpu0"] for sample in rest) * 1e6) == 1 + 1 + 123456
    # GPU: 100 W until it is lost, with any exception, then missing; the other sensors continue
    gpu = [sample.energy_j.get("gpu0") for sample in rest]
    assert gpu[0] == pytest.approx(100 * rest[0].seconds)
    assert gpu[-2:] == [None, None]
    assert rest[0].gpus == [{"device": "gpu0", "utilisation_percent": 7, "memory_used_bytes": 5}]
    assert rest[-1].gpus == [{"device": "gpu0", "utilisation_percent": None, "memory_used_bytes": None}]
    assert stderr.count("gpu0 has no reading") == 1


@pytest.mark.parametrize(
    ("first", "device", "recorded_here", "used"),
    [
        ({"machine": "another"}, "cuda:0", {"cpu0", "gpu0"}, {"cpu0": False, "gpu0": True}),
        # a virtual host on this machine, which computes on the CPU
        ({}, "cuda:0", set(), {"cpu0": True, "gpu0": True}),
        # a container on this machine, with another GPU
        ({"gpus": ["0000:9d:00.0"], "device": "cuda:0"}, "cpu", {"gpu0"}, {"cpu0": True, "gpu0": False}),
    ],
    ids=["machines", "one machine", "own GPU"],
)
def test_energy_of_a_machine_is_recorded_by_one_host(
    first: dict[str, Any],
    device: str,
    recorded_here: set[str],
    used: dict[str, bool],
    hardware: dict[str, str],
    tmp_path: Path,
) -> None:
    """Rank 0 is on the host `first`, rank 1 here."""
    here = {"rank": 1, "device": device, "visible": None, "order": None}
    ranks = [{"host": "first"} | first, here]
    facts, (sensors, *rest), stderr = watched(
        tmp_path / "run", "sleep=0.15", extra=hardware, ranks=ranks, names="power"
    )
    assert stderr == "" and facts["nothing"] is None, "the other host reports missing sensors"
    assert {name for sample in rest for name in sample.energy_j} == recorded_here
    about = {device["device"]: device for device in sensors.devices}
    assert {name: about[name]["used"] for name in used} == used
    for other in {"cpu0", "gpu0"} - recorded_here:
        assert about[other]["source"] is None
        assert about[other]["reason"] == "recorded by host first, on the same machine"


def test_missing_sensors_are_reported(tmp_path: Path) -> None:
    extra = {"HVDTRAIN_POWERCAP": str(tmp_path / "none"), "FAKE_NVML": str(tmp_path / "nvml.json")}
    (tmp_path / "nvml.json").write_text(json.dumps({"gpus": [], "init": "DriverNotLoaded"}))
    extra["PYTHONPATH"] = f"{PROGRAMS / 'fake_nvml'}{os.pathsep}{ROOT}"
    facts, (sensors, *_), _ = watched(tmp_path, "sleep=0.15", extra=extra, names="power")
    assert facts["nothing"].startswith("power: no sensor can be read on ")
    assert "Driver Not Loaded" in facts["nothing"]
    assert all(device["source"] is None and device["reason"] for device in sensors.devices)
    assert all(sample.energy_j == {} for sample in samples(recorded(tmp_path)))


# --- hosts that share a machine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "files", "cores", "folder"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1.5, "job"),
        ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "50000 100000"}, 0.5, "job/step"),
        ("0::/", {"cpu.max": "50000 100000"}, 0.5, "."),
        ("4:memory:/m\n2:cpu,cpuacct:/a/b", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "1"}, None, ""),
        ("2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "5000", "cpu/a/cpu.cfs_period_us": "10000"}, 0.5, "cpu/a"),
        # in a container: the path is the host's, the mount point is the group itself
        ("2:cpu:/docker/1f", {"cpu/cpu.cfs_quota_us": "5000", "cpu/cpu.cfs_period_us": "10000"}, 0.5, "cpu"),
        ("0::/job", {}, None, ""),
    ],
)
def test_the_quota_that_limits_a_host(
    own: str, files: dict[str, str], cores: float | None, folder: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    found = cgroup.limit(tmp_path / "own", tmp_path)
    assert (found and found.cores) == cores
    assert found is None or found.folder == tmp_path / folder


def test_cpu_time_of_a_group_is_the_kernels_sum_if_it_has_one(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert group_cpu_s(tmp_path) == pytest.approx(sum(os.times()[:4]), abs=3 * TICK_S)
    (tmp_path / "cpuacct.usage").write_text("2500000000\n")
    assert group_cpu_s(tmp_path) == 2.5
    (tmp_path / "cpu.stat").write_text("nr_periods 3\nusage_usec 1500000\n")
    assert group_cpu_s(tmp_path) == 1.5


@pytest.mark.root
def test_bytes_that_pass_two_nics_count_once(tmp_path: Path) -> None:
    """A bridge over a NIC, and the ifb of a throttle, also have the NIC's bytes."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine (Debian: apt-get install util-linux)")
    links = ["link add here type veth peer name there", "link add over type bridge", "link set here master over"]
    words = ["mount -t sysfs sysfs /sys", *(f"ip {link}" for link in (*links, "link add hvdifb0 type ifb"))]
    asked = [*(f"run={word}" for word in words), "samples=2"]
    _, (_, *rest), stderr = watched(tmp_path, *asked, before=("unshare", "--net", "--mount"), names="resources")
    assert {nic["nic"] for nic in rest[-1].nics} >= {"here", "there"} and stderr == ""
    assert not {nic["nic"] for nic in rest[-1].nics} & {"lo", "over", "hvdifb0"}


def test_counters_of_the_machine_are_the_kernels() -> None:
    """Sent and received are not swapped, and a CPU that waits for a disk is idle."""

    def kernels() -> tuple[float, dict[str, tuple[int, int]]]:
        idle, waiting = Path("/proc/stat").read_text().split()[4:6]
        lines = [line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
        return TICK_S * (int(idle) + int(waiting)), {line[0]: (int(line[9]), int(line[1])) for line in lines}

    counts = Resources([], Nvml())
    counts._limit = None
    (idle_s, nics), _, (idle_after_s, nics_after) = kernels(), counts.take(0.0), kernels()
    assert counts._machine and idle_s - TICK_S <= counts._machine[1] <= idle_after_s + TICK_S
    for nic, found in counts._nics.items():
        assert found and all(
            low <= here <= high for low, here, high in zip(nics[nic], found, nics_after[nic], strict=True)
        )


def test_idle_power_needs_all_readings_of_a_device() -> None:
    class Made(Sensor):
        source = "made"

        def take(self, now_s: float) -> float | None:
            self.taken = getattr(self, "taken", 0) + 1
            return None if self.device == "b" and self.taken == 3 else 0.02

    line: Any = SimpleNamespace(word=lambda until_s: time.sleep(max(0.0, until_s - time.monotonic())))
    found = sampler.idle_w(sampler.Host([Made(name, None) for name in "ab"], None, name="h"), 0.1, 0.02, line)
    assert found.keys() == {"a"} and found["a"] > 0
