"""NVIDIA GPUs through NVML (pynvml): energy, utilisation and memory, and the GPUs that the ranks use.

Since Volta, the driver counts the energy of each GPU in millijoules. For older GPUs, power is integrated over the
samples (trapezoidal rule), which misses faster changes. Both values cover the whole board, including MIG instances.
If a call for one GPU fails with any exception, the other GPUs are still read.
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
    "LibraryNotFound": "install the NVIDIA driver, if this host has an NVIDIA GPU",
    "DriverNotLoaded": "run sudo modprobe nvidia; nvidia-smi should then show the GPU",
    "LibRmVersionMismatch": "reboot, since the driver was updated",
    "NoPermission": "ask for access to /dev/nvidia* (often through a group), or for GPUs in the Slurm job",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. NVML orders GPUs by their PCI bus."""

    device: str
    """`gpu0` ..."""
    name: str | None
    uuid: str | None
    handle: Any
    """NVML's handle; None if the GPU cannot be opened"""
    reason: str | None
    """Why it cannot be opened"""


class Counter(Sensor):
    """The energy counter of a GPU. It has 64 bits and never wraps; a smaller reading means that it was reset."""

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
    """The power of a GPU, read in milliwatts and integrated over the samples."""

    source = "nvml-power"
    _before_s = 0.0

    def take(self, now_s: float) -> float | None:
        before, self._before = self._before, self._read()
        seconds, self._before_s = now_s - self._before_s, now_s
        if before is None or self._before is None:
            return None
        return (before + self._before) / 2 * seconds / 1000


class Nvml:
    """The GPUs of this host. If NVML is missing, `gpus` is empty and `reason` explains why."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.reason: str | None = None
        try:
            import pynvml
        except Exception as error:
            self.reason = f"{error}; hint: pip install nvidia-ml-py"
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
            self.reason = "NVML: the NVIDIA driver shows no GPU to this process"

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
        return what + (f"; hint: {FIXES[kind]}" if kind in FIXES else "")

    def _read(self, function: str, handle: Any) -> Any:
        """The result of an NVML function; None if it fails."""
        with contextlib.suppress(Exception):
            return getattr(self._nvml, function)(handle) if handle is not None else None
        return None

    # --- energy -------------------------------------------------------------------------------------------------

    def sensors(self) -> list[Sensor]:
        """One sensor for each GPU. Without NVML, a single sensor without readings."""
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

    # --- utilisation ------------------------------------------------------------------------------------------

    def utilisation(self) -> list[dict[str, Any]]:
        """Values for `records.Sample.gpus`. NVML's memory use includes the driver's own."""
        values = []
        for gpu in self.gpus:
            rates = self._read("nvmlDeviceGetUtilizationRates", gpu.handle)
            memory = self._read("nvmlDeviceGetMemoryInfo", gpu.handle)
            used = {"utilisation_percent": rates and rates.gpu, "memory_used_bytes": memory and memory.used}
            values.append({"device": gpu.device, **used})
        return values

    def used(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, bool | None]:
        """For each GPU, whether one of the ranks uses it; None if unknown."""
        certain: set[str] = set()
        unclear = False
        for rank in ranks:
            kind, _, number = rank["device"].partition(":")
            if kind == "cpu":
                continue
            visible = self._visible(rank["visible"], rank["order"])
            if number.isdigit() and int(number) < len(visible):
                certain.add(visible[int(number)])
            else:
                unclear = True
        otherwise = None if unclear else False
        return {gpu.device: True if gpu.device in certain else otherwise for gpu in self.gpus}

    def _visible(self, visible: str | None, order: str | None) -> list[str]:
        """The GPUs that a process sees, in CUDA's order; empty if the order is unknown.

        CUDA_VISIBLE_DEVICES lists numbers or prefixes of UUIDs; CUDA ignores the list from the first invalid entry. By
        default CUDA numbers the fastest GPU first. With CUDA_DEVICE_ORDER=PCI_BUS_ID, or if all GPUs are of the same
        model, the numbers are those of NVML.
        """
        names = {gpu.name for gpu in self.gpus}
        numbered = order == "PCI_BUS_ID" or len(self.gpus) == 1 or (len(names) == 1 and None not in names)
        if visible is None:
            return [gpu.device for gpu in self.gpus] if numbered else []
        devices: list[str] = []
        for word in (word.strip() for word in visible.split(",")):
            if word.isdigit():
                matching = [gpu.device for gpu in self.gpus[int(word) :][:1] if numbered]
            else:
                uuid = self._board(word) if word.startswith("MIG-") else word
                matching = [gpu.device for gpu in self.gpus if word and gpu.uuid and gpu.uuid.startswith(uuid)]
            if len(matching) != 1:
                break
            devices += matching
        return devices

    def _board(self, mig: str) -> str:
        """UUID of the GPU that contains a MIG instance."""
        if mig.startswith("MIG-GPU-"):  # drivers before R470: MIG-GPU-<UUID>/<instance>/<compute instance>
            return mig.removeprefix("MIG-").partition("/")[0]
        with contextlib.suppress(Exception):
            instance = self._nvml.nvmlDeviceGetHandleByUUID(mig.encode())
            return self._nvml.nvmlDeviceGetUUID(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance))
        return "none"
