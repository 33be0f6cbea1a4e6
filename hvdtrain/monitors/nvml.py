"""NVIDIA GPUs through NVML (pynvml): their energy, utilisation and memory, and which of them the ranks compute on.

From Volta on the driver counts each GPU's energy in millijoules; before, its power is integrated over the samples
(trapezoids), which misses what changes faster than they come. Both are of the whole board, MIG instances included.
Each device fails alone: whatever exception a call raises, the others are read all the same.
Source: NVML API Reference, nvmlDeviceGetTotalEnergyConsumption and nvmlDeviceGetPowerUsage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdtrain.monitors.sensors import Sensor

FIXES = {
    "LibraryNotFound": "install NVIDIA's driver, if this host has such a GPU",
    "DriverNotLoaded": "sudo modprobe nvidia, then nvidia-smi should show the GPU",
    "LibRmVersionMismatch": "the driver was updated: reboot",
    "NoPermission": "this user may not open /dev/nvidia*: ask for access (often a group), or for GPUs in the Slurm job",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in NVML's order, that of the PCI bus."""

    device: str
    """`gpu0` ..."""
    name: str | None
    uuid: str | None
    handle: Any
    """NVML's; None if the GPU cannot be opened"""
    reason: str | None
    """Why it cannot be opened"""


class Counter(Sensor):
    """The GPU's own energy counter. It never wraps (64 bits); a smaller reading means that it was reset."""

    source = "nvml-energy"

    def __init__(self, gpu: Gpu, read: Callable[[], int | None]) -> None:
        super().__init__(gpu.device, gpu.name)
        self._read = read
        self._before: int | None = None

    def take(self, now_s: float) -> float | None:
        before, self._before = self._before, self._read()
        if before is None or self._before is None or self._before < before:
            return None
        return (self._before - before) / 1000


class Integral(Counter):
    """The GPU's power in milliwatts, which counts nothing: integrated over the samples."""

    source = "nvml-power"
    _before_s = 0.0

    def take(self, now_s: float) -> float | None:
        before, self._before = self._before, self._read()
        seconds, self._before_s = now_s - self._before_s, now_s
        if before is None or self._before is None:
            return None
        return (before + self._before) / 2 * seconds / 1000


class Nvml:
    """The GPUs of this host; none, and `reason`, where there is no NVML."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.reason: str | None = None
        try:
            import pynvml
        except Exception as error:
            self.reason = f"{error}: pip install nvidia-ml-py"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except Exception as error:
            self.reason = self._why(error)
            return
        self.gpus = [self._open(index) for index in range(count)]
        if not self.gpus:
            self.reason = "NVML: NVIDIA's driver shows this process no GPU"

    def _open(self, index: int) -> Gpu:
        handle, reason = None, None
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:
            reason = self._why(error)
        name, uuid = self._read("nvmlDeviceGetName", handle), self._read("nvmlDeviceGetUUID", handle)
        return Gpu(device=f"gpu{index}", name=name, uuid=uuid, handle=handle, reason=reason)

    def _why(self, error: Exception) -> str:
        name = type(error).__name__
        kind = name.removeprefix("NVMLError_")
        what = f"NVML: {error}" if isinstance(error, self._nvml.NVMLError) else f"NVML: {name}: {error}"
        return what + (f"; {FIXES[kind]}" if kind in FIXES else "")

    def _read(self, function: str, handle: Any) -> Any:
        """NVML's answer; None if there is none."""
        with contextlib.suppress(Exception):
            return getattr(self._nvml, function)(handle) if handle is not None else None
        return None

    # --- energy -------------------------------------------------------------------------------------------------

    def sensors(self) -> list[Sensor]:
        """One for each GPU; without NVML a single absent one, whatever GPUs there may be."""
        if not self.gpus:
            return [Sensor("gpu", None, self.reason)]
        return [self._sensor(gpu) for gpu in self.gpus]

    def _sensor(self, gpu: Gpu) -> Sensor:
        reason = gpu.reason
        if gpu.handle is not None:
            kinds = {"nvmlDeviceGetTotalEnergyConsumption": Counter, "nvmlDeviceGetPowerUsage": Integral}
            for function, kind in kinds.items():
                try:
                    getattr(self._nvml, function)(gpu.handle)
                except Exception as error:
                    reason = f"{function[13:]}: {self._why(error)}"
                    continue
                return kind(gpu, functools.partial(self._read, function, gpu.handle))
        return Sensor(gpu.device, gpu.name, reason)

    # --- use ----------------------------------------------------------------------------------------------------

    def figures(self) -> list[dict[str, Any]]:
        """For `records.Sample.gpus`. NVML's memory figure includes what the driver keeps for itself."""
        found = []
        for gpu in self.gpus:
            rates = self._read("nvmlDeviceGetUtilizationRates", gpu.handle)
            memory = self._read("nvmlDeviceGetMemoryInfo", gpu.handle)
            used = {"utilisation_percent": rates and rates.gpu, "memory_used_bytes": memory and memory.used}
            found.append({"device": gpu.device, **used})
        return found

    def used(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, bool | None]:
        """For each GPU whether one of the ranks (offers) computes on it; None if that cannot be told."""
        certain: set[str] = set()
        unclear = False
        for rank in ranks:
            kind, _, number = rank["device"].partition(":")
            if kind == "cpu":
                continue
            mine = self._visible(rank["visible"], rank["order"])
            if number.isdigit() and int(number) < len(mine):
                certain.add(mine[int(number)])
            else:
                unclear = True
        without = None if unclear else False
        return {gpu.device: True if gpu.device in certain else without for gpu in self.gpus}

    def _visible(self, visible: str | None, order: str | None) -> list[str]:
        """The GPUs that CUDA shows a process, in CUDA's order; empty if that order cannot be told.

        CUDA_VISIBLE_DEVICES lists numbers, or UUIDs that may be cut short, and ends at the first invalid one. Numbers
        count the fastest GPU first unless CUDA_DEVICE_ORDER is PCI_BUS_ID, which is the same if all are of one model.
        """
        names = {gpu.name for gpu in self.gpus}
        numbered = order == "PCI_BUS_ID" or len(self.gpus) == 1 or (len(names) == 1 and None not in names)
        if visible is None:
            return [gpu.device for gpu in self.gpus] if numbered else []
        found: list[str] = []
        for word in (word.strip() for word in visible.split(",")):
            if word.isdigit():
                matching = [gpu.device for gpu in self.gpus[int(word) :][:1] if numbered]
            else:
                uuid = self._board(word) if word.startswith("MIG-") else word
                matching = [gpu.device for gpu in self.gpus if word and gpu.uuid and gpu.uuid.startswith(uuid)]
            if len(matching) != 1:
                break
            found += matching
        return found

    def _board(self, mig: str) -> str:
        """UUID of the GPU that a MIG instance is part of."""
        if mig.startswith("MIG-GPU-"):  # drivers before R470: MIG-GPU-<UUID>/<instance>/<compute instance>
            return mig.removeprefix("MIG-").partition("/")[0]
        with contextlib.suppress(Exception):
            instance = self._nvml.nvmlDeviceGetHandleByUUID(mig.encode())
            return self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance))
        return "none"
