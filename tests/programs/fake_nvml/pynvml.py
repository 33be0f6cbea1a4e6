"""Stands in for NVIDIA's pynvml where there is no such GPU: put this folder first on PYTHONPATH.

The JSON file that FAKE_NVML names says what the driver does, and is read at every call:
{"init": "DriverNotLoaded" or null, "gpus": [{"name", "uuid", "energy_mj", "power_mw", "utilisation", "memory_bytes",
"mig": [UUIDs of its instances]}]}. In place of a value, the name of an error is what asking for it raises: one of
NVML's, or ValueError; "handle" may be one too. It follows pynvml 13: same names, results and errors.
"""

import json
import os
import types
from pathlib import Path


class NVMLError(Exception):
    pass


MESSAGES = {
    "DriverNotLoaded": "Driver Not Loaded",
    "LibraryNotFound": "NVML Shared Library Not Found",
    "NoPermission": "Insufficient Permissions",
    "NotSupported": "Not Supported",
    "GpuIsLost": "GPU is lost",
    "NotFound": "Not Found",
    "ValueError": "not an error of NVML's",
}
ERRORS = {name: type(f"NVMLError_{name}", (NVMLError,), {}) for name in MESSAGES} | {"ValueError": ValueError}


def failure(name):
    return ERRORS[name](MESSAGES[name])


def state():
    return json.loads(Path(os.environ["FAKE_NVML"]).read_text())


def value(handle, key):
    found = state()["gpus"][handle[1]].get(key, "NotSupported")
    if isinstance(found, str) and found in MESSAGES:
        raise failure(found)
    return found


def nvmlInit():
    if state().get("init"):
        raise failure(state()["init"])


def nvmlDeviceGetCount():
    return len(state()["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    if error := state()["gpus"][index].get("handle"):
        raise failure(error)
    return ("gpu", index)


def nvmlDeviceGetName(handle):
    return value(handle, "name")


def nvmlDeviceGetUUID(handle):
    return value(handle, "uuid")


def nvmlDeviceGetTotalEnergyConsumption(handle):
    return value(handle, "energy_mj")


def nvmlDeviceGetPowerUsage(handle):
    return value(handle, "power_mw")


def nvmlDeviceGetUtilizationRates(handle):
    return types.SimpleNamespace(gpu=value(handle, "utilisation"), memory=0)


def nvmlDeviceGetMemoryInfo(handle):
    return types.SimpleNamespace(used=value(handle, "memory_bytes"))


def nvmlDeviceGetHandleByUUID(uuid):
    for index, gpu in enumerate(state()["gpus"]):
        if uuid.decode() in gpu.get("mig", []):
            return ("mig", index)
    raise failure("NotFound")


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return ("gpu", handle[1])
