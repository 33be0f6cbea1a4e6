"""GPUs through NVML, with a fake pynvml: energy, reasons for missing GPUs, and the GPUs that ranks use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.monitors.nvml import Nvml

FAKE = Path(__file__).parent / "programs" / "fake_nvml"
Driver = Callable[..., Nvml]


def gpu(number: int, **facts: Any) -> dict[str, Any]:
    uuid = f"GPU-{number}{number}11aa22-0000-0000-0000-000000000000"
    usual = {"name": "NVIDIA H200", "uuid": uuid, "energy_mj": 1000, "power_mw": 100_000}
    return usual | {"utilisation": 50, "memory_bytes": 2**30} | facts


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Makes or changes the driver's state, and opens it."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))

    def state(*gpus: dict[str, Any], init: str | None = None) -> Nvml:
        (tmp_path / "nvml.json").write_text(json.dumps({"init": init, "gpus": gpus}))
        return Nvml()

    yield state  # type: ignore[misc]
    sys.modules.pop("pynvml", None)


def test_the_energy_counter_is_read_to_the_millijoule(driver: Driver) -> None:
    (sensor,) = driver(gpu(0, energy_mj=2**53 + 1)).sensors()
    assert (sensor.device, sensor.name, sensor.source) == ("gpu0", "NVIDIA H200", "nvml-energy")
    assert sensor.take(0.0) is None
    driver(gpu(0, energy_mj=2**53 + 124))
    assert sensor.take(0.5) == 0.123
    driver(gpu(0, energy_mj=5))  # the driver was loaded again
    assert sensor.take(1.0) is None
    driver(gpu(0, energy_mj=1005))
    assert sensor.take(1.5) == 1.0


def test_power_is_integrated_without_a_counter(driver: Driver) -> None:
    (sensor,) = driver(gpu(0, energy_mj="NotSupported", power_mw=100_000)).sensors()
    assert sensor.source == "nvml-power"
    assert sensor.take(10.0) is None
    driver(gpu(0, energy_mj="NotSupported", power_mw=300_000))
    assert sensor.take(10.5) == pytest.approx((100 + 300) / 2 * 0.5)
    driver(gpu(0, energy_mj="NotSupported", power_mw="GpuIsLost"))
    assert sensor.take(11.0) is None
    driver(gpu(0, energy_mj="NotSupported", power_mw=200_000))
    assert sensor.take(11.5) is None  # the power in between is unknown
    assert sensor.take(12.0) == pytest.approx(100)


@pytest.mark.parametrize(
    ("error", "fix"),
    [("DriverNotLoaded", "modprobe"), ("LibraryNotFound", "install"), ("NoPermission", "ask for access")],
)
def test_without_a_driver_there_is_one_absent_gpu(error: str, fix: str, driver: Driver) -> None:
    (sensor,) = driver(init=error).sensors()
    assert (sensor.device, sensor.source, sensor.take(0.0)) == ("gpu", None, None)
    assert fix in (sensor.reason or "")
    assert driver(init=error).utilisation() == []


def test_a_gpu_without_access_does_not_affect_the_others(driver: Driver) -> None:
    nothing = {"energy_mj": "NotSupported", "power_mw": "NotSupported"}
    refused = {"energy_mj": "NoPermission", "power_mw": "NoPermission", "utilisation": "NotSupported"}
    nvml = driver(gpu(0, **nothing), gpu(1, **refused), gpu(2), gpu(3, handle="GpuIsLost"))
    sensors = nvml.sensors()
    assert [s.device for s in sensors] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert [s.source for s in sensors] == [None, None, "nvml-energy", None]
    assert "Not Supported" in (sensors[0].reason or "")
    assert "Insufficient Permissions" in (sensors[1].reason or "")
    assert "GPU is lost" in (sensors[3].reason or "")
    assert nvml.utilisation()[1:] == [
        {"device": "gpu1", "utilisation_percent": None, "memory_used_bytes": 2**30},
        {"device": "gpu2", "utilisation_percent": 50, "memory_used_bytes": 2**30},
        {"device": "gpu3", "utilisation_percent": None, "memory_used_bytes": None},
    ]


@pytest.mark.parametrize("what", ["handle", "name", "uuid", "energy_mj", "power_mw", "utilisation", "memory_bytes"])
def test_a_fault_of_one_gpu_leaves_the_others_as_they_are(what: str, driver: Driver) -> None:
    faulty = gpu(1, **{what: "ValueError"}) | ({"energy_mj": "NotSupported"} if what == "power_mw" else {})
    nvml = driver(gpu(0), faulty, gpu(2))
    sensors = nvml.sensors()
    assert [sensor.device for sensor in sensors] == ["gpu0", "gpu1", "gpu2"]
    assert [sensor.source for sensor in sensors[::2]] == ["nvml-energy"] * 2
    assert (sensors[1].source is None) == (what in ("handle", "power_mw")) == bool(sensors[1].reason)
    assert {"device": "gpu0", "utilisation_percent": 50, "memory_used_bytes": 2**30} in nvml.utilisation()
    rank = {"rank": 0, "device": "cuda:2", "visible": None, "order": None}
    ordered = what not in ("handle", "name")  # CUDA orders GPUs of different models differently
    assert list(nvml.used([rank]).values()) == ([False, False, True] if ordered else [None] * 3)


MIG = "MIG-5c8b0b4f-1111-2222-3333-444455556666"
SAME = (gpu(0), gpu(1, mig=[MIG]), gpu(2))
MIXED = (gpu(0, name="NVIDIA T4"), gpu(1))


@pytest.mark.parametrize(
    ("gpus", "device", "visible", "order", "used"),
    [
        (SAME, "cpu", None, None, "..."),
        (SAME, "cuda:1", None, None, ".1."),
        (SAME, "gpu:2", None, None, "..2"),
        (SAME, "cuda:0", "2,0", None, "..2"),
        (SAME, "cuda:1", " 2 , 0 ", None, "0.."),
        (SAME, "cuda:0", SAME[1]["uuid"], None, ".1."),
        (SAME, "cuda:0", "GPU-22", None, "..2"),
        (SAME, "cuda:1", f"0,{MIG}", None, ".1."),
        (SAME, "cuda:0", f"MIG-{SAME[2]['uuid']}/3/0", None, "..2"),
        # unknown: more than are visible, a list that ends at -1, a MIG instance that NVML does not show
        (SAME, "cuda:3", None, None, "???"),
        (SAME, "cuda:1", "1,-1,2", None, "???"),
        (SAME, "cuda:0", "", None, "???"),
        (SAME, "cuda:0", "MIG-0", None, "???"),
        (SAME, "cuda:0", "GPU-", None, "???"),
        # GPUs of two models: CUDA's first GPU is the fastest one, unless CUDA_DEVICE_ORDER is NVML's order
        (MIXED, "cuda:0", None, None, "??"),
        (MIXED, "cuda:0", "1", "FASTEST_FIRST", "??"),
        (MIXED, "cuda:0", "1", "PCI_BUS_ID", ".1"),
        (MIXED, "cuda:0", MIXED[1]["uuid"], None, ".1"),
    ],
)
def test_the_gpu_a_rank_computes_on(
    gpus: tuple[dict[str, Any], ...], device: str, visible: str | None, order: str | None, used: str, driver: Driver
) -> None:
    """`used` has a character per GPU: its number, `.` for an idle one, `?` if unknown."""
    found = driver(*gpus).used([{"rank": 0, "device": device, "visible": visible, "order": order}])
    assert "".join("?" if on is None else name[3:] if on else "." for name, on in found.items()) == used


def test_gpus_of_several_ranks_add_up(driver: Driver) -> None:
    ranks = [{"rank": n, "device": f"cuda:{n}", "visible": "0,2", "order": None} for n in range(2)]
    assert driver(*SAME).used(ranks) == {"gpu0": True, "gpu1": False, "gpu2": True}
    assert driver(*SAME).used([ranks[0], ranks[1] | {"visible": "7"}]) == {"gpu0": True, "gpu1": None, "gpu2": None}
